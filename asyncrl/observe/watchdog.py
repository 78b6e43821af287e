"""Says which stage hangs and what it waits for. It never ends anything: a run that is slow
and healthy goes on.

A run in training moves while any of its counters does: groups finished, scored and trained,
versions committed, tokens generated. Before and after it the learner works alone: it moves while
its ranks answer calls. When nothing has moved for `observe.stall_s` seconds, the stage is named
that holds the others up, and the workers there are asked what they do.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from asyncrl.control.coordinator import Coordinator

__all__ = ["Stage", "Watchdog", "current_stage", "marks"]

ASK_S = 10.0
"""Seconds that a part gets to say what it does."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage, and what it waits for."""

    stage: str
    waits_for: str


def marks(coordinator: Coordinator) -> tuple[Any, ...]:
    """What moves while a run does."""
    progress, buffer = coordinator.progress, coordinator.buffer
    ended = sum(progress.ended.values())
    return (
        progress.attempted,
        progress.committed,
        coordinator.gathered,
        progress.generated_tokens,
        buffer.ready,
        buffer.running,
        ended,
        coordinator.evaluation,
    )


def current_stage(coordinator: Coordinator) -> Stage:
    """The stage that the others wait for: of a chain, the one that works and does not come to its
    end."""
    progress, buffer = coordinator.progress, coordinator.buffer
    training = sum(group.training for group in buffer.groups.values())
    unscored = len(buffer) - buffer.running - buffer.ready - training
    if training:
        return Stage("learning", f"a step on {training} groups at version {progress.version}")
    evaluation = coordinator.evaluation
    if evaluation is not None and (evaluation.holds_flips or coordinator.publishing_done):
        return Stage(
            "evaluation", f"completions of the held-out prompts at version {evaluation.version}"
        )
    if coordinator.in_publication is not None:
        return Stage(
            "publishing",
            f"the replicas to apply version {coordinator.in_publication.version};"
            f" {progress.committed} is committed",
        )
    if coordinator.gathered < progress.version:
        return Stage("learning", f"the ranks to gather or save version {progress.version}")
    if buffer.running:
        return Stage(
            "generation",
            f"{buffer.running} groups that are being generated, and {unscored} that are being"
            " scored",
        )
    if unscored:
        return Stage("scoring", f"the rewards of {unscored} groups")
    if not len(buffer):
        return Stage("prompts", "the prompt stream: nothing is outstanding, and no prompt comes")
    return Stage(
        "learning",
        f"a full, fresh batch: {buffer.ready} of {coordinator.schedule.staleness.groups_per_step}"
        " groups are ready",
    )


class Watchdog:
    """Looks from time to time whether something has moved."""

    def __init__(
        self,
        moves: Callable[[], Any],
        stage: Callable[[], Stage],
        stall_s: float,
        ask: Callable[[str], Awaitable[tuple[Any, str]]],
        describe: Callable[[Stage, float, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            moves: what changes while the run moves (`marks`).
            stage: the stage that holds it up (`standing`).
            stall_s: seconds without any movement until the first report, and between two reports.
            ask: (stage) → something that changes if the stage moves after all, and what its workers
                say of themselves.
            say: gets the stage, the seconds without progress, and what its workers said.
        """
        self._moves, self._standing, self._stall_s, self._ask, self._say, self._clock = (
            moves,
            stage,
            stall_s,
            ask,
            describe,
            clock,
        )
        self._seen = moves()
        self._since = self._said = clock()
        self._inner: dict[str, Any] = {}

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Look again and again, as long as the body runs."""
        looking = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            looking.cancel()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(self._stall_s / 4, 5.0))
            await self.look()

    async def look(self) -> None:
        """Once."""
        now, seen = self._clock(), self._moves()
        if seen != self._seen:
            self._seen, self._since, self._said, self._inner = seen, now, now, {}
        where, still_s = self._standing(), now - self._said
        # Asked once in the middle as well, so that there is something to compare with.
        if still_s < self._stall_s / 2 or (still_s < self._stall_s and where.stage in self._inner):
            return
        try:
            inner, text = await asyncio.wait_for(self._ask(where.stage), ASK_S)
        except TimeoutError:
            inner, text = None, f"its workers did not answer within {ASK_S:g} s"
        except Exception as error:
            # A part that is dead or dying: what it raises is what there is to say.
            inner, text = (
                None,
                f"its workers cannot be asked: {type(error).__name__}: {error}".splitlines()[0],
            )
        moved = inner is not None and self._inner.get(where.stage, inner) != inner
        self._inner[where.stage] = inner
        if still_s < self._stall_s:
            return
        self._said = self._clock()
        if moved:
            self._since = self._said
        else:
            self._say(where, self._said - self._since, text)
