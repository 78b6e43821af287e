"""The coordinator: five loops over small protocols, joined by one condition variable.

| loop       | consumes            | produces            | waits for            | ends            |
|------------|---------------------|---------------------|----------------------|-----------------|
| rollouts   | prompts, slots      | groups              | a slot, a completion | never           |
| scoring    | groups              | scored groups       | rewards              | never           |
| learning   | batches             | applied steps,      | a full batch         | after max_steps |
|            |                     | gathered versions   |                      |                 |
| publishing | a gathered version  | a committed version | replicas             | after the last  |
| evaluation | a committed version | evaluation metrics  | its own prompts      | after the last  |

With several replicas, an evaluation reserves one. That replica keeps its version while publishing
continues to the others. With a single replica, publishing waits for the evaluation. With
`evaluate_in_flight`, publishing never waits, and versions may change during an evaluation.

With `colocate`, generators and learner use the same devices and take shifts. In the learner's shift
the generators rest: no group is admitted, no evaluation runs, and unfinished completions stay as
they are. The learner steps, saves and gathers. Then publishing applies the version to the resting
generators, wakes them, and so gives them the shift. The learner's next shift waits for a batch and
for the evaluations that are due. On GPUs, the learner's states are on the device in its shift only:
the generators leave it before, and take it after.

`stop` ends the run early, after the step in progress and with a checkpoint.

If a loop that should never end does end, the run fails. Everything runs on one event loop. Nothing
here imports Ray, vLLM or DeepSpeed, so a whole run on fakes takes milliseconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Protocol, TypeAlias

from asyncrl.contracts.errors import EvaluationLostError, RolloutFailedError, RunStoppedError
from asyncrl.contracts.messages import Manifest, PushReport, Scored, StepResult
from asyncrl.contracts.outcomes import FILTERED, UNFORESEEN, WAYS_OUT
from asyncrl.contracts.protocols import (
    Checkpoints,
    Learner,
    PromptSource,
    ReferencePolicy,
    Rollouts,
    Scores,
    SharedDevice,
    WeightSync,
)
from asyncrl.contracts.rows import Prompt
from asyncrl.contracts.state import State
from asyncrl.control.bookkeeping import Bookkeeping, Recorder, RunProgress
from asyncrl.control.buffer import Buffer, Frontier
from asyncrl.control.concurrency import Concurrency
from asyncrl.control.staleness import Staleness
from asyncrl.runtime.clock import steady_time
from asyncrl.runtime.failures import unforeseen

Shift: TypeAlias = Literal[
    "generators", "going to rest", "taking", "learner", "leaving", "publishing", "waking"
]
"""Whose shift it is with `colocate`. "going to rest": the learner's, once all replicas rest.
"taking" and "leaving": the learner loads its states onto the GPU, and frees the GPU's memory.
"waking": the generators', once they are awake."""

LearnerShift: TypeAlias = Callable[[], AbstractAsyncContextManager[None]]
"""A context in which the learner may compute."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long the run trains, and how often it saves, checks and evaluates. Steps and versions
    count from the start of the run, over all attempts."""

    max_steps: int
    staleness: Staleness
    max_skipped_steps: int = 3
    max_errors: int = 100
    """Unexpected exceptions allowed in an attempt, counted over groups and evaluation completions.
    One more ends the run."""
    least_usable: int = 2
    """A group with fewer usable trajectories is dropped. With most advantages a trajectory is
    compared with its siblings, so it needs at least one."""
    filter_zero_variance: bool = False
    """Filter groups whose rewards are all equal. Their advantages are zero, so another group takes
    their slot."""
    checkpoint_every: int = 0
    """Versions between two checkpoints; 0 = only one, after the last step."""
    check_every: int = 0
    """Versions between two log-prob checks; 0 = only one, at the start."""
    evaluate_every: int = 0
    """Versions between two evaluations; 0 = only the first and the last version."""
    refresh_every: int = 0
    """Versions between two refreshes of the reference policy; 0 = it stays frozen."""
    evaluate_in_flight: bool = False
    """Evaluate while versions change: an evaluation reserves no replica and does not block
    publishing."""
    colocate: bool = False
    """Generators and learner use the same devices and take shifts. Needs a staleness bound of 0."""


class LogprobCheck(Protocol):
    """Compares the log-probs of generators and learner on probe prompts, at one version."""

    async def at_gather(self, version: int) -> None:
        """Compute the learner's log-probs. Called between two steps."""
        ...

    async def after_commit(self, version: int, learner_shift: LearnerShift) -> Mapping[str, float]:
        """Compute the generators' log-probs and return metrics of the difference. The learner
        computes only within `learner_shift`.

        Raises:
            RuntimeError: the difference exceeds the tolerance.
        """
        ...


Evaluate = Callable[[int, str | None], Awaitable[Mapping[str, float]]]
"""Evaluate a committed version, on the replica that is held at it (None: on all replicas). Raises
EvaluationLostError if the held replica is gone."""


@dataclass(frozen=True, slots=True)
class UnderEvaluation:
    """The version that is being evaluated."""

    version: int
    replica: str | None = None
    """The replica that is held at the version, if any."""
    blocks_publishing: bool = True
    """Whether publishing waits until the evaluation ends."""


@dataclass(slots=True)
class Parts:
    """The stations, as the protocols that the coordinator needs. `checkpoints`, `evaluate`,
    `check`, `concurrency`, `reference` and `device` are optional. Without `concurrency`, only the
    pace limits running groups. `reference` is there if the reference policy is refreshed, and
    `device` if learner and generators take shifts on GPUs."""

    prompts: PromptSource
    rollouts: Rollouts
    scores: Scores
    learner: Learner
    weights: WeightSync
    recorder: Recorder
    checkpoints: Checkpoints | None = None
    evaluate: Evaluate | None = None
    check: LogprobCheck | None = None
    concurrency: Concurrency | None = None
    reference: ReferencePolicy | None = None
    device: SharedDevice | None = None


class Coordinator:
    """Trains from version `state.version` to `schedule.max_steps`."""

    def __init__(
        self, parts: Parts, schedule: Schedule, state: State, restored: Sequence[Scored] = ()
    ) -> None:
        """
        Args:
            restored: the groups that waited in the checkpoint, in the order of `state.waiting`.
        """
        self.parts = parts
        self.schedule = schedule
        self.start_state = state
        self.books = Bookkeeping(
            parts.recorder, state, schedule.staleness.groups_per_step, schedule.max_errors
        )
        self.progress = self.books.progress
        self.buffer = Buffer(schedule.staleness, Frontier(state.frontier, state.finished_above))
        for scored, (made_in, _) in zip(restored, state.waiting, strict=True):
            self.buffer.restore(scored, made_in)
        self.first_version = state.version
        self.last_marked = state.version if state.last_marked is None else state.last_marked
        self.gathered = state.version - 1
        self.skipped_in_row = state.skipped_in_row
        self.in_publication: Manifest | None = None
        self.evaluation: UnderEvaluation | None = None
        self.evaluation_lost = False
        """Whether the last evaluation lost its replica."""
        self.shift: Shift = "generators"
        self.saved_version = state.version
        """Version of the newest checkpoint, or with which the attempt began."""
        self.stopping = False
        """Whether the run ends after the step in progress."""
        self._waking: asyncio.Task[None] | None = None
        """Wakes the loops after `stop`."""
        self.learning_done = False
        self.publishing_done = False
        self.evaluations_due = {0} if state.version == 0 else set(state.evaluations_due)
        self._condition = asyncio.Condition()
        self._shift_times: dict[str, float] = {}
        """Seconds in which the shift changed since the last step."""
        self._given_up: list[int] = []
        """Groups dropped while they waited to be scored. Their rollout worker may forget them."""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """Running rollouts, by ordinal."""

    async def run(self) -> RunProgress:
        """Train to the last version, then commit and evaluate it. An exception that ends a loop
        early is raised.

        Raises:
            RunStoppedError: `stop` was called. The last step is in a checkpoint.
        """
        endless = {
            "rollouts": self._rollouts,
            "scoring": self._scoring,
            "watching": self.parts.learner.watch,
        }
        finite = {
            "learning": self._learning,
            "publishing": self._publishing,
            "evaluation": self._evaluation,
        }
        loops = {
            name: asyncio.create_task(loop(), name=name)
            for name, loop in (endless | finite).items()
        }
        try:
            unfinished = set(loops.values())
            while any(not loops[name].done() for name in finite):
                done, unfinished = await asyncio.wait(
                    unfinished, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    _raise_cause(task)
                    if task.get_name() in endless:
                        raise RuntimeError(f"the {task.get_name()} loop ended before the last step")
        finally:
            for task in loops.values():
                task.cancel()
            await asyncio.gather(*loops.values(), return_exceptions=True)
            self.books.run_ended(self.buffer.groups)
            self._flush_outcomes()
            await self.parts.recorder.flushed()
        self.progress.phase = "done"
        return self.progress

    def stop(self) -> bool:
        """Ask the run to end after the step in progress, with a checkpoint. A run that waits for a
        batch does not wait for it. Call it on the event loop.

        Returns:
            False if there is nothing to save: no step is in progress, and none was applied since
            the newest checkpoint. The run then goes on.
        """
        if self.parts.checkpoints is None or self.learning_done:
            return False
        if not self.buffer.training and self.progress.version == self.saved_version:
            return False
        self.stopping = True
        self._waking = asyncio.create_task(self._notify())
        return True

    async def _notify(self) -> None:
        async with self._changing():
            pass

    # rollouts: prompts, slots → groups. Waits for a slot, then for a completion. Never ends.

    async def _rollouts(self) -> None:
        async with asyncio.TaskGroup() as groups:
            while True:
                prompt = await self.parts.prompts.next()
                async with self._when(self._may_admit):
                    self.buffer.admit(prompt.ordinal, self.progress.committed)
                    self.books.running(self.buffer.running)
                task = groups.create_task(self._rollout(prompt))
                self._tasks[prompt.ordinal] = task
                task.add_done_callback(partial(self._forget_task, prompt.ordinal))

    def _forget_task(self, ordinal: int, _: asyncio.Task[None]) -> None:
        del self._tasks[ordinal]

    def _may_admit(self) -> bool:
        progress, staleness = self.progress, self.schedule.staleness
        needed = (
            self.schedule.max_steps - progress.version
        ) * staleness.groups_per_step + staleness.over_sampling
        if progress.version >= self.schedule.max_steps:
            return False
        if progress.committed < self.first_version or len(self.buffer) >= needed:
            return False
        if self.shift != "generators":
            return False
        limit = self.parts.concurrency
        if limit is not None and not limit.may_run(self.buffer.running):
            return False
        return staleness.may_admit(len(self.buffer), progress.version, progress.committed)

    async def _rollout(self, prompt: Prompt) -> None:
        try:
            finished = await self.parts.rollouts.rollout(prompt, self.progress.committed)
        except RolloutFailedError as error:
            await self._fail_rollout(prompt.ordinal, str(error))
            return
        except asyncio.CancelledError as error:
            if _is_cancelled():
                raise
            # A station canceled its work for this group. If the error were re-raised, the group
            # would keep its slot forever.
            await self._fail_rollout(prompt.ordinal, unforeseen(f"group {prompt.ordinal}", error))
            return
        async with self._changing():
            if (
                self.parts.concurrency is not None
                and finished.load is not None
                and not self._shared(finished.load.replica)
            ):
                self.parts.concurrency.observe(finished.load, self.buffer.running)
            self.progress.generated_tokens += finished.tokens + finished.baseline_tokens
            self.buffer.finished(prompt.ordinal, finished.oldest_version, finished.tokens)
            self.books.running(self.buffer.running)

    async def _fail_rollout(self, ordinal: int, reason: str) -> None:
        async with self._changing():
            group = self.buffer.groups.get(ordinal)
            # The first copy of a group that seemed lost may have been scored already.
            if group is not None and group.scored is None:
                self._fail(ordinal, reason)

    def _fail(self, ordinal: int, reason: str) -> None:
        """End a group as failed, with the first line of the reason. Count an unexpected
        exception."""
        self._end(ordinal, "failed", reason.partition("\n")[0])
        if reason.startswith(UNFORESEEN):
            self.books.errors(1, reason)

    def _shared(self, replica: str) -> bool:
        """Whether an evaluation uses this replica too. Its engine's load then does not come from
        rollouts alone."""
        return self.evaluation is not None and self.evaluation.replica in (None, replica)

    # scoring: groups → scored groups in the buffer. Waits for rewards. Never ends.

    async def _scoring(self) -> None:
        while True:
            arrived = await self.parts.scores.next()
            async with self._changing():
                for scored in arrived:
                    self._take_scored(scored)
            await self.parts.rollouts.ack([scored.ordinal for scored in arrived])

    def _take_scored(self, scored: Scored) -> None:
        if scored.ordinal not in self.buffer:
            return
        if scored.lost:
            self._fail(scored.ordinal, scored.failure or "lost")
            return
        self.buffer.finished(scored.ordinal, scored.oldest_version, scored.tokens)
        self.books.scored(scored)
        if scored.failure is not None and scored.failure.startswith(UNFORESEEN):
            self._fail(scored.ordinal, scored.failure)
        elif scored.failure is not None and scored.failure.startswith(FILTERED):
            self._end(scored.ordinal, "filtered", scored.failure.removeprefix(FILTERED))
        elif scored.failure is not None:
            self._end(scored.ordinal, "dropped", scored.failure)
        elif scored.usable < self.schedule.least_usable:
            masked = ", ".join(
                f"{count} {status}" for status, count in sorted(scored.masked.items())
            )
            self._end(
                scored.ordinal,
                "dropped",
                f"usable trajectories: {scored.usable}, fewer than {self.schedule.least_usable};"
                f" masked: {masked or 'none'}",
            )
        elif self.schedule.filter_zero_variance and scored.equal_rewards:
            self._end(scored.ordinal, "filtered", "zero variance")
        else:
            self.buffer.add_scored(scored)
            self.books.running(self.buffer.running)

    # learning: batches → an applied step, then a gathered version. Waits for a full, fresh batch.
    # Ends after max_steps.

    async def _learning(self) -> None:
        async with self._changing():
            for ordinal in self.buffer.untrainable(self.progress.version):
                self._end(
                    ordinal,
                    "dropped",
                    "stale: it waited in the checkpoint, and max_staleness or the batch is smaller"
                    " now, or on_stale is another policy",
                )
        await self._take_shift()
        await self._gather()
        await self._end_shift()
        async with self._when(lambda: self.progress.committed >= self.first_version):
            # The first check needs the learner at this version, but restored groups could start a
            # step at once.
            pass
        while self.progress.version < self.schedule.max_steps:
            self.progress.phase = "training"
            clock = asyncio.get_running_loop().time
            started = clock()
            batch, occupied = await self._next_batch()
            await self._take_shift()
            if batch is None:
                await self._save_if_due()
                raise RunStoppedError
            occupied += self._shift_times.get("time/rest_s", 0.0)
            waited, began = clock() - started - occupied, clock()
            self.progress.learner_waited_s += waited
            started_at = steady_time()
            result = await self.parts.learner.step(batch)
            trained_at = self.progress.version
            async with self._changing():
                times = {
                    "time/learner_waited_s": waited,
                    "time/step_s": clock() - began,
                    "time/started_at": started_at,
                }
                metrics = self._settle(batch, result, times)
            try:
                # A reader who finds a step must find its outcomes, even after a kill.
                await self.parts.recorder.flushed()
            finally:
                self.books.record("step", self.progress.version, metrics)
                if result.note:
                    self.books.record("kept_batch", trained_at, {"note": result.note})
            given_up, self._given_up = self._given_up, []
            await self.parts.rollouts.ack(given_up)
            if self.skipped_in_row >= self.schedule.max_skipped_steps:
                raise RuntimeError(
                    f"{self.skipped_in_row} steps in a row were skipped, the last:"
                    f" {result.note or result.reason}; {WAYS_OUT[result.reason]}"
                )
            if result.applied:
                await self._refresh_if_due()
            await self._save_if_due()
            if self.stopping:
                raise RunStoppedError
            if self._gather_due():
                await self._gather()
            await self._end_shift()
        while self.gathered < self.progress.version:
            async with self._when(self._gather_due):
                pass
            await self._gather()
        async with self._changing():
            self.learning_done = True

    async def _next_batch(self) -> tuple[list[Scored] | None, float]:
        """Wait for a batch. While waiting, gather the newest version once the current publication
        ends. Returns the batch, or None if the run stops, and the seconds spent gathering."""
        clock, gathering = asyncio.get_running_loop().time, 0.0
        while True:
            async with self._when(lambda: self.stopping or self._gather_due() or self._cut_due()):
                if self.stopping:
                    return None, gathering
                self._drop_stale()
                batch = (
                    None if self._gather_due() else self.buffer.next_batch(self.progress.version)
                )
                self.buffer.take(batch or [])
            if batch is not None:
                return batch, gathering
            if self._gather_due():
                began = clock()
                await self._gather()
                gathering += clock() - began

    def _drop_stale(self) -> None:
        for ordinal in self.buffer.stale(self.progress.version):
            group = self.buffer.groups[ordinal]
            if not group.running and group.scored is None:
                self._given_up.append(ordinal)
            self._end(ordinal, "dropped", "stale")

    def _gather_due(self) -> bool:
        return self.in_publication is None and self.gathered < self.progress.version

    def _cut_due(self) -> bool:
        version = self.progress.version
        return self.buffer.has_batch(version) or self.buffer.has_stale(version)

    def _settle(
        self, batch: list[Scored], result: StepResult, times: Mapping[str, float]
    ) -> dict[str, object]:
        """Give the batch its outcome and return the step's metrics. An applied step makes the next
        policy version."""
        progress = self.progress
        progress.attempted += 1
        trained_at = progress.version
        rule = self.schedule.staleness
        staleness = [trained_at - rule.oldest_trained(scored, trained_at) for scored in batch]
        if result.applied and max(staleness) > rule.max_staleness:
            raise AssertionError(
                f"a group of staleness {max(staleness)} was trained at version {progress.version}"
            )
        for scored, stale in zip(batch, staleness, strict=True):
            if result.applied:
                self._end(scored.ordinal, "trained", "", progress.version, stale)
            else:
                self._end(scored.ordinal, "skipped", result.reason)
        self._flush_outcomes()
        self.skipped_in_row = 0 if result.applied else self.skipped_in_row + 1
        metrics = self.books.step(batch, result, trained_at, staleness, rule.max_staleness)
        if result.applied:
            progress.version += 1
            self._drop_stale()
        shift_times, self._shift_times = self._shift_times, {}
        return {**metrics, **times, **shift_times, **self._slots(), **self.books.since_last_step()}

    def _slots(self) -> dict[str, object]:
        """Metrics of the groups in each state, and of the concurrency limit."""
        limit = self.parts.concurrency
        return {
            "control/running": self.buffer.running,
            "control/outstanding": len(self.buffer),
            "control/ready": self.buffer.ready,
            "data/prompts_seen": self.buffer.frontier.count,
            **({} if limit is None else limit.metrics()),
        }

    async def _gather(self) -> None:
        """Gather the newest applied version for publication. Called between two steps, because
        gathering is a collective of the learner's ranks."""
        version = self.progress.version
        clock = asyncio.get_running_loop().time
        started = clock()
        if self.parts.check is not None and self._check_due(version):
            await self.parts.check.at_gather(version)
        manifest = await self.parts.learner.gather(version)
        metrics = {
            "weights/gather_s": clock() - started,
            "weights/versions_passed_over": version - self.gathered - 1,
            **manifest.metrics,
        }
        if self.parts.reference is not None and self._refresh_due(version):
            # Before generators get the version: its tokens are compared with this reference.
            metrics |= await self.parts.reference.refresh(manifest)
        self.books.record("gather", version, metrics)
        async with self._changing():
            self.gathered = version
            self.in_publication = manifest

    async def _refresh_if_due(self) -> None:
        """Gather a version that the reference policy takes, even if the version before is still in
        publication. A checkpoint of this version must find the reference policy refreshed."""
        if self.parts.reference is None or not self._refresh_due(self.progress.version):
            return
        async with self._when(lambda: self.in_publication is None):
            pass
        await self._gather()

    def _refresh_due(self, version: int) -> bool:
        """Whether the reference policy takes the version. An attempt's first version was taken
        before its checkpoint, or is the one with which the run began."""
        every = self.schedule.refresh_every
        return every > 0 and version % every == 0 and version > self.first_version

    def _check_due(self, version: int) -> bool:
        return version == self.first_version or (
            self.schedule.check_every > 0 and version % self.schedule.check_every == 0
        )

    async def _save_if_due(self) -> None:
        version, every = self.progress.version, self.schedule.checkpoint_every
        last = self.stopping or version == self.schedule.max_steps
        due = last or (every > 0 and version % every == 0)
        if self.parts.checkpoints is None or not due or version == self.saved_version:
            return
        clock = asyncio.get_running_loop().time
        started = clock()
        groups = [group.scored for group in self.buffer.waiting() if group.scored is not None]
        state = self.state()
        # A resume relies on every outcome so far, including those since the last step.
        self._flush_outcomes()
        await self.parts.recorder.flushed()
        await self.parts.checkpoints.write(state, groups, self.parts.learner, self.parts.scores)
        self.saved_version = version
        self.books.record("checkpoint", version, {"checkpoint/save_s": clock() - started})

    def state(self) -> State:
        """The coordinator's part of a checkpoint. A resume generates again the groups that are now
        being generated or scored."""
        frontier = self.buffer.frontier
        return replace(
            self.start_state,
            version=self.progress.version,
            steps_attempted=self.progress.attempted,
            frontier=frontier.lowest,
            finished_above=tuple(sorted(frontier.above)),
            waiting=tuple(
                (self.books.made_in(group), group.ordinal) for group in self.buffer.waiting()
            ),
            concurrency=None if self.parts.concurrency is None else self.parts.concurrency.limit,
            skipped_in_row=self.skipped_in_row,
            evaluations_due=tuple(sorted(self.evaluations_due)),
            last_marked=self.last_marked,
        )

    # publishing: a gathered version → a committed version. Waits for replicas. Ends when the last
    # version is committed.

    async def _publishing(self) -> None:
        while True:
            async with self._when(self._may_publish):
                manifest = self.in_publication
            if manifest is None:
                break
            report = await self._push(manifest)
            await self._wake_generators()
            if self.parts.check is not None and self._check_due(manifest.version):
                metrics = await self.parts.check.after_commit(
                    manifest.version, self._generators_rest
                )
                self.books.record("logprob_check", manifest.version, metrics)
            async with self._changing():
                self.progress.committed = report.version
                self.parts.rollouts.committed(report.version)
                self.in_publication = None
                self._mark_evaluation_due(report.version)
            self.books.push(report)
        async with self._changing():
            self.publishing_done = True

    def _may_publish(self) -> bool:
        if self.in_publication is None:
            return self.learning_done
        if self.schedule.colocate:
            return self.shift == "publishing"
        return not self.publishing_blocked

    async def _push(self, manifest: Manifest) -> PushReport:
        """Push a version, with one retry. A second failure ends the run."""
        try:
            return await self.parts.weights.push(manifest)
        except RuntimeError as error:
            self.books.record("push_failed", manifest.version, {})
            try:
                return await self.parts.weights.push(manifest)
            except RuntimeError as again:
                raise RuntimeError(
                    f"version {manifest.version} could not be published: {again}"
                ) from error

    def _mark_evaluation_due(self, version: int) -> None:
        every = self.schedule.evaluate_every
        passed = every > 0 and version // every > self.last_marked // every
        if passed or version >= self.schedule.max_steps:
            self.evaluations_due.add(version)
        self.last_marked = version

    # evaluation: a committed version → evaluation metrics. Waits for its own prompts. Ends after
    # the last committed version.

    async def _evaluation(self) -> None:
        while True:
            async with self._when(
                lambda: (
                    (self._evaluation_due() and self.in_publication is None) or self.publishing_done
                )
            ):
                if not self._evaluation_due():
                    return
                version = self.progress.committed
                self.evaluation = UnderEvaluation(version)
            lost = self.parts.evaluate is not None and not await self._evaluate(
                self.parts.evaluate, version
            )
            async with self._changing():
                self.evaluation, self.evaluation_lost = None, lost
                self.evaluations_due = {
                    due for due in self.evaluations_due if due > version or lost
                }

    async def _evaluate(self, evaluate: Evaluate, version: int) -> bool:
        """Evaluate a version. False if its replica is gone.

        The next evaluation then runs on all replicas, at the version that is committed by then. So
        prompts that crash an engine cost only one held replica."""
        try:
            async with self._replica_at(version) as replica:
                metrics = await evaluate(version, replica)
        except EvaluationLostError as error:
            self.books.record("evaluation_lost", version, {"reason": str(error)})
            return False
        self.progress.accuracy = metrics.get("eval/accuracy", self.progress.accuracy)
        self.books.record("evaluation", version, metrics)
        if errors := int(metrics.get("eval/errors", 0)):
            self.books.errors(
                errors,
                f"evaluation of version {version}: {errors} completions failed unexpectedly;"
                " driver.log has the stack of the first",
            )
        return True

    @asynccontextmanager
    async def _replica_at(self, version: int) -> AsyncIterator[str | None]:
        """Hold one replica at the version while publishing continues to the others. Yields None if
        the evaluation uses all replicas.

        The last version needs no held replica, because no version follows it."""
        in_flight, last = self.schedule.evaluate_in_flight, version >= self.schedule.max_steps
        replica = (
            None
            if in_flight or last or self.evaluation_lost or self.schedule.colocate
            else await self.parts.weights.hold(version)
        )
        try:
            async with self._changing():
                self.evaluation = UnderEvaluation(
                    version, replica, blocks_publishing=replica is None and not in_flight
                )
            yield replica
        finally:
            if replica is not None:
                await self.parts.weights.release(replica)

    @property
    def publishing_blocked(self) -> bool:
        """Whether publishing waits for an evaluation."""
        return self.evaluation is not None and self.evaluation.blocks_publishing

    def _evaluation_due(self) -> bool:
        return any(due <= self.progress.committed for due in self.evaluations_due)

    # Shifts of `colocate`: generators → learner → publishing → generators. Without it, the shift
    # stays with the generators, and nothing rests.

    async def _take_shift(self) -> None:
        """Begin the learner's shift, once the generators' last version has been checked and every
        evaluation that is due has ended. A run that stops does not wait for evaluations."""
        if not self.schedule.colocate:
            return
        async with self._when(
            lambda: (
                self.in_publication is None
                and (self.stopping or self.evaluation is None)
                and (self.stopping or not self._evaluation_due())
            )
        ):
            self.shift = "going to rest"
        await self._rest_generators()

    async def _end_shift(self) -> None:
        """End the learner's shift: with the publication of what it gathered, or, after a skipped
        step, with the generators' shift."""
        if not self.schedule.colocate:
            return
        await self._leave_device()
        if self.in_publication is None:
            await self._wake_generators()
        else:
            async with self._changing():
                self.shift = "publishing"

    async def _rest_generators(self) -> None:
        clock = asyncio.get_running_loop().time
        started = clock()
        await self.parts.weights.rest()
        if self.parts.device is not None:
            async with self._changing():
                self.shift = "taking"
            await self.parts.device.take_device()
        self._shift_times["time/rest_s"] = clock() - started
        async with self._changing():
            self.shift = "learner"

    async def _leave_device(self) -> None:
        if not self.schedule.colocate:
            return
        clock = asyncio.get_running_loop().time
        started = clock()
        if self.parts.device is not None:
            async with self._changing():
                self.shift = "leaving"
            await self.parts.device.leave_device()
        self._shift_times["time/wake_s"] = clock() - started

    async def _wake_generators(self) -> None:
        if not self.schedule.colocate:
            return
        async with self._changing():
            self.shift = "waking"
        clock = asyncio.get_running_loop().time
        started = clock()
        await self.parts.weights.wake()
        self._shift_times["time/wake_s"] += clock() - started
        async with self._changing():
            self.shift = "generators"

    @asynccontextmanager
    async def _generators_rest(self) -> AsyncIterator[None]:
        """Let the learner compute in the middle of the generators' shift. Nothing else generates
        then, because a version is in publication."""
        if self.schedule.colocate:
            await self._rest_generators()
        yield
        await self._leave_device()
        await self._wake_generators()

    # shared by the loops

    def _end(
        self,
        ordinal: int,
        outcome: str,
        reason: str,
        trained_at: int | None = None,
        staleness: int | None = None,
    ) -> None:
        group = self.buffer.end(ordinal)
        task = self._tasks.get(ordinal)
        if group.running and task is not None and task is not asyncio.current_task():
            task.cancel()
        self.books.running(self.buffer.running)
        self.books.end(group, outcome, reason, trained_at, staleness)

    def _flush_outcomes(self) -> None:
        self.books.flush(self.buffer.groups)
        self.parts.scores.ended_below(self.buffer.frontier.lowest)

    @asynccontextmanager
    async def _when(self, predicate: Callable[[], bool]) -> AsyncIterator[None]:
        """Wait until the predicate is true, then change shared state under the lock."""
        async with self._condition:
            await self._condition.wait_for(predicate)
            yield
            self._changed()

    @asynccontextmanager
    async def _changing(self) -> AsyncIterator[None]:
        """Change shared state under the lock, then wake every loop that waits."""
        async with self._condition:
            yield
            self._changed()

    def _changed(self) -> None:
        self._condition.notify_all()


def _is_cancelled() -> bool:
    """Whether this task was canceled. If not, the task or future that it awaited was."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _raise_cause(task: asyncio.Task[None]) -> None:
    """Raise the exception that ended the task. From an exception group, raise the first one."""
    if task.cancelled():
        # A bare CancelledError would look as if the user had interrupted the run.
        raise RuntimeError(
            f"the {task.get_name()} loop ended: a part of the run canceled what it waited for"
        )
    error = task.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if error is not None:
        raise error
