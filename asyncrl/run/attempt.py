"""One attempt of a run, from the start of its stations to the finished model."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AbstractAsyncContextManager

from asyncrl.config import Config, WarmStartConfig
from asyncrl.contracts.messages import Scored, WeightsId
from asyncrl.contracts.state import State
from asyncrl.control.concurrency import Concurrency, first_limit
from asyncrl.control.coordinator import Coordinator, Parts, Schedule
from asyncrl.control.staleness import Staleness
from asyncrl.data.prompts import order_of
from asyncrl.data.supervised import supervised_rows
from asyncrl.generation.orphans import end_orphans
from asyncrl.learning.driver import RayLearner
from asyncrl.learning.warm_start import WarmStartCheck, warm_start
from asyncrl.observe.alarms import FIRST_STEPS
from asyncrl.observe.live import Live, RunRecorder
from asyncrl.observe.progress import ProgressView
from asyncrl.observe.watchdog import Stage, Watchdog, current_stage, marks, watching_learner
from asyncrl.preflight.plan.text import Plan
from asyncrl.preflight.specs import data_spec, observe_spec
from asyncrl.run.across_attempts import AcrossAttempts
from asyncrl.run.cluster.placement import check_models, wait_for_resources
from asyncrl.run.evaluation import Evaluator
from asyncrl.run.launch import Stations, launch_stations
from asyncrl.rundir.directory import RunDirectory, replace_directory
from asyncrl.rundir.metrics import MetricsWriter, first_entropies
from asyncrl.rundir.outcomes import OutcomesWriter
from asyncrl.runtime.redact import print_shown
from asyncrl.weights.check import ProbeCheck

NOTE_LENGTH = 160
"""Characters of a stall's stacks that the live table shows."""

logger = logging.getLogger("asyncrl")


class Attempt:
    """One attempt. `run()` trains to the last step, or raises the error that ended the attempt."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        directory: RunDirectory,
        across: AcrossAttempts,
        writer: MetricsWriter,
    ) -> None:
        self.config = config
        self.plan = plan
        self.directory = directory
        self.across = across
        self.live = Live(observe_spec(config), time.monotonic(), across.asked)
        self.recorder = RunRecorder(
            writer,
            OutcomesWriter(directory.path / "outcomes", directory.state.attempt),
            self.live,
            first_entropies(directory.path, FIRST_STEPS),
            order_of(plan.prompts, data_spec(config)).epoch,
        )
        self.coordinator: Coordinator | None = None

    async def run(self, view: ProgressView) -> None:
        """Wait for resources, start the stations, train, and export the model to `hf/`. The view
        shows the progress."""
        showing = asyncio.create_task(self.live.show(view))
        try:
            await self._wait_for_resources()
            self.live.phase("starting generators and learner")
            async with launch_stations(
                self.config,
                self.directory,
                self.plan.prompts,
                self.plan.context,
                self._prepare_learner,
                self.across,
            ) as stations:
                await self._train(stations)
                await self._export(stations)
            self.recorder.close()
        finally:
            showing.cancel()
            self.live.phase("stopping")
            view.show(self.live.progress)

    def stop(self) -> bool:
        """See `RunningAttempt`."""
        stops = self.coordinator is not None and self.coordinator.stop()
        if stops:
            self.live.phase("finishing the step")
        return stops

    async def _wait_for_resources(self) -> None:
        self.live.phase("looking for room on the cluster")
        if self.across.generators is None:
            run_id = self.directory.state.run_id
            await end_orphans(self.config.name, run_id, self.live.note)
        self.config, table = await wait_for_resources(
            self.across.config(self.config), self.plan.weights_bytes, self.live.note
        )
        print_shown(table)
        await check_models(self.config)

    async def _prepare_learner(self, learner: RayLearner) -> None:
        """Bring the learner to the first version: the checkpoint's, or the model's own weights,
        with a warm start if one is configured."""
        if self.directory.checkpoint is not None:
            self.live.phase("loading the checkpoint")
            async with self.watched(learner):
                await learner.load(self.directory.checkpoint / "learner")
        elif self.config.warm_start is not None:
            self.live.phase("warm start")
            await self._warm_start(learner, self.config.warm_start)
        self.live.phase("waiting for the generators")

    async def _warm_start(self, learner: RayLearner, settings: WarmStartConfig) -> None:
        config = self.config

        def report(check: WarmStartCheck) -> None:
            self.live.note(
                f"supervised step {check.steps}: held-out accuracy {check.accuracy:.1%}, learning"
                f" rate {check.learning_rate:g}"
            )
            self.recorder.record("warm_start", check.steps, 0, check.metrics())

        train_rows, held_out_rows = await asyncio.to_thread(supervised_rows, data_spec(config))
        async with self.watched(learner):
            await warm_start(
                learner,
                train_rows,
                held_out_rows,
                settings,
                config.seed,
                report,
                config.learner.max_skipped_steps,
            )
        await learner.reset_optimizer(config.learning_rate, config.learner.schedule.warmup_steps)

    async def _train(self, stations: Stations) -> None:
        self.recorder.record("truncation", *self._position(), self.plan.truncation_metrics())
        self.recorder.record("startup", *self._position(), stations.startup)
        restored: list[Scored] = []
        if self.directory.checkpoint is not None and self.directory.state.waiting:
            restored = await stations.scores.load(self.directory.checkpoint / "buffer.parquet")
        coordinator = self.coordinator = make_coordinator(
            self.config, self.directory, restored, stations, self.recorder
        )
        self.live.follow(coordinator)
        watchdog = Watchdog(
            lambda: marks(coordinator),
            lambda: current_stage(coordinator),
            self.config.observe.stall_s,
            stations.describe,
            self._report_stall,
        )
        counting = asyncio.create_task(self.live.count_tokens(stations.generate.statuses))
        try:
            async with watchdog.watching():
                await stations.while_placed(coordinator.run())
        finally:
            counting.cancel()

    async def _export(self, stations: Stations) -> None:
        self.live.phase("saving")
        path, learner = self.directory.path, stations.learner
        async with self.watched(learner):
            if self.config.takes_shifts_on_gpus:
                await stations.weights.rest()
                await learner.take_device()
            await learner.export_hf(path / ".hf")
        replace_directory(path / ".hf", path / "hf")

    def _position(self) -> tuple[int, int]:
        """(steps attempted, version) of a record that is written now."""
        if self.coordinator is None:
            return self.directory.state.steps_attempted, self.directory.state.version
        return self.coordinator.progress.attempted, self.coordinator.progress.version

    def watched(self, learner: RayLearner) -> AbstractAsyncContextManager[None]:
        """Watch calls of the learner made before the coordinator exists or after it ends."""
        return watching_learner(
            learner,
            lambda: self.live.progress.phase,
            self.config.observe.stall_s,
            self._report_stall,
        )

    def _report_stall(self, stage: Stage, seconds: float, workers: str) -> None:
        """Record that a stage made no progress for this long.

        Args:
            workers: what the processes of the stage are doing.
        """
        line = (
            f"{stage.name} has made no progress for {seconds:.0f} s; it waits for {stage.waits_for}"
        )
        record = {
            "stage": stage.name,
            "waits_for": stage.waits_for,
            "stall_s": seconds,
            "workers": workers,
        }
        self.recorder.record("stall", *self._position(), record)
        logger.warning("%s: %s", line, workers)
        self.live.note(f"{line}: {workers[:NOTE_LENGTH]}")


def make_coordinator(
    config: Config,
    directory: RunDirectory,
    restored: list[Scored],
    stations: Stations,
    recorder: RunRecorder,
) -> Coordinator:
    """Make the coordinator of the stations.

    Args:
        restored: the groups of the checkpoint's buffer.
    """
    state = directory.state
    parts = Parts(
        prompts=stations.prompts,
        rollouts=stations.rollouts,
        scores=stations.scores,
        learner=stations.learner,
        weights=stations.weights,
        recorder=recorder,
        checkpoints=directory.checkpoints,
        evaluate=_evaluator(directory, stations),
        check=_probe_check(config, state, stations),
        concurrency=concurrency_of(stations.config, stations.kv_cache_tokens, state.concurrency),
        reference=stations.reference,
        device=stations.learner if config.takes_shifts_on_gpus else None,
    )
    schedule = Schedule(
        max_steps=config.max_steps,
        staleness=Staleness(
            config.staleness.max_staleness,
            config.groups_per_step,
            config.staleness.on_stale.name,
            config.staleness.over_sampling,
        ),
        least_usable=2 if config.algorithm.compares_siblings else 1,
        filter_zero_variance=config.algorithm.filter_zero_variance,
        max_skipped_steps=config.learner.max_skipped_steps,
        max_errors=config.rollout.max_errors,
        checkpoint_every=config.checkpoint.every_steps,
        check_every=config.weights.check_every_versions,
        evaluate_every=config.eval.every_steps,
        evaluate_in_flight=config.eval.in_flight,
        refresh_every=config.algorithm.update_interval or 0,
        colocate=config.placement == "colocate",
    )
    return Coordinator(parts, schedule, state, restored)


def _evaluator(directory: RunDirectory, stations: Stations) -> Evaluator | None:
    if not stations.evaluation_prompts:
        return None
    return Evaluator(
        stations.config,
        stations.generate,
        stations.score,
        stations.evaluation_prompts,
        directory.state.run_id,
        directory.state.attempt,
        directory.path / "evaluations",
        stations.sessions,
    )


def _probe_check(config: Config, state: State, stations: Stations) -> ProbeCheck:
    return ProbeCheck(
        stations.generate,
        stations.learner,
        stations.probe_prompts,
        stations.probe_tokens,
        config.logprob_tolerance,
        config.logprob_statistic,
        WeightsId(state.run_id, state.attempt, state.version),
        config.rollout.temperature,
        stations.weights.differing_tensor,
    )


def concurrency_of(config: Config, kv_cache_tokens: int, found: float | None = None) -> Concurrency:
    """The limit on the number of groups that are generated at once.

    Args:
        kv_cache_tokens: capacity of one replica's KV cache, in tokens.
        found: the limit that an earlier attempt had reached.
    """
    rollout, generator = config.rollout, config.engines
    samples, replicas = config.completions_per_group, generator.num_replicas
    first = first_limit(
        replicas * kv_cache_tokens,
        replicas * config.max_num_seqs,
        samples,
        config.longest_trajectory,
    )
    return Concurrency(found or first, config.groups_at_once, samples, rollout.adaptive_concurrency)
