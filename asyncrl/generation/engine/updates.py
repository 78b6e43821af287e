"""Updates of an engine's weights while generations are in flight."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias

from asyncrl.generation.engine.rest import EngineRest
from asyncrl.generation.engine.state import EngineState
from asyncrl.runtime.clock import steady_time
from asyncrl.weights.fingerprint import joined_fingerprints
from asyncrl.weights.staging import Staged

Update: TypeAlias = Mapping[str, object] | Sequence[Mapping[str, object]]
"""The staging file of all workers of an engine (`Staged.update_info`), or of each by its rank."""


class EngineUpdates:
    """Changes the weights of an engine, and reads them."""

    def __init__(self, state: EngineState, rest: EngineRest) -> None:
        self._state, self._rest = state, rest

    async def apply(self, update: Update, version: int) -> dict[str, float]:
        """Change to a staged version: pause, load, label, resume.

        Args:
            update: where the workers find the version.

        Returns:
            pause_s and apply_s (seconds), paused_at and applied_at (`steady_time`), in_flight
            (completions), and recomputed_tokens.

        Raises:
            GpuMemoryError: the weights do not fit beside the learner's. Nothing has changed.
            RuntimeError: the update failed halfway. The engine is unusable and must be replaced.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        async def load() -> None:
            llm = self._state.llm
            await llm.start_weight_update()
            info = dict(update) if isinstance(update, Mapping) else [dict(one) for one in update]
            await llm.update_weights(WeightTransferUpdateRequest(update_info=info))
            await llm.finish_weight_update(weight_version=str(version))
            self._state.version = version
            self._state.updates += 1
            await self._state.kept.submit_again(llm)

        failure = f"the update of version {version} failed"
        await self._rest.load_weights(failure)
        return await self._paused(load, failure)

    async def apply_adapter(
        self, staged: Staged, settings: Mapping[str, object], version: int
    ) -> dict[str, float]:
        """Load a staged adapter and use it for new requests. Nothing pauses: a request in progress
        ends with the adapter that it began with.

        Args:
            settings: the content of PEFT's adapter_config.json.

        Returns:
            The timings of `apply`, with pause_s 0 and in_flight: requests that continue with older
            adapters.

        Raises:
            ManifestError: vLLM refuses the adapter. Nothing has changed.
            StagingError: the adapter's files cannot be written. Nothing has changed.
            EngineDiedError: the engine is dead.
            GpuMemoryError: the weights do not fit beside the learner's. Nothing has changed.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        await self._rest.load_weights(f"the update of version {version} failed")
        began = time.monotonic()
        try:
            older = await self._state.adapters.load(
                self._state.llm, self._state.folder, staged, settings, version
            )
        except EngineDeadError:
            raise self._state.died() from None
        self._state.version = version
        return {
            "pause_s": 0.0,
            "apply_s": time.monotonic() - began,
            "applied_at": steady_time(),
            "in_flight": float(older),
        }

    async def pause_empty(self) -> dict[str, float]:
        """Pause and resume without an update, to measure the least that an update costs."""

        async def nothing() -> None:
            return None

        return await self._paused(nothing, "an empty update failed")

    async def fingerprints(self) -> dict[str, Sequence[float]]:
        """Fingerprints of the engine's weights by published name (`asyncrl.weights.fingerprint`).
        Generation pauses while they are computed. Raises RuntimeError while the weights are on the
        host."""
        if self._rest.asleep:
            raise RuntimeError("the engine rests, so its weights are not on the GPU")
        llm, held = self._state.llm, dict[str, Sequence[float]]()
        with self._state.adapters.using(llm) as adapter:
            shards = await llm.collective_rpc("loaded_shards")
            held |= joined_fingerprints(shards, self._state.app.generator.tensor_parallel_size)
            if adapter is not None:
                of = (adapter.id, adapter.scale)
                held |= (await llm.collective_rpc("fingerprints_of_adapter", args=of))[0]
        return held

    async def _paused(self, work: Callable[[], Awaitable[None]], failure: str) -> dict[str, float]:
        # New requests wait: they would be salted and counted under the old version.
        self._state.opened.clear()
        started, paused_at = time.monotonic(), steady_time()
        with self._state.unusable_after(failure):
            stopped = await self._rest.pause()
            paused = time.monotonic()
            await work()
            applied, applied_at = time.monotonic(), steady_time()
            if not self._rest.rests:
                await self._state.llm.resume_generation()
        if not self._rest.rests:
            self._state.opened.set()
        return {
            "pause_s": time.monotonic() - started,
            "paused_at": paused_at,
            "apply_s": applied - paused,
            "applied_at": applied_at,
            "in_flight": float(stopped.in_flight),
            "recomputed_tokens": float(stopped.recomputed_tokens),
        }
