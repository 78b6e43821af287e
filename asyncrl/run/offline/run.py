"""A run on a dataset, without generators: SFT, DPO and reward models.

preflight → run directory → Ray → learner → [reference pass] → steps → hf/ → summary
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from asyncrl.config import OfflineConfig
from asyncrl.contracts.errors import RunStoppedError
from asyncrl.contracts.outcomes import NOT_FINITE
from asyncrl.data.token_file import TokenFile
from asyncrl.learning.driver import RayLearner
from asyncrl.observe.progress import ProgressView
from asyncrl.observe.watchdog import Stage, watching_learner
from asyncrl.preflight.machine import refuse_machine
from asyncrl.preflight.model_snapshot import resolve_models
from asyncrl.preflight.plan.offline import OfflinePlan, make_offline_plan
from asyncrl.preflight.specs import offline_learner_spec
from asyncrl.run.across_attempts import AcrossAttempts
from asyncrl.run.closing import Closing, cancel
from asyncrl.run.cluster.cluster_address import answering_cluster
from asyncrl.run.cluster.placement import check_models
from asyncrl.run.offline.recorder import OfflineRecorder, loss_changes
from asyncrl.run.offline.reference_pass import with_reference
from asyncrl.run.supervise import Summary, run_job
from asyncrl.rundir.directory import RunDirectory, replace_directory
from asyncrl.rundir.metrics import MetricsWriter
from asyncrl.runtime.files.opening import make_directory

ROWS = "rows"
"""Folder of the run directory with the token rows."""


PAIRS = {
    "pref/loss": "loss",
    "pref/accuracy": "pair_accuracy",
    "pref/margin": "margin",
    "pref/chosen_reward": "chosen_reward",
    "pref/rejected_reward": "rejected_reward",
    "pref/chosen_logprob": "chosen_logprob",
    "pref/rejected_logprob": "rejected_logprob",
    "pref/kl": "kl",
}
"""Metric of a preference step → its name on held-out rows."""


class TooManySkippedStepsError(RuntimeError):
    """`learner.max_skipped_steps` steps in a row were skipped."""


def run_offline(
    config: OfflineConfig,
    resume_command: Sequence[str],
    after: Callable[[OfflineConfig, Summary], None] | None = None,
    on_start: Callable[[Callable[[], None]], None] | None = None,
    watch: bool = False,
) -> int:
    """Train on a dataset according to the config and return the exit code. See `run_job` for the
    exit codes, restarts and arguments.

    Raises:
        ConfigError: a setting cannot be used, or no cluster answers at RAY_ADDRESS. Nothing was
            started.
    """
    answering_cluster()
    refuse_machine(config)
    plan = make_offline_plan(resolve_models(config))

    def finished(summary: Summary) -> None:
        if after is not None:
            after(config, summary)

    job = OfflineJob(plan.config, plan)
    return run_job(job, resume_command, finished, on_start, watch=watch)


@dataclass(frozen=True, slots=True)
class OfflineJob:
    """A run on a dataset."""

    config: OfflineConfig
    plan: OfflinePlan

    def resumed(self, update: Mapping[str, object]) -> OfflineJob:
        """The same run with these settings changed."""
        return replace(self, config=self.config.model_copy(update=update))

    def description(self) -> Sequence[str]:
        """The arithmetic of a step, and what the limits do to the rows."""
        return self.plan.arithmetic(), self.plan.rows_text()

    def attempt(
        self, directory: RunDirectory, across: AcrossAttempts, writer: MetricsWriter
    ) -> OfflineAttempt:
        """An attempt that trains from the directory's state."""
        return OfflineAttempt(self.config, self.plan, directory, across, writer)

    def changes(self, records: Sequence[Mapping[str, object]]) -> list[str]:
        """Held-out figures and the training loss before and after."""
        return loss_changes(records)

    def results(self, directory: Path) -> Sequence[str]:
        """Where the token rows are."""
        return (f"token rows     {directory / ROWS}/*.arrow",)


class OfflineAttempt:
    """One attempt. `run()` trains to the last step, or raises the error that ended the attempt."""

    def __init__(
        self,
        config: OfflineConfig,
        plan: OfflinePlan,
        directory: RunDirectory,
        across: AcrossAttempts,
        writer: MetricsWriter,
    ) -> None:
        self.config, self.plan = config, plan
        self.directory, self.across = directory, across
        self.state = directory.state
        self.saved_version = directory.state.version
        """Version of the newest checkpoint, or with which the attempt began."""
        self.in_step = self.stopping = False
        self.live = OfflineRecorder(writer, plan.steps, directory.state.version)

    async def run(self, view: ProgressView) -> None:
        """Start the learner, train, and export the model to `hf/`. The view shows the progress."""
        showing = asyncio.create_task(self.live.show(view))
        try:
            async with Closing(self.across.failed) as stack:
                await self._run(stack)
        finally:
            await cancel(showing)
            self.live.phase("stopping")
            view.show(self.live.progress)

    def stop(self) -> bool:
        """See `RunningAttempt`."""
        if not self.in_step and self.state.version == self.saved_version:
            return False
        self.stopping = True
        self.live.phase("finishing the step")
        return True

    async def _run(self, stack: Closing) -> None:
        self.live.phase("preparing the rows")
        train, held_out = await asyncio.to_thread(self.plan.write_rows, self.directory.path / ROWS)
        self.live.phase("starting the learner")
        await check_models(self.config)
        learner = await self._start_learner(stack)
        if self.config.compared is not None:
            self.live.phase("scoring with the reference policy")
            train, held_out = await with_reference(
                self.config, self.plan, train, held_out, self.live.note
            )
        async with self._watched(learner):
            await self._train(learner, train, held_out)
            self.live.phase("saving")
            path = self.directory.path
            await learner.export_hf(path / ".hf")
        replace_directory(path / ".hf", path / "hf")

    async def _start_learner(self, stack: Closing) -> RayLearner:
        config, state = self.config, self.state
        started = time.monotonic()
        learner = await RayLearner.create(
            offline_learner_spec(config, self.plan.steps, self.plan.batch_sizes),
            state.run_id,
            state.attempt,
        )
        seconds = time.monotonic() - started
        stack.add("learner", learner.close)
        for directory in dict.fromkeys((config.run_directory, config.checkpoints_directory)):
            make_directory(directory)
            await learner.check_shared(directory)
        startup = {f"startup/learner_{name}": value for name, value in learner.startup.items()}
        self._record("startup", {"startup/learner_s": seconds, **startup})
        self._record("truncation", self.plan.truncation_metrics())
        if self.directory.checkpoint is not None:
            self.live.phase("loading the checkpoint")
            async with self._watched(learner):
                await learner.load(self.directory.checkpoint / "learner")
        return learner

    async def _train(
        self, learner: RayLearner, train: TokenFile, held_out: TokenFile | None
    ) -> None:
        first = self.state.version
        if held_out is not None and first == 0:
            await self._evaluate(learner, held_out)
        self.live.phase("training")
        while self.state.version < self.plan.steps:
            self.in_step = True
            applied = await self._step(learner, train)
            self.in_step = False
            version = self.state.version
            if self.stopping:
                await self._checkpoint(learner)
                raise RunStoppedError
            if not applied:
                continue
            last = version == self.plan.steps
            if held_out is not None and (last or _due(version, self.config.eval.every_steps)):
                await self._evaluate(learner, held_out)
            if self.stopping or last or _due(version, self.config.checkpoint.every_steps):
                await self._checkpoint(learner)
            if self.stopping:
                raise RunStoppedError

    async def _step(self, learner: RayLearner, train: TokenFile) -> bool:
        """Take one step on the next `batch_size` rows. Returns whether it was applied."""
        state, config = self.state, self.config
        ordinals = range(state.frontier, state.frontier + config.batch_size)
        drawn = [self.plan.order.epoch_and_row(ordinal) for ordinal in ordinals]
        table = train.take([row for _, row in drawn])
        metrics = await self._take_step(learner, table)
        applied = bool(metrics["applied"])
        self.state = replace(
            state,
            version=state.version + applied,
            steps_attempted=state.steps_attempted + 1,
            frontier=ordinals.stop,
            skipped_in_row=0 if applied else state.skipped_in_row + 1,
        )
        epochs = ordinals.stop / self.plan.order.epoch
        self._record("step", {**metrics, "epoch": epochs, "rows_taken": float(len(ordinals))})
        self._note_bad(metrics)
        if self.state.skipped_in_row >= config.learner.max_skipped_steps:
            raise TooManySkippedStepsError(
                f"{self.state.skipped_in_row} steps in a row were skipped: {NOT_FINITE}; lower"
                f" learner.learning_rate = {config.learning_rate:g} (their rows are in"
                f" {self.directory.path / 'kept'})"
            )
        return applied

    async def _take_step(self, learner: RayLearner, table: pa.Table) -> dict[str, float]:
        match self.config.objective.name:
            case "sft":
                return await learner.supervised_step(table, scheduled=True)
            case "dpo":
                return await learner.preference_step(table)
            case "reward_model":
                return await learner.reward_step(table)

    def _note_bad(self, metrics: Mapping[str, float]) -> None:
        """Show a skipped step or a spike of the gradient norm, whose rows the learner kept."""
        step, kept = self.state.steps_attempted, self.directory.path / "kept"
        ratio = metrics.get("grad_norm_ratio", 1.0)
        if not metrics["applied"]:
            self.live.note(f"step {step} was skipped: {NOT_FINITE}; its rows are in {kept}")
        elif ratio > self.config.learner.grad_norm_spike:
            self.live.note(
                f"step {step}: gradient norm {metrics['grad_norm']:.3g} is {ratio:.3g} times the"
                f" median of the last steps; its rows are in {kept}"
            )

    async def _evaluate(self, learner: RayLearner, held_out: TokenFile) -> None:
        phase = self.live.progress.phase
        self.live.phase("evaluating")
        started = time.monotonic()
        table = held_out.take(range(held_out.rows))
        if self.config.objective.name != "sft":
            scores = self.config.trains_reward_model
            found = await (
                learner.held_out_scores(table) if scores else learner.held_out_preferences(table)
            )
            metrics = {f"eval/{PAIRS.get(name, name)}": value for name, value in found.items()}
        else:
            loss = await learner.held_out_loss(table)
            metrics = {
                "eval/loss": loss.loss,
                "eval/exact_match": loss.exact,
                "eval/tokens": float(loss.tokens),
            }
        self._record("evaluation", {**metrics, "eval/evaluation_s": time.monotonic() - started})
        self.live.phase(phase)

    async def _checkpoint(self, learner: RayLearner) -> None:
        if self.state.version == self.saved_version:
            return
        started = time.monotonic()
        await self.directory.checkpoints.write(self.state, (), learner, None)
        self.saved_version = self.state.version
        self._record("checkpoint", {"checkpoint/save_s": time.monotonic() - started})

    def _record(self, event: str, metrics: Mapping[str, object]) -> None:
        self.live.record(event, self.state.steps_attempted, self.state.version, metrics)

    def _watched(self, learner: RayLearner) -> AbstractAsyncContextManager[None]:
        """Report calls of the learner that make no progress."""

        def report(stage: Stage, seconds: float, workers: str) -> None:
            values = {"stage": stage.name, "waits_for": stage.waits_for}
            self._record("stall", {**values, "stall_s": seconds, "workers": workers})
            self.live.note(f"{stage.name} has made no progress for {seconds:.0f} s")

        return watching_learner(
            learner, lambda: self.live.progress.phase, self.config.observe.stall_s, report
        )


def _due(version: int, every: int) -> bool:
    return bool(every) and version % every == 0
