"""A run with generators, from config to summary.

preflight → run directory → Ray → learner and generators (in parallel) → [warm start] → coordinator
→ hf/ → summary
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from asyncrl.config import Config
from asyncrl.observe.failed_sessions import failed_in_all
from asyncrl.observe.summary import before_and_after
from asyncrl.preflight.machine import refuse_machine
from asyncrl.preflight.model_snapshot import resolve_models
from asyncrl.preflight.plan.plan import make_plan
from asyncrl.preflight.plan.sections import arithmetic
from asyncrl.preflight.plan.text import Plan
from asyncrl.preflight.specs import observe_spec
from asyncrl.preflight.trials.code import try_code
from asyncrl.preflight.trials.rewards import reward_trial
from asyncrl.preflight.trials.user_functions import try_own
from asyncrl.run.across_attempts import AcrossAttempts
from asyncrl.run.attempt import Attempt
from asyncrl.run.cluster.cluster_address import answering_cluster
from asyncrl.run.supervise import Summary, run_job
from asyncrl.rundir.directory import RunDirectory
from asyncrl.rundir.metrics import MetricsWriter

logger = logging.getLogger("asyncrl")


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """A run with generators."""

    config: Config
    plan: Plan

    def resumed(self, update: Mapping[str, object]) -> TrainingJob:
        """The same run with these settings changed."""
        return replace(self, config=self.config.model_copy(update=update))

    def description(self) -> Sequence[str]:
        """The arithmetic of a step, and what the limits do to the prompts."""
        return arithmetic(self.plan.config), self.plan.prompts_text()

    def attempt(
        self, directory: RunDirectory, across: AcrossAttempts, writer: MetricsWriter
    ) -> Attempt:
        """An attempt that trains from the directory's state."""
        return Attempt(self.config, self.plan, directory, across, writer)

    def changes(self, records: Sequence[Mapping[str, object]]) -> list[str]:
        """Accuracy and rewards before and after, and why sessions failed."""
        return [*before_and_after(observe_spec(self.config), records), *failed_in_all(records)]

    def results(self, directory: Path) -> Sequence[str]:
        """Where the trajectories are, and how to look at them."""
        groups, outcomes = directory / "groups", directory / "outcomes"
        return (
            f"trajectories   {groups}/*.parquet, outcomes in {outcomes}/*.parquet",
            f"look at it     asyncrl report {directory}",
            f"look inside    ASYNCRL_RUN={directory} jupyter lab notebooks/01_quickstart.ipynb",
        )


def run_training(
    config: Config,
    resume_command: Sequence[str],
    after: Callable[[Config, Summary], None] | None = None,
    on_start: Callable[[Callable[[], None]], None] | None = None,
    asked: float | None = None,
    watch: bool = False,
) -> int:
    """Train according to the config and return the exit code. See `run_job` for the exit codes,
    restarts and arguments.

    Args:
        after: called with the config and the summary of a finished run.
        asked: when the user's command began, on the monotonic clock. None: now.
        watch: see `run_job`.

    Raises:
        ConfigError: a setting cannot be used, or no cluster answers at RAY_ADDRESS. Nothing was
            started.
    """
    asked = time.monotonic() if asked is None else asked
    answering_cluster()
    refuse_machine(config)
    config = resolve_models(config)
    with reward_trial(config) as try_rewards:
        plan = make_plan(config)
        tried = try_rewards(plan.prompts)
        for note in tried.notes if tried is not None else ():
            logger.warning("rewards: %s", note)
    try_code(config)
    try_own(config)

    def finished(summary: Summary) -> None:
        if after is not None:
            after(config, summary)

    return run_job(TrainingJob(config, plan), resume_command, finished, on_start, asked, watch)
