"""What a run counts and records: outcomes, tokens, waiting times, errors. It decides nothing but
when too much has gone wrong."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from asyncrl.contracts.messages import Example, PushReport, Scored, StepResult
from asyncrl.contracts.outcomes import Outcome
from asyncrl.contracts.state import State
from asyncrl.control.buffer import Outstanding
from asyncrl.control.diagnostics import batch_metrics, scoring_metrics

__all__ = ["Bookkeeping", "Recorder", "RunProgress"]

LOST_ROUNDS = 100
"""Batches' worth of groups that may end one after the other without a step, until the run is given
up."""


class Recorder(Protocol):
    """Where the run's story is written."""

    def record(
        self, event: str, step: int, version: int, metrics: Mapping[str, object]
    ) -> None: ...

    def outcomes(self, outcomes: list[Outcome], outstanding: list[int]) -> None:
        """Groups that have come to their end, and the ordinals admitted in this attempt that have
        not. Returns at once."""
        ...

    async def flushed(self) -> None:
        """Every outcome given so far is on the disk."""
        ...


@dataclass(slots=True)
class RunProgress:
    """What a person sees while it runs; read by the live table."""

    phase: str = "starting"
    attempted: int = 0
    version: int = 0
    committed: int = -1
    reward: float | None = None
    accuracy: float | None = None
    staleness_mean: float = 0.0
    staleness_max: int = 0
    generated_tokens: int = 0
    trained_tokens: int = 0
    wasted_tokens: int = 0
    """Completion tokens of groups that were generated and then filtered, dropped or skipped."""
    errors: int = 0
    """Groups and completions of evaluations that an exception ended that nobody foresaw."""
    learner_waited_s: float = 0.0
    generators_waited_s: float = 0.0
    examples: tuple[tuple[Example, int], ...] = ()
    """Of the groups of the last batch, with their staleness."""
    rewards: tuple[float, ...] = ()
    """Of the usable trajectories of the last batch."""
    ended: dict[str, int] = field(default_factory=dict)


class Bookkeeping:
    """One attempt's counts. `progress` is read by others; only the coordinator moves its versions
    and steps."""

    def __init__(
        self, recorder: Recorder, state: State, groups_per_step: int, max_errors: int
    ) -> None:
        """
        Args:
            max_errors: unforeseen errors that the run survives; one more ends it.
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
        self._idle_since: float | None = None
        self._at_last_step = (0, 0.0, 0.0)
        """Tokens generated, seconds that generators waited, and the clock."""

    def record(self, event: str, version: int, metrics: Mapping[str, object]) -> None:
        """One event of the run, at the step that is attempted now."""
        self.recorder.record(event, self.progress.attempted, version, metrics)

    def made_in(self, group: Outstanding) -> int:
        """The attempt that made the group."""
        return self._attempt if group.made_in is None else group.made_in

    def end(
        self,
        group: Outstanding,
        outcome: str,
        reason: str,
        trained_at: int | None = None,
        staleness: int | None = None,
    ) -> None:
        """A group has left the buffer.

        Raises:
            RuntimeError: too many groups have ended without a step.
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
        if outcome != "trained" and ended.total() > LOST_ROUNDS * self._groups_per_step:
            counts = ", ".join(f"{count} {name}" for name, count in ended.items())
            raise RuntimeError(
                f"no step since {ended.total()} groups ended ({counts};"
                f" last: {reason}): nothing is left to train on; look at outcomes/*.parquet, and"
                " change what it says: the prompts, the reward, algorithm.filter_zero_variance or"
                " group_filter, or an engine whose log-probs are NaN"
            )

    def run_ended(self, groups: Mapping[int, Outstanding]) -> None:
        """The run ends while these groups wait."""
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
        """Hand the outcomes so far to the recorder, beside the groups that have none yet."""
        outstanding = [ordinal for ordinal, group in groups.items() if group.made_in is None]
        self.recorder.outcomes(self._outcomes, outstanding)
        self._outcomes = []

    def scored(self, scored: Scored) -> None:
        """A group has its rewards."""
        self._scored_since_step.append(scored)

    def errors(self, count: int, last: str) -> None:
        """Record errors that nobody foresaw, with the last one's stack.

        Raises:
            RuntimeError: there were too many.
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
        """Groups that run now. Generators wait while there are none, once the first version is
        committed."""
        now = asyncio.get_running_loop().time()
        if groups:
            if self._idle_since is not None:
                self.progress.generators_waited_s += now - self._idle_since
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now

    def step(
        self, batch: Sequence[Scored], result: StepResult, trained_at: int, max_staleness: int
    ) -> dict[str, object]:
        """Metrics of a step that was attempted at version `trained_at`."""
        progress = self.progress
        staleness = [trained_at - scored.oldest_version for scored in batch]
        if result.applied:
            progress.trained_tokens += sum(scored.tokens for scored in batch)
        found = batch_metrics(batch, trained_at, max_staleness)
        progress.reward = cast(float, found["reward/mean"])
        progress.examples = tuple(
            (scored.example, stale)
            for scored, stale in zip(batch, staleness, strict=True)
            if scored.example is not None
        )
        progress.rewards = tuple(reward for scored in batch for reward in scored.rewards)
        progress.staleness_mean = sum(staleness) / len(staleness)
        progress.staleness_max = max(staleness)
        return {**result.metrics, **found}

    def since_last_step(self) -> dict[str, object]:
        """What has happened since the step before."""
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
        """A version has been committed: what each replica took for it."""
        for replica, timings in report.replicas.items():
            metrics = {f"weights/{name}": value for name, value in timings.items()}
            self.record("push", report.version, {"replica": replica, **metrics})
        counts = {
            "weights/replicas": len(report.replicas),
            "weights/unroutable": len(report.unroutable),
        }
        self.record("commit", report.version, counts)
