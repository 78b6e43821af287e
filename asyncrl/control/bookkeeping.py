"""Counts and records a run's outcomes, tokens, waiting times and errors.

The only decision made here is to end a run after too many errors, or too many groups without a
step.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from asyncrl.contracts.messages import PushReport, Scored, StepResult, TrajectoryText
from asyncrl.contracts.outcomes import Outcome
from asyncrl.contracts.state import State
from asyncrl.control.buffer import Outstanding
from asyncrl.control.diagnostics import batch_metrics, scoring_metrics
from asyncrl.control.failed_sessions import FailedSessions

LOST_ROUNDS = 100
"""The run ends when more than this many batches of groups end without a step."""
UNASKED_ROUNDS = 3
"""The run ends when more than this many batches end without a step and no session asked the model.
Such sessions cost hardly any time, and waiting does not help."""


class Recorder(Protocol):
    """Writes the run's metrics and outcomes."""

    def record(
        self, event: str, step: int, version: int, metrics: Mapping[str, object]
    ) -> None: ...

    def outcomes(self, outcomes: list[Outcome], outstanding: list[int]) -> None:
        """Queue the outcomes of groups, and the ordinals admitted in this attempt that have no
        outcome yet. Returns at once."""
        ...

    async def flushed(self) -> None:
        """Wait until every outcome so far is on the disk."""
        ...


class BatchExample(NamedTuple):
    """A trajectory of a batch that people see."""

    text: TrajectoryText
    staleness: int
    ordinal: int
    """Of its group."""


@dataclass(slots=True)
class RunProgress:
    """The state of a run that the live table shows."""

    phase: str = "starting"
    attempted: int = 0
    version: int = 0
    committed: int = -1
    accuracy: float | None = None
    generated_tokens: int = 0
    trained_tokens: int = 0
    wasted_tokens: int = 0
    """Completion tokens of groups that were generated and then filtered, dropped or skipped."""
    errors: int = 0
    """Groups and evaluation completions that ended with an unexpected exception."""
    learner_waited_s: float = 0.0
    generators_waited_s: float = 0.0
    examples: tuple[BatchExample, ...] = ()
    """Examples of the last batch's groups."""
    distributions: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Of the last batch: the rewards of its usable trajectories, the tokens of its completions, and
    the staleness of its groups."""
    ended: dict[str, int] = field(default_factory=dict)
    """Outcome → groups."""


class Bookkeeping:
    """The counts of one attempt. Other parts read `progress`; only the coordinator changes its
    versions and steps."""

    def __init__(
        self, recorder: Recorder, state: State, groups_per_step: int, max_errors: int
    ) -> None:
        """
        Args:
            max_errors: unexpected errors allowed; one more ends the run.
        """
        self.recorder = recorder
        self.progress = RunProgress(
            phase="publishing", version=state.version, attempted=state.steps_attempted
        )
        self._attempt = state.attempt
        self._groups_per_step, self._max_errors = groups_per_step, max_errors
        self._outcomes: list[Outcome] = []
        self._ended_since_step: Counter[str] = Counter()
        self._scored_since_step: list[Scored] = []
        self._failed_sessions = FailedSessions()
        """Since the last record about them."""
        self._failed_since_step = FailedSessions()
        self._idle_since: float | None = None
        self._at_last_step = (0, 0.0, 0.0)
        """Generated tokens, seconds that generators waited, and the loop's clock."""

    def record(self, event: str, version: int, metrics: Mapping[str, object]) -> None:
        """Record an event at the current step."""
        self.recorder.record(event, self.progress.attempted, version, metrics)

    def made_in(self, group: Outstanding) -> int:
        """Return the attempt that made the group."""
        return self._attempt if group.made_in is None else group.made_in

    def end(
        self,
        group: Outstanding,
        outcome: str,
        reason: str,
        trained_at: int | None = None,
        staleness: int | None = None,
    ) -> None:
        """Record the outcome of a group that has left the buffer.

        Raises:
            RuntimeError: too many groups have ended without a step, or without a turn of the
                model.
        """
        progress, ended = self.progress, self._ended_since_step
        if outcome != "trained":
            progress.wasted_tokens += group.tokens or 0
        self._outcomes.append(
            Outcome(
                self.made_in(group),
                group.ordinal,
                outcome,
                reason,
                progress.attempted,
                trained_at,
                staleness,
                group.tokens,
                group.scored.content if group.scored is not None else None,
            )
        )
        progress.ended[outcome] = progress.ended.get(outcome, 0) + 1
        ended[outcome] += 1
        if outcome == "trained":
            return
        failed = self._failed_since_step
        if failed.all_unasked and failed.groups > UNASKED_ROUNDS * self._groups_per_step:
            raise RuntimeError(
                f"the model took no turn in any of {failed.sessions} sessions{failed.why()}:"
                " nothing is left to train on. Let the environment ask the model that it gets, or"
                " its agent use the session's URL and key; `asyncrl check-env` tries it"
            )
        if ended.total() > LOST_ROUNDS * self._groups_per_step:
            counts = ", ".join(f"{count} {name}" for name, count in ended.items())
            raise RuntimeError(
                f"no step since {ended.total()} groups ended ({counts};"
                f" last: {reason}{self._failed_since_step.why()}): nothing is left to train on."
                " Read the reasons in outcomes/*.parquet; then change the prompts, the reward, the"
                " environment, algorithm.filter_zero_variance or group_filter, or repair an engine"
                " whose log-probs are NaN"
            )

    def run_ended(self, groups: Mapping[int, Outstanding]) -> None:
        """Record the groups that have no outcome when the run ends."""
        self._record_failed_sessions()
        self._outcomes += [
            Outcome(
                self.made_in(group),
                ordinal,
                "waiting",
                "the run ended first",
                self.progress.attempted,
                completion_tokens=group.tokens,
            )
            for ordinal, group in groups.items()
        ]

    def flush(self, groups: Mapping[int, Outstanding]) -> None:
        """Pass the outcomes so far to the recorder, with the groups that have none yet."""
        outstanding = [ordinal for ordinal, group in groups.items() if group.made_in is None]
        self.recorder.outcomes(self._outcomes, outstanding)
        self._outcomes = []

    def scored(self, scored: Scored) -> None:
        """Count a group that has been scored, for the metrics of the next step."""
        self._scored_since_step.append(scored)
        if scored.sessions is not None:
            failed = self._failed_sessions
            failed.add(scored.sessions)
            self._failed_since_step.add(scored.sessions)
            # There may be no step to wait for.
            if failed.mostly and failed.groups >= self._groups_per_step:
                self._record_failed_sessions()

    def _record_failed_sessions(self) -> None:
        """Record the sessions that failed since the last such record, if any did."""
        found, self._failed_sessions = self._failed_sessions.metrics(), FailedSessions()
        if found:
            self.record("failed_sessions", self.progress.version, found)

    def errors(self, count: int, last: str) -> None:
        """Record unexpected errors, with the stack of the last one.

        Raises:
            RuntimeError: more than `max_errors` have occurred.
        """
        progress = self.progress
        progress.errors += count
        first, _, stack = last.partition("\n")
        self.record(
            "error",
            progress.version,
            {"errors": progress.errors, "reason": first, "stack": stack},
        )
        if progress.errors > self._max_errors:
            raise RuntimeError(
                f"errors = {progress.errors}, above rollout.max_errors = {self._max_errors};"
                f" the last: {first}; its stack is in metrics.jsonl"
            )

    def running(self, groups: int) -> None:
        """Note how many groups run now. From the first call on, generators count as waiting while
        there are none."""
        now = asyncio.get_running_loop().time()
        if groups:
            if self._idle_since is not None:
                self.progress.generators_waited_s += now - self._idle_since
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now

    def step(
        self,
        batch: Sequence[Scored],
        result: StepResult,
        trained_at: int,
        staleness: Sequence[int],
        max_staleness: int,
    ) -> dict[str, object]:
        """Return the metrics of a step that was attempted at version `trained_at`.

        Args:
            staleness: of each group of the batch.
        """
        progress = self.progress
        if result.applied:
            of_batch = sum(scored.tokens for scored in batch)
            progress.trained_tokens += int(result.metrics.get("tokens", of_batch))
        found = batch_metrics(batch, trained_at, staleness, max_staleness)
        progress.examples = tuple(
            BatchExample(scored.example, stale, scored.ordinal)
            for scored, stale in zip(batch, staleness, strict=True)
            if scored.example is not None
        )
        progress.distributions = {
            "rewards": tuple(reward for scored in batch for reward in scored.rewards),
            "completion_tokens": tuple(length for scored in batch for length in scored.lengths),
            "staleness": tuple(staleness),
        }
        return {**result.metrics, **found}

    def since_last_step(self) -> dict[str, object]:
        """Return the metrics of everything that happened since the previous step, and record its
        failed sessions."""
        self._record_failed_sessions()
        self._failed_since_step = FailedSessions()
        progress, now = self.progress, asyncio.get_running_loop().time()
        generated, waited, then = self._at_last_step
        self._at_last_step = progress.generated_tokens, progress.generators_waited_s, now
        ended, scored = self._ended_since_step, self._scored_since_step
        self._ended_since_step, self._scored_since_step = Counter(), []
        made, lasted = progress.generated_tokens - generated, now - then
        return {
            **{
                f"control/{outcome}_groups": float(ended[outcome])
                for outcome in ("filtered", "dropped", "failed")
            },
            **scoring_metrics(scored),
            "control/wasted_tokens": progress.wasted_tokens,
            "time/generators_waited_s": progress.generators_waited_s - waited,
            "rollout/generated_tokens_per_s": (
                made / lasted if then and lasted > 0 else float("nan")
            ),
        }

    def push(self, report: PushReport) -> None:
        """Record a committed version, with each replica's timings."""
        for replica, timings in report.replicas.items():
            metrics = {f"weights/{name}": value for name, value in timings.items()}
            self.record("push", report.version, {"replica": replica, **metrics})
        counts = {
            "weights/replicas": len(report.replicas),
            "weights/unroutable": len(report.unroutable),
        }
        self.record("commit", report.version, counts)
