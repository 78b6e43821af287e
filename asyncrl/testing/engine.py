"""A fake engine with a KV cache. When the cache is full, completions are preempted and computed
again."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from asyncrl.contracts.messages import EngineLoad, Finished
from asyncrl.testing.control import FakeReplicas, FakeRollouts


@dataclass(slots=True)
class _Completion:
    ordinal: int
    left: int
    """Tokens that are not generated yet."""
    kv: int
    """Tokens in the KV cache while it runs."""


class FakeEngine(FakeRollouts):
    """`Rollouts` on one engine with continuous batching.

    Each step makes one token for each running completion. A step takes `step_s`, plus `sequence_s`
    for each running completion, plus `prefill_s` for each prefilled token. Requests wait in order
    until the cache has room for them. If the running completions have no room for their next token,
    the youngest is preempted and loses its KV cache.
    """

    def __init__(
        self,
        lengths: Callable[[int, int], int],
        samples: int,
        kv_tokens: int,
        prompt_tokens: int = 16,
        step_s: float = 1.0,
        sequence_s: float = 0.01,
        prefill_s: float = 0.1,
    ) -> None:
        """
        Args:
            lengths: completion tokens, given the ordinal and the index in the group.
            samples: completions of a group.
            kv_tokens: tokens that fit in the cache.
        """
        super().__init__(replicas=FakeReplicas())
        self.lengths, self.samples, self.kv_tokens, self.prompt_tokens = (
            lengths,
            samples,
            kv_tokens,
            prompt_tokens,
        )
        self.step_s, self.sequence_s, self.prefill_s = step_s, sequence_s, prefill_s
        self.preemptions = 0
        self.generated_tokens = 0
        self._running: list[_Completion] = []
        self._queue: deque[_Completion] = deque()
        self._groups: dict[int, tuple[int, asyncio.Event]] = {}
        """Unfinished completions of each group, and the event of its end."""
        self._stepping: asyncio.Task[None] | None = None

    async def _generate(self, ordinal: int) -> Finished:
        (_, oldest_version), done = self._serve(ordinal), asyncio.Event()
        lengths = [self.lengths(ordinal, index) for index in range(self.samples)]
        self._groups[ordinal] = self.samples, done
        self._queue.extend(_Completion(ordinal, length, self.prompt_tokens) for length in lengths)
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._steps())
        await done.wait()
        return Finished(
            ordinal,
            oldest_version,
            sum(lengths),
            EngineLoad("fake", self._used() / self.kv_tokens, len(self._queue), self.preemptions),
        )

    def _used(self) -> int:
        return sum(completion.kv for completion in self._running)

    async def _steps(self) -> None:
        """Run steps until all completions are done."""
        while self._running or self._queue:
            await asyncio.sleep(self._schedule())
            for completion in self._running:
                completion.kv += 1
                completion.left -= 1
            self.generated_tokens += len(self._running)
            for completion in [completion for completion in self._running if not completion.left]:
                self._finish(completion)

    def _schedule(self) -> float:
        """Preempt or admit completions, and return the seconds of the step."""
        preempted, prefilled, used = False, 0, self._used()
        while used + len(self._running) > self.kv_tokens:
            victim = self._running.pop()
            used -= victim.kv
            self._queue.appendleft(victim)
            self.preemptions += 1
            preempted = True
        while (
            self._queue
            and not preempted
            and used + self._queue[0].kv + len(self._running) + 1 <= self.kv_tokens
        ):
            completion = self._queue.popleft()
            self._running.append(completion)
            used += completion.kv
            prefilled += completion.kv
        return self.step_s + self.sequence_s * len(self._running) + self.prefill_s * prefilled

    def _finish(self, completion: _Completion) -> None:
        self._running.remove(completion)
        left, done = self._groups[completion.ordinal]
        self._groups[completion.ordinal] = left - 1, done
        if left == 1:
            del self._groups[completion.ordinal]
            done.set()
