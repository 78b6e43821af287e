"""The endpoint's core: many choices side by side, one failure for all, and nothing that goes on for
nobody."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from asyncrl.contracts.errors import StaleReplicaError
from asyncrl.contracts.messages import Details, GenerateRequest, Piece, Tokens
from asyncrl.serving.answers import Told, ask, siblings
from asyncrl.serving.dialects.fields import Sampling
from asyncrl.testing import FakeWords

ASKED = GenerateRequest((5,), 1, 100, 1.0, seed=7)


class Endless:
    """Pieces for ever, but for the choice of seed `fails`, which ends in an error after `after`
    pieces."""

    def __init__(self, fails: int | None = None, after: int = 3) -> None:
        self.fails, self.after = fails, after
        self.given: dict[int, int] = {}
        self.ended: set[int] = set()

    async def stream(self, request: GenerateRequest, details: Details) -> AsyncIterator[Piece]:
        seed = request.seed or 0
        try:
            while True:
                await asyncio.sleep(0)
                if seed == self.fails and self.given.get(seed, 0) == self.after:
                    raise StaleReplicaError("gone")
                self.given[seed] = self.given.get(seed, 0) + 1
                yield Piece(Tokens((5,), (-1.0,)), "x")
        finally:
            self.ended.add(seed)


def started(endless: Endless, n: int) -> Any:
    return ask(endless, FakeWords(200), siblings(ASKED, n), Details())


def test_siblings_have_seeds_of_their_own() -> None:
    assert [request.seed for request in siblings(ASKED, 3)] == [7, 8, 9]
    assert [request.seed for request in siblings(GenerateRequest((5,), 1, 9, 1.0), 2)] == [
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("tokens", "seconds"), [(16, 300.0), (1500, 300.0), (1501, 301.0), (16_384, 3277.0)]
)
def test_long_answers_have_longer(tokens: int, seconds: float) -> None:
    """A full engine makes some five tokens a second of one completion."""
    assert Sampling(model="m").request([5], tokens).deadline_s == seconds


def test_the_first_failure_ends_all_choices() -> None:
    async def scenario() -> list[Told]:
        return [told async for told in started(endless, 4)]

    endless = Endless(fails=9)
    with pytest.raises(StaleReplicaError, match="gone"):
        asyncio.run(scenario())
    assert endless.ended == {7, 8, 9, 10}


@pytest.mark.parametrize("how", ["closed", "cancelled"])
def test_what_nobody_reads_any_more_ends(how: str) -> None:
    async def read() -> None:
        async with contextlib.aclosing(started(endless, 3)) as pieces:
            async for _ in pieces:
                if how == "closed" and len(endless.given) == 3:
                    return

    async def scenario() -> None:
        reading = asyncio.ensure_future(read())
        while how == "cancelled" and len(endless.given) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0)
        if how == "cancelled":
            reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert endless.ended == {7, 8, 9} and not asyncio.all_tasks() - {asyncio.current_task()}

    endless = Endless()
    asyncio.run(scenario())


def test_a_slow_reader_holds_the_pieces_back() -> None:
    """They stay in the engine, which puts them together. Here they would fill the memory."""

    async def scenario() -> None:
        pieces = started(endless, 3)
        await anext(pieces)
        for _ in range(1000):
            await asyncio.sleep(0)
        assert sum(endless.given.values()) <= 1 + 3 + 3, (
            "one read, one waiting place and one at hand for each choice"
        )
        await pieces.aclose()

    endless = Endless()
    asyncio.run(scenario())
