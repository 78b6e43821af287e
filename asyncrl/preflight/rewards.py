"""Call every reward once, on the first prompt and a made-up completion, before anything is
allocated."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

from asyncrl.config import Config, ConfigError
from asyncrl.data.prompts import PromptReport, first_prompt
from asyncrl.preflight.environment import check_agent, try_environment
from asyncrl.preflight.specs import data_spec
from asyncrl.rewards.code import share_settings
from asyncrl.rewards.contract import GroupCall, RewardError, Session, with_notes
from asyncrl.rewards.pool import RewardPool
from asyncrl.text.answer import answer_format
from asyncrl.text.tokenizer import load_tokenizer

__all__ = ["COMPLETION", "reward_trial", "rewards_text"]

Trial: TypeAlias = "Callable[[PromptReport], dict[str, float | None] | None]"

COMPLETION = "0"
"""The made-up completion. A reward must accept any text."""
SESSION = Session([{"role": "assistant", "content": COMPLETION}], "done", 0.0)
"""Its session, in a run with an environment."""


@contextlib.contextmanager
def reward_trial(config: Config) -> Iterator[Trial]:
    """Start a process that imports the rewards, while the caller makes the plan. The process ends
    with the context.

    Yields a function of the report on the prompts: what each reward returns for `COMPLETION` as the
    completion of the first prompt. Additional values that a reward reports are named NAME/PART. The
    function returns None for rewards that need a GPU, which are not tried. It raises ConfigError if
    a reward raised, hung, died or broke its contract. The message contains the traceback of its
    exception.
    """
    if config.reward.num_gpus:
        yield lambda report: try_environment(config)
        return
    once = config.reward.model_copy(
        update={"processes": 1, "concurrency": 1, "policy": "fail", "retries": 0}
    )
    share_settings(config.reward.sandbox)
    with RewardPool(once, answers=answer_format(config.model.path)) as pool:
        yield partial(_try_rewards, config, pool)


def _try_rewards(config: Config, pool: RewardPool, report: PromptReport) -> dict[str, float | None]:
    try_environment(config)
    prompt = first_prompt(data_spec(config), report)
    check_agent(config.agent, prompt.columns)
    ids = load_tokenizer(config.model.path).encode(COMPLETION, add_special_tokens=False)
    call = GroupCall(
        [prompt.text],
        [COMPLETION],
        [ids],
        prompt.columns,
        ["stop"],
        [False],
        None if config.environment is None else [SESSION],
    )
    try:
        asyncio.run(pool.check())  # the reason why a first start failed
        given = pool.submit(call).result()
    except RewardError as error:
        raise ConfigError(
            f"the first prompt of data.train with the completion {COMPLETION!r}:"
            f" {with_notes(error)}"
        ) from None
    return {name: values[0] for name, values in given.parts.items()}


def rewards_text(given: dict[str, float | None] | None) -> str:
    """A line for each reward."""
    if given is None:
        return "# rewards\n  not tried: they need a GPU (reward.num_gpus)"
    lines = [
        f"  {name:<24} {'None: not scored' if value is None else format(value, 'g')}"
        for name, value in given.items()
    ]
    return "\n".join(
        [
            f"# rewards\n  for the first prompt and the completion {COMPLETION!r}",
            *lines,
        ]
    )
