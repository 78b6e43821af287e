"""An engine's rest that frees the memory of its GPU (`placement: colocate`), by vLLM's sleep mode.

Written against vLLM 0.32's interfaces. It has not run on a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.runtime.processes.gpu_memory import check_room

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

LEVEL = 1
"""vLLM's level of sleep. Level 1 moves the weights to the host, level 2 discards them, and both
discard the KV cache. Only level 1 can wake without an update: after a skipped step, after the first
log-prob check, at the end of an attempt, and with an adapter, whose updates lack the base weights.
"""


class Sleep:
    """Puts vLLM to sleep and wakes it in two parts: the weights, which an update needs, then the KV
    cache. Calls need the lock of the engine's owner."""

    def __init__(self, gpu_memory_utilization: float) -> None:
        self._utilization = gpu_memory_utilization
        self.asleep = False
        """Whether the weights are on the host."""
        self._without_cache = False
        """Whether the KV cache has no memory: from `begin` to `end`."""
        self._freed = 0
        """Bytes that the last sleep freed on the GPU where it freed most."""

    async def begin(self, llm: AsyncLLM) -> None:
        """Pause vLLM, and free its weights and its KV cache.

        Requests in progress stay: `keep`, since the default aborts them. vLLM clears its cache of
        prefixes, and recomputes the KV of unfinished requests after `end`. After `load_weights`,
        the weights leave again.
        """
        if self._without_cache:  # the learner uses the GPU, so a difference would say nothing
            await llm.sleep(level=LEVEL, mode="keep")
        else:
            before = await _free(llm)
            await llm.sleep(level=LEVEL, mode="keep")
            after = await _free(llm)
            self._freed = max(late - early for early, late in zip(before, after, strict=True))
        self.asleep = self._without_cache = True

    async def check_room(self, llm: AsyncLLM) -> None:
        """Raise GpuMemoryError, before anything changes, if what the sleep freed is not free."""
        for memory in await llm.collective_rpc("gpu_memory") if self.asleep else ():
            check_room(
                "the generators' shift cannot begin: an engine needs back",
                self._freed,
                memory,
                "the learner, and what stays of the engine, hold",
                f"lower generator.gpu_memory_utilization = {self._utilization:g}",
            )

    async def load_weights(self, llm: AsyncLLM) -> None:
        """Bring the weights back. Generation stays paused."""
        if self.asleep:
            await llm.wake_up(tags=["weights"])
            self.asleep = False

    async def end(self, llm: AsyncLLM) -> None:
        """Bring the weights back, unless they are, and make an empty KV cache.

        Raises:
            RuntimeError: vLLM still sleeps.
        """
        await self.load_weights(llm)
        if not await llm.wake_up(tags=["kv_cache"]):
            raise RuntimeError("vLLM still sleeps after its weights and its KV cache woke")
        self._without_cache = False


async def _free(llm: AsyncLLM) -> list[int]:
    """Free bytes of the GPU of each worker."""
    return [int(free) for free, _ in await llm.collective_rpc("gpu_memory")]
