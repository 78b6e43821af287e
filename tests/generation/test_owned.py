"""The end of generators that are just being started. Serve is a stand-in."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from asyncrl.generation import owned
from asyncrl.generation.owned import OwnGenerators


@pytest.mark.timeout(30)
def test_a_start_that_is_cancelled_leaves_no_application(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve gets the application in a thread, which no cancellation stops."""
    asked, go_on = threading.Event(), threading.Event()
    said: list[str] = []

    def begin(settings: Any, name: str) -> None:
        asked.set()
        go_on.wait(20)
        said.append("begin")

    async def end(name: str) -> None:
        said.append("end")

    monkeypatch.setattr(owned, "begin_generators", begin)
    monkeypatch.setattr(owned, "end_generators", end)
    monkeypatch.setattr(owned, "end_lease", lambda registry, name: said.append("lease"))

    async def scenario() -> None:
        generators = OwnGenerators("app", None, None)  # type: ignore[arg-type]
        starting = asyncio.create_task(generators.begin(watched=False))
        await asyncio.to_thread(asked.wait, 20)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        ending = asyncio.create_task(generators.end())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        go_on.set()
        await ending

    asyncio.run(scenario())
    assert said == ["begin", "end", "lease"]


def test_generators_end_in_another_event_loop_than_that_of_their_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each attempt has its own."""
    said: list[str] = []

    async def end(name: str) -> None:
        said.append("end")

    monkeypatch.setattr(owned, "begin_generators", lambda settings, name: "handle")
    monkeypatch.setattr(owned, "end_generators", end)
    monkeypatch.setattr(owned, "end_lease", lambda registry, name: said.append("lease"))
    generators = OwnGenerators("app", None, None)  # type: ignore[arg-type]
    assert asyncio.run(generators.begin(watched=False)) == "handle"
    asyncio.run(generators.end())
    assert said == ["end", "lease"]
