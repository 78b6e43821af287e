"""Counters of one engine: tokens, preemptions, aborted requests, its queue and cache."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from asyncrl.contracts.messages import EngineLoad
from asyncrl.runtime.clock import steady_time_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.loggers import StatLoggerBase
    from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

MOST_PARTS = 64
"""Parts in which vLLM may return the completions of one message, 128 at a time."""
LAST_TOKEN = "last_token_ts"
QUIET_MESSAGES = 2
"""Messages after which vLLM has finished reporting preemptions of recomputed requests. vLLM
schedules the next step while one runs."""


class EngineStats:
    """Counters since the engine's start, and its state after the last step that it reported. vLLM's
    logger calls `count_step` for every message of the engine's process, which can hold tokens for
    `asyncrl.generation.held_outputs.HOLD_S`. The engine calls the other methods."""

    def __init__(self) -> None:
        self.tokens_generated = 0
        """Completion tokens that the engine's process has sent."""
        self.kv_use = 0.0
        """Share of the KV cache's blocks in use at the last message outside an update, 0 to 1."""
        self.waiting = 0
        """Completions in the queue at the last message outside an update, without those that an
        update put there."""
        self.preemptions = 0
        """Completions that lost their KV cache because it was full."""
        self.aborted: list[int] = []
        """Completions of aborted requests, by length: item 0 counts the empty ones, item k those of
        2^(k-1) to 2^k - 1 tokens. Tokens that the engine's process had not sent do not count."""
        self.aborted_tokens = 0
        """Tokens of the aborted completions, counted in the same way."""
        self.tokens_at_pause: tuple[int, ...] = ()
        """Tokens that each unfinished completion had when the last update paused it."""
        self._last_tokens_at: float | None = None
        """When tokens came last; None while no completion is under way."""
        self._longest_gap_s = 0.0
        self._running = 0
        """Completions that ran at the last message outside an update."""
        self._recomputed = 0
        """Completions that the last update under `recompute` interrupted, and whose preemption vLLM
        has not reported yet. Reset once the queue is empty: then all of them run again."""
        self._calm_messages = 0
        """Consecutive messages with an empty queue."""
        self._ended: dict[str, list[tuple[int, float, float]]] = {}
        """Request → its completions that have ended: tokens, first computed, last token."""

    def load(self, replica: str) -> EngineLoad:
        """The engine's load, as the coordinator needs it."""
        return EngineLoad(
            replica,
            self.kv_use,
            self.waiting,
            self.preemptions,
            tuple(self.aborted),
            self.aborted_tokens,
        )

    def take_longest_gap(self) -> float:
        """Longest time in seconds between two messages with tokens, while completions were under
        way. Each call starts a new measurement."""
        longest, self._longest_gap_s = self._longest_gap_s, 0.0
        return longest

    def count_rest(self) -> None:
        """Note that the engine rests. The time until it wakes is no gap between tokens."""
        self._last_tokens_at = None

    def count_aborted(self, lengths: Sequence[int]) -> None:
        """Count the completions of an aborted request, given their lengths in tokens."""
        self.aborted_tokens += sum(lengths)
        for length in lengths:
            self.aborted += [0] * (length.bit_length() + 1 - len(self.aborted))
            self.aborted[length.bit_length()] += 1

    def count_pause(self, lengths: Sequence[int], recomputes: bool) -> None:
        """Note that an update has paused the engine.

        Args:
            lengths: tokens that each unfinished completion has.
            recomputes: whether the pause drops their KV cache (`generator.in_flight`).
        """
        self.tokens_at_pause = tuple(lengths)
        if recomputes:
            self._recomputed = max(self._running, sum(length > 0 for length in lengths))
            self._calm_messages = 0

    def count_step(
        self, scheduler: SchedulerStats | None, iteration: IterationStats | None, updating: bool
    ) -> None:
        """Count one message: one step of the engine, or several that it held.

        Args:
            updating: an update has paused the engine, so its queue says nothing about load.
        """
        if iteration is not None:
            self._count_gap(iteration.num_generation_tokens, scheduler)
            self.tokens_generated += iteration.num_generation_tokens
            by_update = min(iteration.num_preempted_reqs, self._recomputed)
            self._recomputed -= by_update
            self.preemptions += iteration.num_preempted_reqs - by_update
            self._count_ended(iteration)
        if scheduler is None:
            return
        self._calm_messages = 0 if scheduler.num_waiting_reqs else self._calm_messages + 1
        if self._calm_messages >= QUIET_MESSAGES:
            self._recomputed = 0
        if not updating:
            self._running = scheduler.num_running_reqs
            self.kv_use = scheduler.kv_cache_usage
            self.waiting = max(0, scheduler.num_waiting_reqs - self._recomputed)

    def watch(self, request: str) -> None:
        """Note when the completions of this request end, until `forget` is called."""
        self._ended[request] = []

    def forget(self, request: str) -> None:
        self._ended.pop(request, None)

    async def told(self, request: str, completions: int) -> None:
        """Wait until vLLM has told of so many ended completions of a watched request. It returns a
        large message's completions in parts, and tells of them after the last one."""
        for _ in range(MOST_PARTS):
            if len(self._ended[request]) >= completions:
                return
            await asyncio.sleep(0)

    def times_of(self, request: str, lengths: Sequence[int]) -> list[tuple[float, float]]:
        """When the engine first computed each completion of a watched request, and when its last
        token came, by `steady_time`. Nothing if the engine has not told all of them.

        Args:
            lengths: tokens of the completions. vLLM tells a completion's length, not which of the
                request's it is, so two of one length may have each other's times.
        """
        ended = sorted(self._ended[request])
        if len(ended) != len(lengths):
            return []
        ranked = sorted(range(len(lengths)), key=lambda index: lengths[index])
        times = dict(zip(ranked, ((began, last) for _, began, last in ended), strict=True))
        return [times[index] for index in range(len(lengths))]

    def _count_ended(self, iteration: IterationStats) -> None:
        for one in iteration.finished_requests:
            if (ended := self._ended.get(one.request_id or "")) is not None:
                last = steady_time_of(getattr(one, LAST_TOKEN))
                ended.append((one.num_generation_tokens, last - one.inference_time, last))

    def _count_gap(self, tokens: int, scheduler: SchedulerStats | None) -> None:
        now = time.monotonic()
        if tokens and self._last_tokens_at is not None:
            self._longest_gap_s = max(self._longest_gap_s, now - self._last_tokens_at)
        if tokens:
            self._last_tokens_at = now
        if scheduler is not None and not (scheduler.num_running_reqs or scheduler.num_waiting_reqs):
            self._last_tokens_at = None


def keep_last_tokens() -> None:
    """Make vLLM keep when each ended completion had its last token, by the monotonic clock. It
    knows that of every completion, and passes on differences only. A second call has no effect."""
    from vllm.v1.metrics.stats import IterationStats

    original = IterationStats.update_from_finished_request
    if getattr(original, LAST_TOKEN, False):
        return

    @functools.wraps(original)
    def update(self: IterationStats, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        setattr(self.finished_requests[-1], LAST_TOKEN, named["req_stats"].last_token_ts)

    setattr(update, LAST_TOKEN, True)
    IterationStats.update_from_finished_request = update  # type: ignore[method-assign]


def stat_logger(stats: EngineStats, updating: Callable[[], bool]) -> type[StatLoggerBase]:
    """A vLLM stat logger that counts into `stats`. It also counts the tokens of unfinished
    completions, which vLLM does not return before their end."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    keep_last_tokens()

    class StepCounter(StatLoggerBase):
        def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None: ...

        def record(
            self,
            scheduler_stats: SchedulerStats | None,
            iteration_stats: IterationStats | None,
            mm_cache_stats: MultiModalCacheStats | None = None,
            engine_idx: int = 0,
        ) -> None:
            stats.count_step(scheduler_stats, iteration_stats, updating())

        def log_engine_initialized(self) -> None: ...

    return StepCounter
