"""Ending generators while they start. Serve is a fake."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from asyncrl.generation import run_generators as owned
from asyncrl.generation.run_generators import RunGenerators


@pytest.mark.timeout(30)
async def test_a_start_that_is_cancelled_leaves_no_application(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread deploys the application, and a cancellation does not stop it."""
    deploying, proceed = threading.Event(), threading.Event()
    calls: list[str] = []

    def begin(settings: Any, name: str, shared: bool) -> None:
        deploying.set()
        proceed.wait(20)
        calls.append("begin")

    async def end(name: str) -> None:
        calls.append("end")

    monkeypatch.setattr(owned, "begin_generators", begin)
    monkeypatch.setattr(owned, "end_generators", end)
    monkeypatch.setattr(owned, "end_lease", lambda registry, name: calls.append("lease"))

    generators = RunGenerators("app", None, None)  # type: ignore[arg-type]
    starting = asyncio.create_task(generators.begin(watched=False))
    await asyncio.to_thread(deploying.wait, 20)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    ending = asyncio.create_task(generators.end())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    proceed.set()
    await ending
    assert calls == ["begin", "end", "lease"]


async def test_generators_can_end_in_another_event_loop_than_they_started_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each attempt has its own event loop."""
    calls: list[str] = []

    async def end(name: str) -> None:
        calls.append("end")

    monkeypatch.setattr(owned, "begin_generators", lambda settings, name, shared: "handle")
    monkeypatch.setattr(owned, "end_generators", end)
    monkeypatch.setattr(owned, "end_lease", lambda registry, name: calls.append("lease"))
    generators = RunGenerators("app", None, None)  # type: ignore[arg-type]
    assert await generators.begin(watched=False) == "handle"
    await generators.end()
    assert calls == ["end", "lease"]
