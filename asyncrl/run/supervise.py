"""Runs the attempts of a job until one finishes: the run directory, signals, automatic restarts,
and the summary. A job is one kind of run."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Protocol

from asyncrl.config import RunSettings
from asyncrl.contracts.errors import PartDiedError, RunStoppedError
from asyncrl.observe.progress import Progress, ProgressView, duration
from asyncrl.observe.sinks import SinkRun, open_sinks
from asyncrl.run.across_attempts import AcrossAttempts
from asyncrl.run.ray_watch import RayWatch
from asyncrl.run.stopping import Stop, handling_signals
from asyncrl.run.watching import PageProcess
from asyncrl.rundir.directory import RunDirectory
from asyncrl.rundir.metrics import MetricsWriter, read_metrics
from asyncrl.runtime.encodings import safe_output
from asyncrl.runtime.files.opening import append_to
from asyncrl.runtime.loopback import call_loopback_directly
from asyncrl.runtime.output import lasting_output
from asyncrl.runtime.redact import RedactingFormatter, print_shown, shown

INTERRUPTED = 130
"""Exit code of an interrupted run."""
REPLACED = ("--resume", "--name")
"""Options that the resume command sets itself, and so does not repeat."""
CKPT_STEP = "--checkpoint.ckpt_step"

PHASE = "startup/phase/"
"""Beginning of the names of a `first_step` record's phases."""

logger = logging.getLogger("asyncrl")


@dataclass(slots=True)
class Summary:
    """The result of a finished run."""

    directory: Path
    seconds: float
    before: Mapping[str, object] | None = None
    """Metrics of the first evaluation; None without evaluation."""
    after: Mapping[str, object] | None = None
    """Metrics of the last evaluation; None without evaluation."""
    phases: dict[str, float] = field(default_factory=dict)
    """Phase → seconds."""
    first_step: Mapping[str, object] | None = None
    """The record `first_step` of the last attempt; None without one."""
    startup: Mapping[str, object] | None = None
    """The record `startup` of the last attempt; None without one."""
    changes: list[str] = field(default_factory=list)
    """Lines about what the run has changed."""


class Told(Protocol):
    """The live state of an attempt, for the table and the summary."""

    progress: Progress
    phases: dict[str, float]

    def phase(self, name: str) -> None: ...


class RunningAttempt(Protocol):
    """One attempt of a job."""

    @property
    def live(self) -> Told: ...

    async def run(self, view: ProgressView) -> None:
        """Train to the last step, or raise the error that ended the attempt: after `stop`,
        RunStoppedError."""
        ...

    def stop(self) -> bool:
        """Ask the attempt to end after the step in progress, with a checkpoint. False: it has
        nothing to save, and goes on."""
        ...


class Job(Protocol):
    """One kind of run: what its attempts do, and what the user reads about it."""

    @property
    def config(self) -> RunSettings: ...

    def resumed(self, update: Mapping[str, object]) -> Job:
        """The same job with these settings changed, for the next attempt."""
        ...

    def description(self) -> Sequence[str]:
        """Texts to print before the first attempt."""
        ...

    def attempt(
        self, directory: RunDirectory, across: AcrossAttempts, writer: MetricsWriter
    ) -> RunningAttempt: ...

    def changes(self, records: Sequence[Mapping[str, object]]) -> list[str]:
        """Lines about what the run has changed, from its metrics."""
        ...

    def results(self, directory: Path) -> Sequence[str]:
        """Lines about what a finished run has left in its directory."""
        ...


def run_job(
    job: Job,
    resume_command: Sequence[str],
    after: Callable[[Summary], None] | None = None,
    on_start: Callable[[Callable[[], None]], None] | None = None,
    asked: float | None = None,
    watch: bool = False,
) -> int:
    """Run a job and return the exit code: 0 done, 1 failed, 130 interrupted.

    When a part of the run dies, a new attempt starts from the last committed checkpoint, at most
    `max_restarts` times between checkpoints. The generators keep running between attempts.

    Ctrl-C, SIGTERM and SIGHUP stop the run after the step in progress, with a checkpoint.

    Args:
        resume_command: the user's command, from which the resume command is derived.
        after: called with the summary of a finished run, for example to print more.
        on_start: called with a function that stops the run, which any thread may call.
        asked: when the user's command began, on the monotonic clock. None: now.
        watch: serve the run's page, and open it in a browser, while the run goes on.

    Raises:
        ConfigError: the run directory cannot be used. Nothing was started.
    """
    call_loopback_directly()
    safe_output()
    config = job.config
    resume = _variables() + shlex.join(
        [*_without_resume(resume_command, config), "--name", config.name, "--resume", "must"]
    )
    across, stop = AcrossAttempts(asked), Stop()
    page = PageProcess(lambda line: print_shown(f"page           {line}")) if watch else None
    if on_start is not None:
        on_start(lambda: stop.ask("canceled"))
    with lasting_output(), handling_signals(stop.ask):
        try:
            summary = _attempts(job, resume_command, resume, across, stop, page)
        except KeyboardInterrupt:  # between two attempts
            again = f"{resume.removesuffix(' must')} auto"
            print_shown(f"\ninterrupted ({stop.cause}); go on with: {again}", file=sys.stderr)
            return INTERRUPTED
        finally:
            stop.over = True
            if page is not None:
                page.end()
            across.end()
        if isinstance(summary, int):
            return summary
        _print_summary(job, summary, resume)
        if after is not None:
            after(summary)
    return 0


def _attempts(
    job: Job,
    command: Sequence[str],
    resume: str,
    across: AcrossAttempts,
    stop: Stop,
    page: PageProcess | None,
) -> Summary | int:
    """Run attempts until one finishes, or ends the run: its summary, or the exit code."""
    restarts_left = job.config.max_restarts
    while True:
        config = job.config
        with RunDirectory(config, command) as directory:
            _announce(job, directory, resume, watched=page is not None)
            if page is not None:
                page.begin(directory.path)
            left = partial(_restarts_left, config, directory, restarts_left)
            end = partial(_end, directory, resume, stop)
            try:
                with RayWatch(end) as ray:
                    summary = asyncio.run(_train(job, directory, across, left, stop, ray))
            except (Exception, asyncio.CancelledError, KeyboardInterrupt) as error:
                if (said := ray.ended()) is not None:  # whatever failed because of that
                    return said
                restarts_left = left()
                goes_on = isinstance(error, PartDiedError) and restarts_left > 0 and not stop.cause
                code = end(error, goes_on)
                if not goes_on:
                    return code
            else:
                stop.over = True
                directory.end("finished")
                return summary
        restarts_left -= 1
        print_shown(
            f"  a new attempt starts automatically (max_restarts = {config.max_restarts};"
            f" restarts left before the next checkpoint: {restarts_left})\n",
            file=sys.stderr,
        )
        job = job.resumed(_for_next_attempt(config))


def _end(
    directory: RunDirectory, resume: str, stop: Stop, error: BaseException, goes_on: bool = False
) -> int:
    """Say and record how an attempt ended that did not finish. Returns the exit code.

    Args:
        resume: the resume command.
        goes_on: whether another attempt follows.
    """
    stop.over = not goes_on
    interrupted = stop.cause or not isinstance(error, Exception)
    line = stop.cause or "KeyboardInterrupt" if interrupted else _one_line(error)
    failed = isinstance(error, Exception) and not isinstance(error, RunStoppedError)
    if failed:
        logger.error("the run failed", exc_info=error)
    directory.end("interrupted" if interrupted else "failed", line)
    way_on = _way_on(directory, resume)
    if interrupted:
        logger.info("interrupted (%s); %s", line, way_on)
        print_shown(f"\ninterrupted ({line}); {way_on}", file=sys.stderr)
        if failed:  # such as a full disk, or a part that got the same signal
            print_shown(f"  the last step is not saved: {_one_line(error)}", file=sys.stderr)
        return INTERRUPTED
    log = directory.logs / "driver.log"
    print_shown(f"\nasyncrl: {line}\n  full log: {log}", file=sys.stderr)
    if not goes_on:
        logger.info("%s", way_on)
        print_shown(f"  {way_on}", file=sys.stderr)
    return 1


def _for_next_attempt(config: RunSettings) -> dict[str, object]:
    """The settings that an automatic restart changes."""
    if config.checkpoint.load is not None:  # with load, the step is of the loaded run
        return {"resume": "auto"}
    return {
        "resume": "auto",
        "checkpoint": config.checkpoint.model_copy(update={"ckpt_step": None}),
    }


def _restarts_left(config: RunSettings, directory: RunDirectory, before: int) -> int:
    """Automatic restarts that are left: `max_restarts` again once the attempt has written a
    checkpoint."""
    return (
        before
        if directory.checkpoints.newest_first()[:1] in ([], [directory.checkpoint])
        else config.max_restarts
    )


async def _train(
    job: Job,
    directory: RunDirectory,
    across: AcrossAttempts,
    restarts_left: Callable[[], int],
    stop: Stop,
    ray: RayWatch,
) -> Summary:
    started, config = time.monotonic(), job.config
    _log_to_file(directory.logs / "driver.log")
    for line in [_beginning(config, directory), *directory.notes]:
        logger.info("%s", line)
    with (
        stop.ending(config.checkpoint.on_stop_s),
        ProgressView() as view,
        open_writer(config, directory) as writer,
    ):
        attempt = job.attempt(directory, across, writer)
        stop.finish_step = attempt.stop
        async with (
            across.attempt(config, directory.state, directory.logs, restarts_left),
            ray.watching(),
        ):
            await attempt.run(view)
        live = attempt.live
        live.phase("done")
        view.show(live.progress)
    return _summary(job, directory, time.monotonic() - started, live.phases)


def open_writer(config: RunSettings, directory: RunDirectory) -> MetricsWriter:
    """The metrics writer of one attempt: `metrics.jsonl`, and the sinks of the config."""
    state = directory.state
    run = SinkRun(config.observe.project, config.name, state.run_id, directory.path, config.dump())
    sinks = open_sinks(config.observe.sinks, run)
    return MetricsWriter(
        directory.path, state.attempt, sinks, {state.version: state.steps_attempted}
    )


def _summary(
    job: Job, directory: RunDirectory, seconds: float, phases: dict[str, float]
) -> Summary:
    records = list(read_metrics(directory.path))
    evaluations = [record for record in records if record["event"] == "evaluation"]
    summary = Summary(directory.path, seconds, phases=phases, changes=job.changes(records))
    latest = {
        record["event"]: record
        for record in records
        if record["attempt"] == directory.state.attempt
    }
    summary.first_step, summary.startup = latest.get("first_step"), latest.get("startup")
    if evaluations:
        summary.before, summary.after = evaluations[0], evaluations[-1]
    for line in [f"done in {duration(seconds)}", *summary.changes]:
        logger.info("%s", line)
    return summary


def _announce(job: Job, directory: RunDirectory, resume: str, watched: bool) -> None:
    print_shown(
        "\n".join([_beginning(job.config, directory), *(f"  {line}" for line in directory.notes)])
    )
    for text in job.description():
        print_shown(text)
    hint = "" if watched else f"watch it       asyncrl watch {shlex.quote(str(directory.path))}\n"
    print_shown(f"run directory  {directory.path}\n{hint}if it stops    {resume}\n")


def _beginning(config: RunSettings, directory: RunDirectory) -> str:
    state = directory.state
    begin = (
        f"resuming at version {state.version} from {directory.checkpoint}"
        if directory.checkpoint
        else "a new start at version 0"
    )
    return f"run {config.name}, attempt {state.attempt}: {begin}"


def _print_summary(job: Job, summary: Summary, resume: str) -> None:
    print_shown(
        f"\ndone in {duration(summary.seconds)}: "
        + ", ".join(
            f"{name} {duration(seconds)}"
            for name, seconds in summary.phases.items()
            if seconds >= 1
        )
    )
    if summary.first_step is not None:
        print_shown(f"first step     {timeline(summary.first_step)}")
    if summary.startup is not None:
        print_shown(f"start          {startup_parts(summary.startup)}")
    for line in summary.changes:
        print_shown(line)
    path = summary.directory
    print_shown(f"model          {path / 'hf'}   (loads in transformers and vLLM)")
    for line in job.results(path):
        print_shown(line)
    print_shown(
        f"metrics        {path / 'metrics.jsonl'}, tensorboard --logdir {path / 'tensorboard'}"
    )
    print_shown(f"train longer   {re.sub(r' --max_steps[ =]+[0-9]+', '', resume)} --max_steps N")


def timeline(record: Mapping[str, object]) -> str:
    """The record `first_step` as one line."""
    parts = ", ".join(
        f"{name.removeprefix(PHASE).removesuffix('_s').replace('_', ' ')} {duration(seconds)}"
        for name, seconds in record.items()
        if name.startswith(PHASE) and isinstance(seconds, float) and seconds >= 0.5
    )
    total = record["startup/first_step_s"]
    assert isinstance(total, float)
    return f"{duration(total)} from the start: {parts}"


def startup_parts(record: Mapping[str, object]) -> str:
    """The record `startup` as one line: both sides, which start at the same time, and their
    parts."""
    sides = []
    for side, whole, parts in (
        ("generators", "startup/generators_s", "startup/generator_"),
        ("learner", "startup/learner_s", "startup/learner_"),
    ):
        if isinstance(seconds := record.get(whole), float):
            named = ", ".join(
                f"{name.removeprefix(parts).removesuffix('_s').replace('_', ' ')} {value:.1f}s"
                for name, value in record.items()
                if name.startswith(parts)
                and name not in (whole, f"{parts}s")
                and name.endswith("_s")
                and isinstance(value, float)
                and value >= 0.05
            )
            sides.append(f"{side} {seconds:.1f}s" + (f" ({named})" if named else ""))
    return "; ".join(sides)


def _way_on(directory: RunDirectory, resume: str) -> str:
    if directory.checkpoints.newest_first():
        return f"resume with: {resume}"
    return f"no checkpoint was written yet; start again with: {resume.removesuffix(' must')} auto"


def command_name() -> str:
    """The command that runs this interpreter's `asyncrl`: its name if the shell finds it, or else
    its path."""
    path = Path(sys.executable).with_name("asyncrl")
    return "asyncrl" if shutil.which("asyncrl") == str(path) else os.path.relpath(path)


def _variables() -> str:
    """The environment variables that the resume command needs, as a prefix."""
    runs = os.environ.get("ASYNCRL_RUNS")
    return f"ASYNCRL_RUNS={shlex.quote(runs)} " if runs else ""


def _without_resume(command: Sequence[str], config: RunSettings) -> list[str]:
    """The command without options about its own start. It resumes from the newest checkpoint, even
    if the YAML file names another one. A step of `checkpoint.load` stays."""
    restarts_earlier = config.checkpoint.ckpt_step is not None and config.checkpoint.load is None
    left_out = (*REPLACED, CKPT_STEP) if restarts_earlier else REPLACED
    kept: list[str] = []
    words = iter(command)
    for word in words:
        if word in left_out:
            next(words, None)
        elif not word.startswith(tuple(f"{option}=" for option in left_out)):
            kept.append(word)
    return [*kept, CKPT_STEP, "None"] if restarts_earlier else kept


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
    """Drops lines that cannot be written. With a full disk, the standard library would print a
    traceback for each of them."""

    def handleError(self, record: logging.LogRecord) -> None:  # the standard library's name
        pass


def _log_to_file(path: Path) -> None:
    """Send all log lines of this process to the file, and none to the terminal."""
    handler = _LogHandler(append_to(path))
    handler.setFormatter(RedactingFormatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for name in ("ray", "ray.serve"):
        # On import, Ray gives these loggers handlers that write to the terminal.
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True
