"""The rest of an engine, in which it generates nothing, and the pauses of its updates."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypedDict

from asyncrl.generation.engine.outputs import tokens_so_far
from asyncrl.generation.engine.sleep import Sleep
from asyncrl.generation.engine.state import EngineState

if TYPE_CHECKING:
    from vllm.v1.engine import PauseMode


class Pause(TypedDict):
    """Arguments of vLLM's `pause_generation`."""

    mode: PauseMode
    clear_cache: bool


PAUSE: dict[str, Pause] = {
    "keep": {"mode": "keep", "clear_cache": False},
    "recompute": {"mode": "keep", "clear_cache": True},
    "drain": {"mode": "wait", "clear_cache": True},
}
"""`generator.in_flight` → how an update pauses vLLM. Completions continue with the old KV only if
the cache is not cleared."""


class Paused(NamedTuple):
    """What an update or a rest has paused."""

    in_flight: int
    """Unfinished completions."""
    recomputed_tokens: int
    """Their tokens, with their prompts, that the engine reads again: their KV cache was cleared."""


class EngineRest:
    """Rests, wakes and pauses an engine."""

    def __init__(self, state: EngineState) -> None:
        app = state.app
        self._state = state
        self._sleep = Sleep(app.generator.gpu_share) if app.sleeps else None
        """Frees the GPU in a rest. None: a rest keeps all memory."""
        self.rests = False

    @property
    def asleep(self) -> bool:
        """Whether the engine rests without its weights on the GPU."""
        return self._sleep is not None and self._sleep.asleep

    async def begin(self) -> None:
        """Generate nothing until `end`, so that other processes can use the device. Requests in
        progress stay as they are (with `in_flight: drain` they end first), and new ones wait.
        Versions are applied meanwhile. With `sleeps`, the weights and the KV cache leave the GPU.

        Raises:
            RuntimeError: vLLM did not pause. The engine is unusable and must be replaced.
        """
        if self.rests and (self._sleep is None or self.asleep):
            return
        self._state.opened.clear()
        with self._state.unusable_after("a rest failed"):
            if self._sleep is None:
                await self.pause()
            else:
                await self._sleep.begin(self._state.llm)
                self._count_pause(recomputes=True)
            self.rests = True
        self._state.stats.count_rest()

    async def load_weights(self, failure: str) -> None:
        """Bring the weights of a resting engine back to the GPU, for an update."""
        if self._sleep is not None and self._sleep.asleep:
            await self._sleep.check_room(self._state.llm)
            with self._state.unusable_after(failure):
                await self._sleep.load_weights(self._state.llm)

    async def end(self) -> None:
        """End the rest. Does nothing if the engine does not rest.

        Raises:
            GpuMemoryError: the learner has not left the GPU. The engine still rests.
            RuntimeError: vLLM did not resume. The engine is unusable and must be replaced.
        """
        if not self.rests:
            return
        if self._sleep is not None:
            await self._sleep.check_room(self._state.llm)
        with self._state.unusable_after("the end of a rest failed"):
            if self._sleep is not None:
                await self._sleep.end(self._state.llm)
            await self._state.llm.resume_generation()
        self.rests = False
        self._state.opened.set()

    async def pause(self) -> Paused:
        """Pause vLLM unless the engine rests."""
        in_flight = self._state.app.in_flight
        if not self.rests:
            await self._state.llm.pause_generation(**PAUSE[in_flight])
        return self._count_pause(in_flight == "recompute")

    def _count_pause(self, recomputes: bool) -> Paused:
        """Count the unfinished completions of a pause."""
        states = [*self._state.llm.output_processor.request_states.values()]
        lengths = [tokens_so_far(state) for state in states]
        self._state.stats.count_pause(lengths, recomputes)
        read = [state.prompt_len + length for state, length in zip(states, lengths, strict=True)]
        running = [tokens for tokens, length in zip(read, lengths, strict=True) if length]
        return Paused(len(lengths), sum(running) if recomputes else 0)
