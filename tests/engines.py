"""Engines for tests: a real one in a Ray actor, and one around a stub of vLLM."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.contracts.messages import GenerateRequest
from asyncrl.contracts.rows import Completion
from asyncrl.generation.engine.engine import Engine, LoadTimes, start_engine
from asyncrl.generation.engine.requests import Answered, EngineRequests
from asyncrl.generation.engine.state import EngineState
from asyncrl.generation.engine.stats import EngineStats
from asyncrl.generation.settings import GeneratorApp
from asyncrl.text.stops import Stops


class EngineActor:
    """An engine in a Ray actor. Call `start` first."""

    engine: Engine

    def __init__(self, app: GeneratorApp) -> None:
        self.app = app

    async def start(self) -> LoadTimes:
        self.engine = await start_engine(self.app)
        return self.engine.load

    async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
        return await self.engine.requests.generate(request)

    async def answer(self, request: GenerateRequest) -> Answered:
        return await self.engine.requests.answer(request)

    async def apply(self, update: Any, version: int) -> dict[str, float]:
        return await self.engine.updates.apply(update, version)

    async def apply_adapter(self, staged: Any, settings: Any, version: int) -> dict[str, float]:
        return await self.engine.updates.apply_adapter(staged, settings, version)

    async def fingerprints(self) -> dict[str, Sequence[float]]:
        return await self.engine.updates.fingerprints()

    async def check(self) -> None:
        await self.engine.check()

    async def processes(self) -> tuple[int, list[int]]:
        """Ids of the actor's process and of the engine's processes that run."""
        return os.getpid(), self.engine.processes.alive()

    async def stop(self) -> None:
        await self.engine.stop()


class StubOutputs:
    """The requests of which vLLM's front end knows."""

    def __init__(self) -> None:
        self.request_states: dict[str, Any] = {}
        self.external_req_ids: dict[str, list[str]] = {}


class StubProcesses:
    """Processes of an engine that have never started."""

    killed = False

    def kill(self) -> None:
        self.killed = True

    def alive(self) -> list[int]:
        return []

    async def end(self) -> None: ...


def engine_around(llm: Any, app: GeneratorApp, stops: Stops | None = None) -> Engine:
    """An engine that takes requests, around a stub of vLLM."""
    opened = asyncio.Event()
    opened.set()
    state = EngineState(app, llm, Path(), EngineStats(), opened)
    requests = EngineRequests(state, stops or Stops({}))
    processes: Any = StubProcesses()
    return Engine(state, processes, requests, LoadTimes(0.0, 0.0, 0.0, 0.0, 0.0))
