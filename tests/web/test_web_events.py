"""Event streams: what is sent, and what is closed, however a stream ends."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from asyncrl.web.events import DONE, Event, EventStream, event_text


class Streamed:
    """Sends a stream to a client, and notes what happens."""

    def __init__(self, items: Sequence[Event | Exception], most_sent: float = math.inf) -> None:
        """`most_sent`: messages after which the connection is broken."""
        self.sent: list[str] = []
        self.closed: list[str] = []
        self._items, self._most = items, most_sent
        source = self._source()
        self.response = EventStream(self._events(source), source, self._failed, self._left)

    async def _source(self) -> AsyncGenerator[Event | Exception, None]:
        closed = self.closed
        try:
            for item in self._items:
                yield item
        finally:
            closed.append("source")

    async def _events(
        self, source: AsyncGenerator[Event | Exception, None]
    ) -> AsyncGenerator[Event, None]:
        closed = self.closed
        try:
            async for item in source:
                if isinstance(item, Exception):
                    raise item
                yield item
            yield DONE
        finally:
            closed.append("events")

    @staticmethod
    def _failed(error: Exception, sent: int) -> Event:
        return Event({"error": str(error), "after": sent}, "error")

    def _left(self) -> None:
        self.closed.append("left")

    async def _receive(self) -> dict[str, Any]:
        await asyncio.Event().wait()  # the client stays
        raise AssertionError

    async def _send(self, message: Any) -> None:
        if len(self.sent) >= self._most:
            raise BrokenPipeError
        self.sent.append(message.get("body", b"start").decode())

    def run(self) -> list[str]:
        async def answer() -> None:
            await self.response({}, self._receive, self._send)
            self.closed = list(self.closed)  # the end of the loop closes what is left

        asyncio.run(answer())
        return self.sent


def test_a_whole_stream_ends_with_done() -> None:
    stream = Streamed([Event({"n": 1}), Event({"n": 2}, "named")])
    data = ['data: {"n": 1}\n\n', 'event: named\ndata: {"n": 2}\n\n', "data: [DONE]\n\n"]
    assert stream.run() == ["start", *data, ""]
    assert sorted(stream.closed) == ["events", "source"]


def test_an_exception_is_the_last_event() -> None:
    stream = Streamed([Event({"n": 1}), OSError("the disk is full"), Event({"n": 2})])
    *_, error, end = stream.run()
    kind, data, *_ = error.split("\n")
    assert (kind, end) == ("event: error", "") and "[DONE]" not in "".join(stream.sent)
    assert json.loads(data.removeprefix("data: ")) == {"error": "the disk is full", "after": 1}
    assert sorted(stream.closed) == ["events", "source"]


@pytest.mark.parametrize("sent", [0, 1, 2])
def test_a_broken_connection_closes_all(sent: int) -> None:
    stream = Streamed([Event({"n": number}) for number in range(3)], most_sent=sent)
    assert len(stream.run()) == sent and "left" in stream.closed
    assert ("events" in stream.closed) == ("source" in stream.closed) == (sent > 0)


def test_numbers_that_json_lacks_are_not_sent() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        event_text(Event({"n": math.inf}))
    (_, error, _) = Streamed([Event({"n": math.inf})]).run()
    assert "not JSON compliant" in error
