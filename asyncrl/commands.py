"""What each subcommand of `asyncrl` does, after its arguments are parsed."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config import (
    Config,
    ConfigError,
    OfflineConfig,
    load_any,
    load_offline,
)
from asyncrl.runtime.clock import process_began, steady_time
from asyncrl.runtime.imports import user_folder_last
from asyncrl.runtime.output import lasting_output
from asyncrl.runtime.redact import OutputError, print_shown

if TYPE_CHECKING:
    from asyncrl.preflight.resources.gpus import Gpus
    from asyncrl.rundir.reader import Run

OFFLINE = ("sft", "dpo", "reward_model")
"""Commands that train on a dataset. Each is the objective of its config."""


def show_help(parser: argparse.ArgumentParser, command: str, asked: str) -> int:
    """Print a config command's own help with the sections of the settings, or the settings asked
    for, and return the exit code."""
    from asyncrl.config.help_text import sections_help, settings_help

    width = shutil.get_terminal_size().columns
    kinds = (OfflineConfig,) if command in OFFLINE else (Config, OfflineConfig)
    try:
        text = (
            settings_help(kinds, asked, width)
            if asked
            else f"{parser.format_help()}\n{sections_help(kinds[0], width)}"
        )
    except ConfigError as error:
        print_shown(f"asyncrl: {error}", file=sys.stderr)
        return 2
    print_shown(text)
    return 0


def run(
    command: str, path: str, overrides: list[str], options: Collection[str] = (), gpu: str = ""
) -> int:
    """Run a subcommand on a config and return its exit code. Training goes on without its standard
    output, and SIGTERM and SIGHUP stop it as Ctrl-C does.

    Args:
        options: the given PLAN_OPTIONS, or `watch`.
        gpu: for a plan, the GPUs of other machines; "": this machine's.
    """
    if command in ("plan", "check-env"):
        return _run(command, path, overrides, options, gpu)
    from asyncrl.run.stopping import handling_signals

    # Until the last line is written: `timeout` sends its signal twice.
    with handling_signals(_once()), lasting_output():
        return _run(command, path, overrides, options)


def _once() -> Callable[[str], None]:
    """A handler of signals that raises KeyboardInterrupt, but once for one request."""
    from asyncrl.run.stopping import is_repeated

    asked: list[tuple[str, float]] = []

    def interrupt(cause: str) -> None:
        now = time.monotonic()
        repeated = bool(asked) and is_repeated(cause, now - asked[0][1])
        asked[:] = asked or [(cause, now)]
        if not repeated:
            raise KeyboardInterrupt(cause)

    return interrupt


def _run(
    command: str, path: str, overrides: list[str], options: Collection[str], gpu: str = ""
) -> int:
    user_folder_last()  # reward functions may be in it
    try:
        config = (
            load_offline(path, overrides, objective=command)
            if command in OFFLINE
            else load_any(path, overrides)
        )
        if command == "plan":
            with reader_may_leave():
                return _plan(config, options, gpu)
        if command == "check-env":
            with reader_may_leave():
                return _check_env(config)
        return _train(command, config, path, overrides, "watch" in options)
    except ConfigError as error:
        print_shown(f"asyncrl: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        cause = str(stop) or "Ctrl-C"
        print_shown(f"\nasyncrl: interrupted ({cause}); nothing was started", file=sys.stderr)
        return 130


def _train(
    command: str,
    config: Config | OfflineConfig,
    path: str,
    overrides: list[str],
    watch: bool,
) -> int:
    from asyncrl.run.before_start import check_before_start

    config, finished = check_before_start(config)
    if finished is not None:
        print_shown(finished)
        return 0
    # Imported after that, because they take seconds.
    from asyncrl.run.supervise import command_name

    resume = [command_name(), command, path, *(["--watch"] if watch else []), *overrides]
    if isinstance(config, OfflineConfig):
        from asyncrl.run.offline.run import run_offline

        return run_offline(config, resume, watch=watch)
    from asyncrl.run.train import run_training

    return run_training(config, resume, asked=process_began(), watch=watch)


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """End the command if its standard output cannot be written: silently if the reader closes the
    pipe, as `head` does, or if the terminal was closed."""
    try:
        yield
    except OutputError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for output that is not flushed yet
        if error.errno not in (errno.EPIPE, errno.EIO):
            with contextlib.suppress(OutputError):
                print_shown(
                    f"asyncrl: standard output cannot be written ({error.strerror})",
                    file=sys.stderr,
                )
        sys.exit(1)


def _plan(config: Config | OfflineConfig, options: Collection[str], gpu: str) -> int:
    from asyncrl.preflight.machine import refuse_machine
    from asyncrl.preflight.resources.gpus import gpu_text, named_gpus

    refuse_machine(config)
    gpus = named_gpus(gpu) if gpu else None
    if isinstance(config, OfflineConfig):
        return _offline_plan(config, options, gpus)
    from asyncrl.preflight.model_snapshot import resolve_models
    from asyncrl.preflight.plan.plan import make_plan
    from asyncrl.preflight.trials.code import try_code
    from asyncrl.preflight.trials.rewards import reward_trial, rewards_text
    from asyncrl.preflight.trials.user_functions import own_text, try_own

    config, brief = resolve_models(config), "brief" in options
    with reward_trial(config) as try_rewards:
        plan = make_plan(config, gpus)
        if "config" in options:
            print_shown(f"{plan.config_text()}\n")
        print_shown(plan.brief() if brief else plan.text())
        given = try_rewards(plan.prompts)
    tried = [rewards_text(given), try_code(config), own_text(try_own(config))]
    if not brief:
        for text in filter(None, tried):
            print_shown(f"\n{text}")
    elif given is not None:
        for note in given.notes:
            print_shown(f"note: {note}")
    if "cluster" in options:
        from asyncrl.run.cluster.placement import plan_on_cluster

        print_shown()
        if code := plan_on_cluster(config, plan.weights_bytes):
            return code
    if not brief:
        from asyncrl.preflight.resources.memory_estimate import memory_text

        print_shown(f"\n{memory_text(config, False if gpus else None)}")
    if gpus is not None:
        print_shown(f"\n{gpu_text(config, gpus, plan.weights_bytes)}")
    return 0


def _check_env(config: Config | OfflineConfig) -> int:
    from asyncrl.preflight.check_env.command import check_environment, settings_text
    from asyncrl.preflight.check_env.findings import Finding, counts_text
    from asyncrl.preflight.machine import refuse_environment
    from asyncrl.preflight.model_snapshot import resolve_models

    refuse_environment()
    if isinstance(config, OfflineConfig):
        raise ConfigError(
            f"objective: {config.objective.name} has no environment to check; run `asyncrl plan`"
        )
    config = resolve_models(config)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    before = [f"{settings_text(config)}\n"]

    def tell(finding: Finding) -> None:
        print_shown("\n".join([*before, finding.lines(width)]))
        before.clear()

    checked = check_environment(config, tell)
    print_shown(f"\n{counts_text(checked.findings)}")
    return 2 if checked.failed else 0


def _offline_plan(config: OfflineConfig, options: Collection[str], gpus: Gpus | None) -> int:
    from asyncrl.preflight.model_snapshot import resolve_models
    from asyncrl.preflight.plan.offline import make_offline_plan
    from asyncrl.preflight.resources.gpus import gpu_text

    if "cluster" in options:
        raise ConfigError(
            "--cluster: a run on a dataset asks the cluster only for its learner ranks; run"
            " `ray status` to see whether it has room, and leave the option out"
        )
    plan = make_offline_plan(resolve_models(config), gpus)
    if "config" in options:
        print_shown(f"{plan.config_text()}\n")
    print_shown(plan.brief() if "brief" in options else plan.text())
    if "brief" not in options:
        from asyncrl.preflight.resources.memory_estimate import memory_text

        print_shown(f"\n{memory_text(config, False if gpus else None)}")
    if gpus is not None:
        size = plan.version.nbytes(config.model.dtype)
        print_shown(f"\n{gpu_text(config, gpus, size)}")
    return 0


def on_a_run(known: argparse.Namespace) -> int:
    """Run a subcommand on a run directory, or on a folder of them, and return its exit code."""
    import pyarrow as pa

    from asyncrl.rundir.reader import RunNotFoundError, open_run

    try:
        if known.command == "ls":
            return _list(known.folder)
        directory = open_run(known.run)
        if known.command == "status":
            from asyncrl.page.terminal import status_text

            print_shown(status_text(directory, steady_time()))
            return 0
        if known.command == "audit":
            from asyncrl.run.audit import audit, audit_text

            checks = audit(directory)
            print_shown(audit_text(checks))
            return 0 if all(check.passed for check in checks) else 1
        if known.command == "samples":
            return _samples(directory, known.count, known.order, known.of_version)
        if known.command == "report":
            return _report(directory, known.out)
        if known.command == "watch":
            return _watch(directory, known.host, known.port, known.open, known.attached)
        if known.command == "replay":
            return _replay(directory, known.ordinal, known.sample, known.attempt)
        return _export(directory.checkpoints_directory, directory.directory, known.step, known.out)
    except (RunNotFoundError, ConfigError) as error:
        print_shown(f"asyncrl: {error}", file=sys.stderr)
        return 2
    except pa.ArrowInvalid as error:
        print_shown(f"asyncrl: {error}; restore the file, or move it away", file=sys.stderr)
        return 2
    except ValueError as error:  # a damaged line of metrics.jsonl
        print_shown(f"asyncrl: {error}", file=sys.stderr)
        return 2
    except OutputError:
        raise
    except OSError as error:
        refused = isinstance(error, PermissionError)
        way_out = "; give this user permission, or name another path" if refused else ""
        named = f"{error.filename}: " if error.filename else ""
        print_shown(f"asyncrl: {named}{error.strerror or error}{way_out}", file=sys.stderr)
        return 2


def _list(folder: str | None) -> int:
    from asyncrl.page.terminal import list_text
    from asyncrl.runtime.setting_paths import root_of_runs

    print_shown(list_text(root_of_runs(folder), steady_time()))
    return 0


def _report(directory: Run, out: str | None) -> int:
    from asyncrl.page.report import write_report

    target = Path(out).absolute() if out else directory.directory
    if target.is_dir():
        target /= "report.html"
    size = write_report(directory, target)
    print_shown(f"{target}   ({size / 1e6:.1f} MB; opens in a browser without a network)")
    return 0


def _watch(directory: Run, host: str, port: int, opens: bool, attached: bool) -> int:
    """Serve the run's page until Ctrl-C.

    Args:
        opens: also open it in a browser.
        attached: until standard input ends, instead.
    """
    from asyncrl.page.browser import open_page
    from asyncrl.page.growing import GrowingRun
    from asyncrl.page.watch import serve

    run, hint = GrowingRun(directory.directory), "" if attached else " (Ctrl-C ends it)"
    with contextlib.ExitStack() as stack, contextlib.suppress(KeyboardInterrupt):
        if attached:
            stack.enter_context(until_input_ends())

        def tell(shown: str, address: str) -> None:
            print_shown(f"{shown}{hint}")
            if opens:
                stack.enter_context(open_page(address))

        serve(run, host, port, tell)
    return 0


@contextlib.contextmanager
def until_input_ends() -> Iterator[None]:
    """Interrupt this process when standard input ends: whoever started it has ended."""

    def read() -> None:
        while sys.stdin.read(1024):
            pass
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=read, name="input", daemon=True).start()
    yield


def _samples(directory: Run, count: int, order: str, version: int | None) -> int:
    from asyncrl.observe.samples import choose_samples, samples_text

    if count < 1:
        raise ConfigError(f"-n = {count}: give at least 1")
    if isinstance(directory.settings, OfflineConfig):
        raise ConfigError(
            f"{directory.directory} is a run on a dataset, which samples no completions;"
            " rows/*.arrow has its token rows"
        )
    rows = choose_samples(directory.trajectories(), count, order, version)
    if not rows:
        of = "" if version is None else f" of version {version}"
        raise ConfigError(
            f"{directory.directory} contains no completions{of} yet; the first appear in groups/"
            " after they are scored"
        )
    print_shown(samples_text(rows))
    return 0


def _replay(directory: Run, ordinal: int, sample: int | None, attempt: int | None) -> int:
    from asyncrl.run.replay import replay_sessions, replay_text

    user_folder_last()  # the environment may be in it
    sessions = replay_sessions(directory, ordinal, sample, attempt)
    print_shown(replay_text(sessions))
    return 1 if any(session.difference for session in sessions) else 0


def _export(checkpoints: Path, run_directory: Path, step: int | None, out: str | None) -> int:
    from asyncrl.run.export import export_checkpoint, find_checkpoint

    path = find_checkpoint(checkpoints, step)
    target = Path(out).absolute() if out else run_directory / "export" / path.name
    export_checkpoint(path, target)
    print_shown(f"{path} → {target}   (loads in transformers and vLLM)")
    return 0
