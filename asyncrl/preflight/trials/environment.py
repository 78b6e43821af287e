"""Check the environment before anything is allocated."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Collection

from asyncrl.config import AgentCommand, Config, ConfigError, EnvironmentConfig
from asyncrl.environments.agent import command_columns
from asyncrl.environments.pool import EnvironmentFailedError, EnvironmentPool
from asyncrl.text.tokenizer import load_tokenizer


def check_agent(environment: EnvironmentConfig | None, columns: Collection[str]) -> None:
    """Raise ConfigError if the agent's program is not on this machine, or if its command names a
    column that a task does not have."""
    if not isinstance(environment, AgentCommand):
        return
    command = environment.command
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"environment.command: {command[0]!r} is no program on this machine that may be run;"
            " install it, give its path, or make it executable"
        )
    if missing := set(command_columns(command)) - {*columns, "prompt"}:
        raise ConfigError(
            f"environment.command names the columns {sorted(missing)}, and the tasks have"
            f" {sorted({*columns, 'prompt'})}"
        )


def try_environment(config: Config) -> None:
    """Import the environment in a process of its own, if there is one.

    Raises:
        ConfigError: it cannot be imported, or the model has no chat template.
    """
    if config.environment is None:
        return
    if not getattr(load_tokenizer(config.model.path), "chat_template", None):
        raise ConfigError(
            f"model.path = {config.model.path!r} has no chat template, and the turns of an"
            " environment are chats; add chat_template.jinja to the model's folder"
        )
    try:
        asyncio.run(_import(config.environment))
    except EnvironmentFailedError as error:
        raise ConfigError(str(error)) from None


async def _import(environment: EnvironmentConfig) -> None:
    pool = EnvironmentPool(environment.model_copy(update={"processes": 1}))
    try:
        await pool.start()
    finally:
        await pool.close()
