"""Check the environment before anything is allocated."""

from __future__ import annotations

import asyncio

from asyncrl.config import Config, ConfigError, EnvironmentConfig
from asyncrl.environments.pool import EnvironmentFailedError, EnvironmentPool
from asyncrl.text.tokenizer import load_tokenizer

__all__ = ["try_environment"]


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
