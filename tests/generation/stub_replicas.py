"""A real Serve replica around a stub engine, which makes one token of its current version each
millisecond."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import GeneratorConfig
from asyncrl.contracts.messages import GenerateRequest, Manifest
from asyncrl.contracts.rows import Completion, VersionSpan
from asyncrl.generation import app as app_module, replica
from asyncrl.generation.app import start_generators, stop_generators
from asyncrl.generation.engine.engine import LoadTimes
from asyncrl.generation.engine.requests import Answered
from asyncrl.generation.engine.stats import EngineStats
from asyncrl.generation.settings import GeneratorApp, registry_name
from asyncrl.text.stops import Stops
from asyncrl.weights.staging import Staged
from asyncrl.weights.version_registry import open_registry

TOKEN_S = 0.001
SLOW = "slow"
"""A file in the folder that a run is named after. The first replica that finds it renames it, and
then fetches no version until it is gone."""


class StubEngine:
    """It is its own requests, updates, rest and processes."""

    def __init__(self) -> None:
        self.requests = self.updates = self.rest = self.processes = self
        self.version = 0
        self.stats = EngineStats()
        self.broken = None
        self.load = LoadTimes(0.0, 0.0, 0.0, 0.0, 0.0)
        self.kv_cache_tokens = self.max_model_len = 0
        self.stops, self.tokenizer_hash = Stops({}), ""
        self.rests = False
        self.cache_block = 0

    def alive(self) -> list[int]:
        return []

    async def check(self) -> None: ...

    async def stop(self) -> None: ...

    async def begin(self) -> None:
        self.rests = True

    async def end(self) -> None:
        self.rests = False

    async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
        while self.rests:  # noqa: ASYNC110
            await asyncio.sleep(TOKEN_S)
        versions = [self.version]
        self.stats.tokens_generated += request.n
        for _ in range(request.max_tokens - 1):
            await asyncio.sleep(TOKEN_S)
            versions.append(self.version)
            self.stats.tokens_generated += request.n
        spans = [
            VersionSpan(
                version, versions.index(version), versions.index(version) + versions.count(version)
            )
            for version in sorted(set(versions))
        ]
        tokens = len(versions)
        return (
            Completion((3,) * tokens, (-0.1,) * tokens, tuple(spans), "length", "3" * tokens),
        ) * request.n

    async def answer(self, request: GenerateRequest) -> Answered:
        completions = await self.generate(request)
        return Answered(completions, (0,) * len(completions))

    async def apply(self, update: Any, version: int) -> dict[str, float]:
        self.version = version
        return {"pause_s": 0.0}


@dataclass(frozen=True)
class Application:
    """Replicas under Serve, and their version registry."""

    handle: Any
    registry: Any


@contextlib.contextmanager
def stub_application(ray: Any, name: str, replicas: int) -> Iterator[Application]:
    """An application of stub replicas: its `handle` and its version `registry`."""
    registry = open_registry(registry_name(name))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app_module, "Generator", StubGenerator)
        generator = GeneratorConfig(num_replicas=replicas, num_cpus=0.1)
        handle = start_generators(GeneratorApp(model="m", generator=generator), name)
    yield Application(handle, registry)
    stop_generators(name)
    ray.kill(registry)


class StubGenerator(replica.Generator):
    """It replaces functions of a module, which only this replica uses in its process."""

    # Serve awaits a replica's constructor.
    async def __init__(self, app: dict[str, Any]) -> None:  # type: ignore[misc]
        module: Any = replica
        module.start_engine, module.expected_tensors = _start_engine, lambda model, dtype: {}
        module.fetch_version = _fetch_version
        await super().__init__(app)


async def _start_engine(app: GeneratorApp) -> StubEngine:
    return StubEngine()


def _fetch_version(manifest: Manifest, *arguments: Any) -> Staged:
    mine = Path(manifest.run_id) / f"slow-{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        mine.with_name(SLOW).rename(mine)
    while mine.exists():
        time.sleep(TOKEN_S)
    return Staged(mine.with_name("staged"), 0, (), 0.0)
