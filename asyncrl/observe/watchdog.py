"""Reports which stage hangs and what it waits for. It never ends anything, because the run may just
be slow.

Training makes progress while any of its counters changes: groups finished, scored and trained,
versions committed, tokens generated. Before and after training the learner works alone, and makes
progress while its ranks answer calls. After `observe.stall_s` seconds without progress, the
watchdog names the stage that holds the others up, and asks its workers what they are doing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from asyncrl.control.coordinator import Coordinator

ASK_S = 10.0
"""Seconds that a stage's workers get to describe what they are doing."""

Description = tuple[object, str]
"""A value that changes while the stage makes progress (None: none is known), and what its workers
are doing."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage, and the thing that it waits for."""

    name: str
    waits_for: str


def marks(coordinator: Coordinator) -> tuple[object, ...]:
    """Values of which at least one changes while a run makes progress."""
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
    """The stage that all others wait for: the earliest stage with unfinished work."""
    progress, buffer = coordinator.progress, coordinator.buffer
    training = buffer.training
    unscored = len(buffer) - buffer.running - buffer.ready - training
    if coordinator.shift == "going to rest":
        return Stage("generation", "the replicas to rest, so that the learner has its shift")
    if coordinator.shift == "taking":
        return Stage("learning", "the ranks to load their states onto the GPU")
    if coordinator.shift == "leaving":
        return Stage("learning", "the ranks to leave the GPU")
    if coordinator.shift == "waking":
        return Stage("generation", "the replicas to wake, so that groups are generated again")
    waits_for_shift = coordinator.schedule.colocate and coordinator.shift == "generators"
    if training and not waits_for_shift:
        return Stage("learning", f"a step on {training} groups at version {progress.version}")
    evaluation = coordinator.evaluation
    if evaluation is not None and (evaluation.blocks_publishing or coordinator.publishing_done):
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
        reference = ", or the reference policy to take it" if coordinator.parts.reference else ""
        return Stage(
            "learning", f"the ranks to gather or save version {progress.version}{reference}"
        )
    if buffer.running:
        return Stage(
            "generation",
            f"{buffer.running} groups that are being generated, and {unscored} that are being"
            " scored",
        )
    if unscored:
        return Stage("scoring", f"the rewards of {unscored} groups")
    if not len(buffer):
        return Stage("prompts", "the prompt stream: no group is outstanding and no prompt arrives")
    return Stage(
        "learning",
        f"a full, fresh batch: {buffer.ready} of {coordinator.schedule.staleness.groups_per_step}"
        " groups are ready",
    )


class AnsweringLearner(Protocol):
    """A learner that counts the calls that its ranks have answered."""

    @property
    def answered(self) -> int: ...

    async def describe(self) -> Description: ...


def watching_learner(
    learner: AnsweringLearner,
    phase: Callable[[], str],
    stall_s: float,
    report: Callable[[Stage, float, str], None],
) -> AbstractAsyncContextManager[None]:
    """Watch calls of a learner that works alone. See `Watchdog` for `stall_s` and `report`.

    Args:
        phase: what the run is doing.
    """

    def stage() -> Stage:
        waits_for = f"an answer of the learner's ranks, after {learner.answered} calls"
        return Stage("learning", f"{waits_for}; phase: {phase()}")

    async def describe(stage: str) -> Description:
        return await learner.describe()

    return Watchdog(lambda: learner.answered, stage, stall_s, describe, report).watching()


class Watchdog:
    """Checks at intervals whether a run makes progress."""

    def __init__(
        self,
        marks: Callable[[], object],
        stage: Callable[[], Stage],
        stall_s: float,
        describe: Callable[[str], Awaitable[Description]],
        report: Callable[[Stage, float, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            marks: a value that changes while the run makes progress (see the function `marks`).
            stage: the stage that holds the run up (see `current_stage`).
            stall_s: seconds without progress until the first report, and between two reports.
            describe: the description of a stage, by its name.
            report: receives the stage, the seconds without progress, and what its workers are
                doing.
        """
        self._marks, self._stage, self._stall_s = marks, stage, stall_s
        self._describe, self._report, self._clock = describe, report, clock
        self._last_marks = marks()
        self._progress_at = self._reported_at = clock()
        self._described: dict[str, object] = {}
        """Stage → the value of its last description."""

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Check at intervals while the body runs."""
        watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watching.cancel()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(self._stall_s / 4, 5.0))
            await self.check()

    async def check(self) -> None:
        """Check once, and report a stall."""
        now, marks = self._clock(), self._marks()
        if marks != self._last_marks:
            self._last_marks, self._described = marks, {}
            self._progress_at = self._reported_at = now
        stage, quiet_s = self._stage(), now - self._reported_at
        # Workers are described halfway too, so that the final description can be compared.
        if quiet_s < self._stall_s / 2 or (
            quiet_s < self._stall_s and stage.name in self._described
        ):
            return
        value, workers = await self._describe_in_time(stage.name)
        moved = value is not None and self._described.get(stage.name, value) != value
        self._described[stage.name] = value
        if quiet_s < self._stall_s:
            return
        self._reported_at = self._clock()
        if moved:
            self._progress_at = self._reported_at
        else:
            self._report(stage, self._reported_at - self._progress_at, workers)

    async def _describe_in_time(self, stage: str) -> Description:
        try:
            return await asyncio.wait_for(self._describe(stage), ASK_S)
        except TimeoutError:
            return None, f"its workers did not answer within {ASK_S:g} s"
        except Exception as error:
            # The workers are dead or dying, and their exception is all that can be reported.
            text = f"its workers cannot be asked: {type(error).__name__}: {error}"
            return None, text.splitlines()[0]
