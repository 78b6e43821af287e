"""The same game, played by an agent with the official client of OpenAI's API at its session's URL.

python -m jobs.guess --environment.function jobs.guess.agent:play --environment.url true
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jobs.guess import game

if TYPE_CHECKING:
    from openai import AsyncOpenAI


async def play(task: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Play one game. The reward is that of `jobs.guess.game`."""
    return await game.play(task, _client(model.base_url).with_options(api_key=model.api_key))


@functools.cache
def _client(base_url: str) -> AsyncOpenAI:
    """One client for all sessions of this process: a client takes longer than a game."""
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=base_url, api_key="each session has its own", max_retries=3)
