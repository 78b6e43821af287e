"""One run from config to summary: directory, cluster, stations, warm start, training, what is left behind.

preflight → run directory → Ray → learner and generators (in parallel) → [warm start] → coordinator → hf/ → summary
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

from asyncrl.config import Config
from asyncrl.control.checkpoint import State
from asyncrl.control.concurrency import Concurrency, first_limit
from asyncrl.control.coordinator import Coordinator, Parts, Schedule
from asyncrl.control.fates import FatesWriter
from asyncrl.control.protocols import PartDied, Scored
from asyncrl.control.staleness import Staleness
from asyncrl.data.supervised import supervised_rows
from asyncrl.directory import RunDirectory, replace_directory
from asyncrl.evaluation import Evaluator
from asyncrl.generation.orphans import end_orphans
from asyncrl.generation.protocol import WeightsId
from asyncrl.launch import AcrossAttempts, Stations, launch
from asyncrl.learning.group import LearnerGroup
from asyncrl.learning.warm_start import WarmStartCheck, warm_start
from asyncrl.observe.alarms import FIRST_STEPS
from asyncrl.observe.live import Live, RunRecorder
from asyncrl.observe.metrics import MetricsWriter, first_entropies, read_metrics
from asyncrl.observe.progress import ProgressView, duration
from asyncrl.observe.sinks import open_sinks
from asyncrl.observe.summary import before_and_after
from asyncrl.observe.watchdog import Standing, Watchdog, marks, standing
from asyncrl.placement import check_models, wait_for_room
from asyncrl.plan import Plan, arithmetic, make_plan
from asyncrl.preflight.cluster_address import answering_cluster
from asyncrl.preflight.own import try_own
from asyncrl.preflight.rewards import try_rewards
from asyncrl.redact import RedactingFormatter, print_shown, shown
from asyncrl.runtime.files import append_to
from asyncrl.snapshot import resolve_models
from asyncrl.weights.check import ProbeCheck

__all__ = ["Summary", "command_name", "concurrency_of", "train"]

NOTE_LENGTH = 160
REPLACED = ("--resume", "--name")
"""Options that the resume command does not repeat: it says its own."""
CKPT_STEP = "--checkpoint.ckpt_step"

logger = logging.getLogger("asyncrl")

Watching = AbstractAsyncContextManager[None]


@dataclass(slots=True)
class Summary:
    """What a finished run is worth knowing by. Accuracies are held-out shares, 0..1, before and after; None without evaluation."""

    directory: Path
    seconds: float
    before: dict[str, float] | None = None
    after: dict[str, float] | None = None
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds by phase."""
    changes: list[str] = field(default_factory=list)
    """Lines of `before_and_after`."""


def train(
    config: Config,
    resume_command: Sequence[str],
    after: Callable[[Config, Summary], None] | None = None,
    began: Callable[[Callable[[], None]], None] | None = None,
) -> int:
    """Train as the config says and return the exit code: 0 done, 1 failed, 130 interrupted. When a part of the run has died, a new attempt begins from
    the last committed checkpoint, at most `max_restarts` times without a checkpoint between. The generators go on meanwhile.

    Args:
        resume_command: the command that was given, from which the resume command is made.
        after: called with the summary of a finished run, to print more.
        began: called with a function that interrupts the run, from any thread.

    Raises:
        ConfigError: something in the config cannot be used, or no cluster answers at RAY_ADDRESS; nothing was started.
    """
    answering_cluster()
    config = resolve_models(config)
    plan = make_plan(config)
    try_rewards(config, plan.prompts)
    try_own(config)
    resume = _variables() + shlex.join(
        [*_without_resume(resume_command, config), "--name", config.name, "--resume", "must"]
    )
    across = AcrossAttempts()
    try:
        summary = _attempts(config, plan, resume, across, began)
    finally:
        across.end()
    if isinstance(summary, int):
        return summary
    _print_summary(summary, resume)
    if after is not None:
        after(config, summary)
    return 0


def _attempts(
    config: Config,
    plan: Plan,
    resume: str,
    across: AcrossAttempts,
    began: Callable[[Callable[[], None]], None] | None,
) -> Summary | int:
    """One attempt after another, until one is the last: its summary, or the exit code."""
    restarts_left = config.max_restarts
    while True:
        with RunDirectory(config) as directory:
            _announce(plan, directory, resume)
            left = partial(_restarts_left, config, directory, restarts_left)
            try:
                return asyncio.run(
                    _interruptible(_train(config, plan, directory, across, left), began)
                )
            except (asyncio.CancelledError, KeyboardInterrupt):
                logger.info("interrupted")
                print_shown(f"\ninterrupted; {_way_on(directory, resume)}", file=sys.stderr)
                return 130
            except Exception as error:
                logger.error("the run failed", exc_info=error)
                print_shown(
                    f"\nasyncrl: {_one_line(error)}\n  full log: {directory.logs / 'driver.log'}",
                    file=sys.stderr,
                )
                restarts_left = left()
                if not isinstance(error, PartDied) or restarts_left == 0:
                    print_shown(f"  {_way_on(directory, resume)}", file=sys.stderr)
                    return 1
        restarts_left -= 1
        print_shown(
            f"  a new attempt begins by itself (max_restarts = {config.max_restarts}; {restarts_left} left without a new checkpoint)\n",
            file=sys.stderr,
        )
        config = config.model_copy(update={"resume": "auto"})
        if config.checkpoint.load is None:  # with it, the step is that of the beginning
            config = config.model_copy(
                update={"checkpoint": config.checkpoint.model_copy(update={"ckpt_step": None})}
            )


def _restarts_left(config: Config, directory: RunDirectory, before: int) -> int:
    """Attempts that may still begin by themselves: all of them once the attempt has written a checkpoint."""
    return (
        before
        if directory.checkpoints.newest_first()[:1] in ([], [directory.checkpoint])
        else config.max_restarts
    )


async def _interruptible(work: Any, began: Callable[[Callable[[], None]], None] | None) -> Summary:
    """Ctrl-C and SIGTERM cancel the work once; its clean-up then has time. Ray replaces SIGTERM's handler, so `_train` sets ours again."""
    task = asyncio.ensure_future(work)
    _catch_signals(task)
    if began is not None:
        began(partial(asyncio.get_running_loop().call_soon_threadsafe, _stop, task))
    return await task  # type: ignore[no-any-return]


def _catch_signals(task: asyncio.Future[Any]) -> None:
    if threading.current_thread() is not threading.main_thread():
        return  # signals come to the main thread alone, and are its owner's
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _stop, task)


def _stop(task: asyncio.Future[Any]) -> None:
    """A second signal does not cut short the clean-up that the first has begun."""
    if isinstance(task, asyncio.Task) and task.cancelling():
        print_shown(
            "\nasyncrl: already stopping; the parts get a few seconds each to end", file=sys.stderr
        )
    else:
        task.cancel()


async def _train(
    config: Config,
    plan: Plan,
    directory: RunDirectory,
    across: AcrossAttempts,
    restarts_left: Callable[[], int],
) -> Summary:
    started = time.monotonic()
    task = asyncio.current_task()
    assert task is not None
    _log_to_file(directory.logs / "driver.log")
    for line in [_beginning(config, directory), *directory.said]:
        logger.info("%s", line)
    live = Live(config, started)
    state = directory.state
    writer = MetricsWriter(
        directory.path,
        state.attempt,
        open_sinks(config, directory.path, state.run_id),
        {state.version: state.steps_attempted},
    )
    with ProgressView() as view, writer:
        async with across.attempt(config, directory.state, directory.logs, restarts_left):
            _catch_signals(task)
            showing = asyncio.create_task(live.show(view))
            entropies = first_entropies(directory.path, FIRST_STEPS)
            recorder = RunRecorder(
                writer,
                FatesWriter(directory.path / "fates", directory.state.attempt),
                live,
                entropies,
            )
            try:
                live.phase("looking for room on the cluster")
                if across.generators is None:
                    await end_orphans(config.name, directory.state.run_id, live.note)
                config = across.config(config)
                config, table = await wait_for_room(config, plan.weights_bytes, live.note)
                print_shown(table)
                await check_models(config)
                live.phase("starting generators and learner")

                def place() -> tuple[int, int]:
                    return directory.state.steps_attempted, directory.state.version

                async def prepare(learner: LearnerGroup) -> None:
                    await _prepare_learner(
                        config,
                        directory,
                        learner,
                        live,
                        recorder,
                        partial(_watched, config, live, recorder, place),
                    )

                async with launch(
                    config, directory, plan.prompts, plan.context, prepare, across
                ) as stations:
                    recorder.record("truncation", *place(), plan.truncation_metrics())
                    recorder.record("startup", *place(), stations.startup)
                    restored = await _restored(directory, stations)
                    coordinator = _coordinator(
                        config, directory.state, restored, directory, stations, recorder
                    )
                    live.follow(coordinator)

                    def reached() -> tuple[int, int]:
                        return coordinator.progress.attempted, coordinator.progress.version

                    moves, where = partial(marks, coordinator), partial(standing, coordinator)
                    async with Watchdog(
                        moves,
                        where,
                        config.observe.stall_s,
                        stations.say,
                        partial(_stalled, reached, recorder, live),
                    ).watching():
                        await stations.while_placed(coordinator.run())
                    live.phase("saving")
                    async with _watched(config, live, recorder, reached, stations.learner):
                        await stations.learner.export_hf(directory.path / ".hf")
                    replace_directory(directory.path / ".hf", directory.path / "hf")
                recorder.close()
            finally:
                showing.cancel()
                live.phase("stopping")
                view.show(live.progress)
        live.phase("done")
        view.show(live.progress)
    return _summary(config, directory, time.monotonic() - started, live.phases)


async def _prepare_learner(
    config: Config,
    directory: RunDirectory,
    learner: LearnerGroup,
    live: Live,
    recorder: RunRecorder,
    watched: Callable[[LearnerGroup], Watching],
) -> None:
    """The learner's state at the first version: a checkpoint's, or the model's own, warm-started if so configured."""
    if directory.checkpoint is not None:
        live.phase("loading the checkpoint")
        async with watched(learner):
            await learner.load(directory.checkpoint / "learner")
    elif config.warm_start.data is not None:
        live.phase("warm start")

        def progress(check: WarmStartCheck) -> None:
            live.note(
                f"supervised step {check.steps}: held-out accuracy {check.accuracy:.1%}, learning rate {check.learning_rate:g}"
            )
            recorder.record("warm_start", check.steps, 0, check.metrics())

        train_rows, held_out_rows = await asyncio.to_thread(supervised_rows, config)
        async with watched(learner):
            await warm_start(
                learner,
                train_rows,
                held_out_rows,
                config.warm_start,
                config.seed,
                progress,
                config.learner.max_skipped_steps,
            )
        await learner.reset_optimizer(config.learner.learning_rate, config.learner.warmup_steps)
    live.phase("waiting for the generators")


def _watched(
    config: Config,
    live: Live,
    recorder: RunRecorder,
    place: Callable[[], tuple[int, int]],
    learner: LearnerGroup,
) -> Watching:
    """A watchdog for what the learner does alone, before training and after it."""

    def where() -> Standing:
        return Standing(
            "learning",
            f"an answer of the learner's ranks, after {learner.answered} calls; phase: {live.progress.phase}",
        )

    async def ask(stage: str) -> tuple[None, str]:
        return await learner.say()

    return Watchdog(
        lambda: learner.answered,
        where,
        config.observe.stall_s,
        ask,
        partial(_stalled, place, recorder, live),
    ).watching()


def _stalled(
    place: Callable[[], tuple[int, int]],
    recorder: RunRecorder,
    live: Live,
    where: Standing,
    seconds: float,
    text: str,
) -> None:
    """The watchdog found the run standing still; `place` tells the steps attempted, and the version."""
    line = f"{where.stage} has stood still for {seconds:.0f} s; it waits for {where.waits_for}"
    recorder.record(
        "stall",
        *place(),
        {"stage": where.stage, "waits_for": where.waits_for, "stall_s": seconds, "workers": text},
    )
    logger.warning("%s: %s", line, text)
    live.note(f"{line}: {text[:NOTE_LENGTH]}")


async def _restored(directory: RunDirectory, stations: Stations) -> list[Scored]:
    """The groups that wait in the checkpoint."""
    if directory.checkpoint is None or not directory.state.waiting:
        return []
    return await stations.scores.load(directory.checkpoint / "buffer.parquet")


def _coordinator(
    config: Config,
    state: State,
    restored: list[Scored],
    directory: RunDirectory,
    stations: Stations,
    recorder: RunRecorder,
) -> Coordinator:
    generate = stations.generate
    evaluate = None
    if stations.evaluation_prompts:
        kept = directory.path / "evaluations"
        evaluate = Evaluator(
            stations.config,
            generate,
            stations.score,
            stations.evaluation_prompts,
            state.run_id,
            state.attempt,
            kept,
        )
    check = ProbeCheck(
        generate,
        stations.learner,
        stations.probe_prompts,
        stations.probe_tokens,
        config.logprob_tolerance,
        config.logprob_statistic,
        WeightsId(state.run_id, state.attempt, state.version),
        config.rollout.temperature,
        stations.weights.differing_tensor,
    )
    parts = Parts(
        prompts=stations.prompts,
        rollouts=stations.rollouts,
        scores=stations.scores,
        learner=stations.learner,
        weights=stations.weights,
        recorder=recorder,
        checkpoints=directory.checkpoints,
        evaluate=evaluate,
        check=check,
        concurrency=concurrency_of(stations.config, stations.kv_cache_tokens, state.concurrency),
    )
    schedule = Schedule(
        max_steps=config.max_steps,
        staleness=Staleness(
            config.staleness.max_staleness,
            config.groups_per_step,
            config.staleness.on_stale,
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
    )
    return Coordinator(parts, schedule, state, restored)


def concurrency_of(config: Config, kv_cache_tokens: int, found: float | None = None) -> Concurrency:
    """The limit on groups that run at once, for replicas with KV caches of so many tokens each; `found` is where an earlier attempt had arrived."""
    rollout, generator = config.rollout, config.generator
    most = config.groups_at_once
    samples, replicas = rollout.n_samples_per_prompt, generator.num_replicas
    first = first_limit(
        replicas * kv_cache_tokens,
        replicas * config.max_num_seqs,
        samples,
        config.longest_trajectory,
    )
    return Concurrency(found or first, most, samples, rollout.adaptive_concurrency)


def _summary(
    config: Config, directory: RunDirectory, seconds: float, phases: dict[str, float]
) -> Summary:
    records = list(read_metrics(directory.path))
    evaluations = [record for record in records if record["event"] == "evaluation"]
    summary = Summary(
        directory.path, seconds, phases=phases, changes=before_and_after(config, records)
    )
    if evaluations:
        summary.before, summary.after = evaluations[0], evaluations[-1]
    for line in [f"done in {duration(seconds)}", *summary.changes]:
        logger.info("%s", line)
    return summary


def _announce(plan: Plan, directory: RunDirectory, resume: str) -> None:
    print_shown(
        "\n".join([_beginning(plan.config, directory), *(f"  {line}" for line in directory.said)])
    )
    print_shown(arithmetic(plan.config))
    print_shown(plan.prompts_text())
    print_shown(f"run directory  {directory.path}\nif it stops    {resume}\n")


def _beginning(config: Config, directory: RunDirectory) -> str:
    state = directory.state
    begin = (
        f"resuming at version {state.version} from {directory.checkpoint}"
        if directory.checkpoint
        else "a new start at version 0"
    )
    return f"run {config.name}, attempt {state.attempt}: {begin}"


def _print_summary(summary: Summary, resume: str) -> None:
    print_shown(
        f"\ndone in {duration(summary.seconds)}: "
        + ", ".join(
            f"{name} {duration(seconds)}"
            for name, seconds in summary.phases.items()
            if seconds >= 1
        )
    )
    for line in summary.changes:
        print_shown(line)
    path = summary.directory
    print_shown(f"model          {path / 'hf'}   (loads in transformers and vLLM)")
    print_shown(f"trajectories   {path / 'groups'}/*.parquet, fates in {path / 'fates'}/*.parquet")
    print_shown(
        f"metrics        {path / 'metrics.jsonl'}, tensorboard --logdir {path / 'tensorboard'}"
    )
    print_shown(f"train longer   {re.sub(r' --max_steps[ =]+[0-9]+', '', resume)} --max_steps N")
    print_shown(f"look inside    ASYNCRL_RUN={path} jupyter lab notebooks/01_quickstart.ipynb")


def _way_on(directory: RunDirectory, resume: str) -> str:
    if directory.checkpoints.newest_first():
        return f"go on with: {resume}"
    return f"no checkpoint was written yet; start again with: {resume.removesuffix(' must')} auto"


def command_name() -> str:
    """How the `asyncrl` of this interpreter is called from here: `asyncrl` if the shell finds it."""
    path = Path(sys.executable).with_name("asyncrl")
    return "asyncrl" if shutil.which("asyncrl") == str(path) else os.path.relpath(path)


def _variables() -> str:
    """What the command needs of this environment."""
    runs = os.environ.get("ASYNCRL_RUNS")
    return f"ASYNCRL_RUNS={shlex.quote(runs)} " if runs else ""


def _without_resume(command: Sequence[str], config: Config) -> list[str]:
    """The command without how it began: it goes on from the newest checkpoint, also where the YAML file names another. A step of `checkpoint.load` stays."""
    goes_back = config.checkpoint.ckpt_step is not None and config.checkpoint.load is None
    left_out = (*REPLACED, CKPT_STEP) if goes_back else REPLACED
    kept: list[str] = []
    words = iter(command)
    for word in words:
        if word in left_out:
            next(words, None)
        elif not word.startswith(tuple(f"{option}=" for option in left_out)):
            kept.append(word)
    return [*kept, CKPT_STEP, "None"] if goes_back else kept


def _one_line(error: BaseException) -> str:
    name, text = type(error).__name__, shown(str(error).strip())
    if not text:
        return name
    return (
        text
        if type(error).__module__.startswith("asyncrl") or type(error) is RuntimeError
        else f"{name}: {text}"
    )


class _LogHandler(logging.StreamHandler[IO[str]]):
    """Drops what cannot be written. The standard library would print a traceback for each line when the disk is full."""

    def handleError(self, record: logging.LogRecord) -> None:  # the standard library's name
        pass


def _log_to_file(path: Path) -> None:
    """Everything that libraries log in this process goes to the file, and nothing to the terminal."""
    handler = _LogHandler(append_to(path))
    handler.setFormatter(RedactingFormatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for name in ("ray", "ray.serve"):
        # Ray gives these handlers of their own, which write to the terminal, when they are imported.
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True
