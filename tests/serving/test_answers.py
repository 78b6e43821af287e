"""The endpoint's core: concurrent choices, failures, and generation that ends with its reader."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from asyncrl.contracts.errors import StaleReplicaError
from asyncrl.contracts.messages import Details, GenerateRequest, StreamPiece, Tokens
from asyncrl.serving.answers import ask, siblings
from asyncrl.serving.requests import Sampling

REQUEST = GenerateRequest((5,), 1, 100, 1.0, seed=7)


class Endless:
    """Yields pieces without end. The choice with seed `fails` raises after `after` pieces."""

    def __init__(self, fails: int | None = None, after: int = 3) -> None:
        self.fails, self.after = fails, after
        self.given: dict[int, int] = {}
        self.ended: set[int] = set()

    async def stream(
        self, request: GenerateRequest, details: Details
    ) -> AsyncIterator[StreamPiece]:
        seed = request.seed or 0
        try:
            while True:
                await asyncio.sleep(0)
                if seed == self.fails and self.given.get(seed, 0) == self.after:
                    raise StaleReplicaError("gone")
                self.given[seed] = self.given.get(seed, 0) + 1
                yield StreamPiece(Tokens((5,), (-1.0,)), "x")
        finally:
            self.ended.add(seed)


def started(endless: Endless, n: int) -> Any:
    return ask(endless, siblings(REQUEST, n), Details())


def test_each_choice_has_its_own_seed() -> None:
    assert [request.seed for request in siblings(REQUEST, 3)] == [7, 8, 9]
    assert [request.seed for request in siblings(GenerateRequest((5,), 1, 9, 1.0), 2)] == [
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("tokens", "seconds"), [(16, 300.0), (1500, 300.0), (1501, 301.0), (16_384, 3277.0)]
)
def test_long_completions_have_a_later_deadline(tokens: int, seconds: float) -> None:
    """A full engine generates about five tokens per second for one completion."""
    assert Sampling().request([5], tokens).deadline_s == seconds


async def test_the_first_failure_ends_all_choices() -> None:
    endless = Endless(fails=9)
    with pytest.raises(StaleReplicaError, match="gone"):
        [told async for told in started(endless, 4)]
    assert endless.ended == {7, 8, 9, 10}


@pytest.mark.parametrize("how", ["closed", "cancelled"])
async def test_closing_or_cancelling_the_reader_ends_all_choices(how: str) -> None:
    async def read() -> None:
        async with contextlib.aclosing(started(endless, 3)) as pieces:
            async for _ in pieces:
                if how == "closed" and len(endless.given) == 3:
                    return

    endless, others = Endless(), asyncio.all_tasks()
    reading = asyncio.ensure_future(read())
    while how == "cancelled" and len(endless.given) < 3:  # noqa: ASYNC110
        await asyncio.sleep(0)
    if how == "cancelled":
        reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert endless.ended == {7, 8, 9} and asyncio.all_tasks() == others


async def test_a_slow_reader_does_not_fill_the_memory() -> None:
    """Pieces wait in the engine, which merges them. A queue here would grow without limit."""

    endless = Endless()
    pieces = started(endless, 3)
    await anext(pieces)
    for _ in range(1000):
        await asyncio.sleep(0)
    assert sum(endless.given.values()) <= 1 + 3 + 3, (
        "one piece read; and for each choice, one in the queue and one waiting for it"
    )
    await pieces.aclose()
