"""A real Serve replica around a stub engine, which makes one token of its current version each
millisecond."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from asyncrl.contracts.messages import GenerateRequest
from asyncrl.contracts.rows import Completion, VersionSpan
from asyncrl.generation import replica
from asyncrl.generation.engine_stats import EngineStats
from asyncrl.text.stops import Stops

TOKEN_S = 0.001


class StubEngine:
    def __init__(self, app: Any) -> None:
        self.version = 0
        self.stats = EngineStats()
        self.broken = self.load = None
        self.kv_cache_tokens = self.max_model_len = 0
        self.stops, self.tokenizer_hash = Stops({}), ""

    async def start(self) -> None: ...

    async def check(self) -> None: ...

    async def stop(self) -> None: ...

    async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
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

    async def apply(self, update: Any, version: int) -> dict[str, float]:
        self.version = version
        return {"pause_s": 0.0}


class StubGenerator(replica.Generator):
    """It replaces functions of a module, which only this replica uses in its process."""

    # Serve awaits a replica's constructor.
    async def __init__(self, app: dict[str, Any]) -> None:  # type: ignore[misc]
        module: Any = replica
        module.Engine, module.expected_tensors = StubEngine, lambda model, dtype: {}
        module.fetch_version = lambda manifest, *arguments: SimpleNamespace(
            update_info=dict, remove=lambda: None, fetch_s=0.0
        )
        await super().__init__(app)
