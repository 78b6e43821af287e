"""A replica's own logic, around an engine that is a stub."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.control.protocols import Manifest
from asyncrl.generation import replica
from asyncrl.generation.protocol import WeightsId
from asyncrl.generation.replica import Generator


def test_a_change_that_has_begun_goes_on_when_whoever_asked_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that catches up is cancelled in the middle of the change."""

    async def nothing(*arguments: Any) -> None:
        return None

    async def scenario() -> tuple[WeightsId | None, list[int], list[int]]:
        begun, go_on = asyncio.Event(), asyncio.Event()
        fetched: list[int] = []
        removed: list[int] = []

        async def apply(update: Any, version: int) -> dict[str, float]:
            begun.set()
            await go_on.wait()
            return {}

        def fetch(manifest: Manifest, *arguments: Any) -> Any:
            fetched.append(manifest.version)
            return SimpleNamespace(update_info=dict, remove=lambda: removed.append(manifest.version), fetch_s=0.0)

        engine = SimpleNamespace(start=nothing, apply=apply, tokens_generated=0, take_longest_gap=lambda: 0.0)
        context = SimpleNamespace(app_name="app", replica_id=SimpleNamespace(unique_id="a"))
        monkeypatch.setattr(replica, "Engine", lambda settings: engine)
        monkeypatch.setattr(replica, "expected_parameters", lambda model, dtype: {})
        monkeypatch.setattr(replica, "find_board", lambda name: None)
        monkeypatch.setattr(replica, "fetch", fetch)
        monkeypatch.setattr(replica.serve, "get_replica_context", lambda: context)
        made = object.__new__(Generator)
        await Generator.__init__(made, {"model": "m"})
        monkeypatch.setattr(made, "status", nothing)
        manifest = Manifest("run", 0, 3, (), (), (), ())
        asking = asyncio.create_task(made.apply_version(manifest))
        await begun.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        again = asyncio.create_task(made.apply_version(manifest))
        go_on.set()
        await again
        return made.weights, fetched, removed

    assert asyncio.run(asyncio.wait_for(scenario(), 20)) == (WeightsId("run", 0, 3), [3], [3])
