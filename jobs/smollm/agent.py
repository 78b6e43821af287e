"""The ready agent with a calculator, through its session's URL with the official client of OpenAI's
API, as any other program with tools would be played."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from asyncrl.environments.ready import calculator

if TYPE_CHECKING:
    from openai import AsyncOpenAI


async def play(task: Mapping[str, Any], model: Any) -> dict[str, float]:
    """Solve one task. The reward is 1.0 if the last answer is right, else 0.0."""
    client = _client(model.base_url).with_options(api_key=model.api_key)
    return await calculator(task, client, grade="exact", most_turns=3)


@functools.cache
def _client(base_url: str) -> AsyncOpenAI:
    """One client for all sessions of this process: a client takes longer than a session."""
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=base_url, api_key="each session has its own", max_retries=3)
