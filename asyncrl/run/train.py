"""A run from config to summary.

preflight → run directory → Ray → learner and generators (in parallel) → [warm start] → coordinator
→ hf/ → summary
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
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

from asyncrl.config import Config
from asyncrl.contracts.errors import PartDiedError
from asyncrl.observe.progress import ProgressView, duration
from asyncrl.observe.summary import before_and_after
from asyncrl.preflight.cluster_address import answering_cluster
from asyncrl.preflight.model_snapshot import resolve_models
from asyncrl.preflight.own_functions import try_own
from asyncrl.preflight.plan import make_plan
from asyncrl.preflight.plan_sections import arithmetic
from asyncrl.preflight.plan_text import Plan
from asyncrl.preflight.rewards import try_rewards
from asyncrl.preflight.specs import observe_spec
from asyncrl.run.attempt import Attempt, open_writer
from asyncrl.run.attempts import AcrossAttempts
from asyncrl.rundir.directory import RunDirectory
from asyncrl.rundir.metrics import read_metrics
from asyncrl.runtime.files import append_to
from asyncrl.runtime.redact import RedactingFormatter, print_shown, shown

__all__ = ["Summary", "command_name", "run_training"]

REPLACED = ("--resume", "--name")
"""Options that the resume command sets itself, and so does not repeat."""
CKPT_STEP = "--checkpoint.ckpt_step"

logger = logging.getLogger("asyncrl")


@dataclass(slots=True)
class Summary:
    """The result of a finished run."""

    directory: Path
    seconds: float
    before: dict[str, float] | None = None
    """Metrics of the first evaluation; None without evaluation."""
    after: dict[str, float] | None = None
    """Metrics of the last evaluation; None without evaluation."""
    phases: dict[str, float] = field(default_factory=dict)
    """Phase → seconds."""
    changes: list[str] = field(default_factory=list)
    """The lines of `before_and_after`."""


def run_training(
    config: Config,
    resume_command: Sequence[str],
    after: Callable[[Config, Summary], None] | None = None,
    on_start: Callable[[Callable[[], None]], None] | None = None,
) -> int:
    """Train according to the config and return the exit code: 0 done, 1 failed, 130 interrupted.

    When a part of the run dies, a new attempt starts from the last committed checkpoint, at most
    `max_restarts` times between checkpoints. The generators keep running between attempts.

    Args:
        resume_command: the user's command, from which the resume command is derived.
        after: called with the summary of a finished run, for example to print more.
        on_start: called with a function that interrupts the run, which any thread may call.

    Raises:
        ConfigError: a setting cannot be used, or no cluster answers at RAY_ADDRESS. Nothing was
            started.
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
        summary = _attempts(config, plan, resume, across, on_start)
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
    on_start: Callable[[Callable[[], None]], None] | None,
) -> Summary | int:
    """Run attempts until one finishes, or ends the run: its summary, or the exit code."""
    restarts_left = config.max_restarts
    while True:
        with RunDirectory(config) as directory:
            _announce(plan, directory, resume)
            left = partial(_restarts_left, config, directory, restarts_left)
            try:
                return asyncio.run(
                    _interruptible(_train(config, plan, directory, across, left), on_start)
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
                if not isinstance(error, PartDiedError) or restarts_left == 0:
                    print_shown(f"  {_way_on(directory, resume)}", file=sys.stderr)
                    return 1
        restarts_left -= 1
        print_shown(
            f"  a new attempt starts automatically (max_restarts = {config.max_restarts};"
            f" restarts left before the next checkpoint: {restarts_left})\n",
            file=sys.stderr,
        )
        config = config.model_copy(update={"resume": "auto"})
        if config.checkpoint.load is None:  # with load, the step is of the loaded run
            config = config.model_copy(
                update={"checkpoint": config.checkpoint.model_copy(update={"ckpt_step": None})}
            )


def _restarts_left(config: Config, directory: RunDirectory, before: int) -> int:
    """Automatic restarts that are left: `max_restarts` again once the attempt has written a
    checkpoint."""
    return (
        before
        if directory.checkpoints.newest_first()[:1] in ([], [directory.checkpoint])
        else config.max_restarts
    )


async def _interruptible(
    work: Coroutine[object, None, Summary], on_start: Callable[[Callable[[], None]], None] | None
) -> Summary:
    """Await the work. Ctrl-C and SIGTERM cancel it once, so that its clean-up can finish. Ray
    replaces the handler of SIGTERM, so `_train` sets it again."""
    task = asyncio.create_task(work)
    _catch_signals(task)
    if on_start is not None:
        loop = asyncio.get_running_loop()

        def stop() -> None:
            loop.call_soon_threadsafe(_stop, task)

        on_start(stop)
    return await task


def _catch_signals(task: asyncio.Task[Summary]) -> None:
    if threading.current_thread() is not threading.main_thread():
        return  # only the main thread receives signals, and here it belongs to the caller
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _stop, task)


def _stop(task: asyncio.Task[Summary]) -> None:
    """Cancel the task once. A second signal does not interrupt the clean-up after the first."""
    if task.cancelling():
        print_shown(
            "\nasyncrl: already stopping; each part gets a few seconds to end", file=sys.stderr
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
    for line in [_beginning(config, directory), *directory.notes]:
        logger.info("%s", line)
    with ProgressView() as view, open_writer(config, directory) as writer:
        attempt = Attempt(config, plan, directory, across, writer)
        async with across.attempt(config, directory.state, directory.logs, restarts_left):
            _catch_signals(task)  # Ray has replaced the handlers
            await attempt.run(view)
        live = attempt.live
        live.phase("done")
        view.show(live.progress)
    return _summary(config, directory, time.monotonic() - started, live.phases)


def _summary(
    config: Config, directory: RunDirectory, seconds: float, phases: dict[str, float]
) -> Summary:
    records = list(read_metrics(directory.path))
    evaluations = [record for record in records if record["event"] == "evaluation"]
    summary = Summary(
        directory.path,
        seconds,
        phases=phases,
        changes=before_and_after(observe_spec(config), records),
    )
    if evaluations:
        summary.before, summary.after = evaluations[0], evaluations[-1]
    for line in [f"done in {duration(seconds)}", *summary.changes]:
        logger.info("%s", line)
    return summary


def _announce(plan: Plan, directory: RunDirectory, resume: str) -> None:
    print_shown(
        "\n".join([_beginning(plan.config, directory), *(f"  {line}" for line in directory.notes)])
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
    print_shown(
        f"trajectories   {path / 'groups'}/*.parquet, outcomes in {path / 'outcomes'}/*.parquet"
    )
    print_shown(
        f"metrics        {path / 'metrics.jsonl'}, tensorboard --logdir {path / 'tensorboard'}"
    )
    print_shown(f"train longer   {re.sub(r' --max_steps[ =]+[0-9]+', '', resume)} --max_steps N")
    print_shown(f"look inside    ASYNCRL_RUN={path} jupyter lab notebooks/01_quickstart.ipynb")


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


def _without_resume(command: Sequence[str], config: Config) -> list[str]:
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
