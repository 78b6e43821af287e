"""The `asyncrl` command. Heavy imports come after the arguments are parsed."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config import (
    Config,
    ConfigError,
    OfflineConfig,
    load_any,
    load_offline,
)
from asyncrl.runtime.clock import process_began
from asyncrl.runtime.encodings import restart_in_utf8, safe_output
from asyncrl.runtime.imports import current_folder, user_folder_last
from asyncrl.runtime.output import lasting_output, open_missing_streams
from asyncrl.runtime.redact import OutputError, print_shown

if TYPE_CHECKING:
    from asyncrl.rundir.reader import Run

ON_A_CONFIG = {
    "train": "train a model as configured in a YAML file",
    "sft": "train next-token prediction on a dataset (objective: sft)",
    "dpo": "train preferences between pairs of a dataset (objective: dpo)",
    "reward_model": "train a reward model on pairs of a dataset (objective: reward_model)",
    "plan": "check a config and show what it needs; allocates nothing",
    "check-env": (
        "check a config's environment with scripted agents, on this machine's CPU: template, tool"
        " calls, masks, stops, rewards, secrets, cost"
    ),
}
OFFLINE = ("sft", "dpo", "reward_model")
"""Commands that train on a dataset. Each is the objective of its config."""
AUDIT = (
    "recompute a run's counts from its groups or token rows, outcomes, metrics, evaluations and"
    " checkpoints, and check its invariants"
)
SAMPLES = (
    "show whole prompts and completions of a run, with rewards, versions and staleness; works"
    " while it runs"
)
REPLAY = (
    "replay recorded sessions against the run's environment, without a model: the same requests get"
    " the recorded answers, and the end and the reward are compared"
)
EXPORT = "write a checkpoint's weights as a Hugging Face directory"
ON_A_RUN = {"samples": SAMPLES, "replay": REPLAY, "audit": AUDIT, "export": EXPORT}
PLAN_OPTIONS = {
    "brief": "show ten lines instead of the whole plan",
    "config": "also show every setting with its value",
    "cluster": (
        "ask the cluster at RAY_ADDRESS, or the one on this machine, whether it has room, and who"
        " holds resources that are not free"
    ),
}


def main(arguments: list[str] | None = None) -> None:
    """Run one subcommand and exit with 0 (done), 1 (failed), 2 (a setting cannot be used) or 130
    (interrupted)."""
    open_missing_streams()
    if arguments is None:
        restart_in_utf8()
    safe_output()
    parser, commands = _parser()
    known, overrides = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    if current_folder() is None:
        print_shown(
            "asyncrl: the current folder was removed, and paths begin there; change to another",
            file=sys.stderr,
        )
        sys.exit(2)
    if known.command not in ON_A_CONFIG:
        if overrides:
            commands[known.command].error(f"unrecognized arguments: {' '.join(overrides)}")
        with _reader_may_leave():
            sys.exit(on_a_run(known))
    if known.help is not None:
        with _reader_may_leave():
            sys.exit(_show_help(commands[known.command], known.command, known.help))
    if known.config is None:
        print_shown(
            "asyncrl: CONFIG is missing: give the path of a YAML file, such as"
            " jobs/quickstart/quickstart.yaml",
            file=sys.stderr,
        )
        sys.exit(2)
    options = {option for option in PLAN_OPTIONS if getattr(known, f"show_{option}", False)}
    sys.exit(run(known.command, known.config, overrides, options))


def _show_help(parser: argparse.ArgumentParser, command: str, asked: str) -> int:
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


def _parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The main parser, and the parser of each command."""
    parser = argparse.ArgumentParser(
        prog="asyncrl",
        description=(
            "Asynchronous reinforcement-learning post-training for language models, on Ray."
        ),
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"asyncrl {version('asyncrl')}")
    commands = parser.add_subparsers(
        dest="command",
        required=True,
        metavar=f"{{{','.join([*ON_A_CONFIG, *ON_A_RUN])}}}",
    )
    for name, text in ON_A_CONFIG.items():
        command = commands.add_parser(
            name, help=text, description=text, add_help=False, allow_abbrev=False
        )
        command.add_argument(
            "config", nargs="?", metavar="CONFIG", help="YAML file of the settings"
        )
        command.add_argument(
            "-h",
            "--help",
            nargs="?",
            const="",
            metavar="SECTION",
            help="show this help and the sections of the settings, or one section's settings",
        )
    for option, text in PLAN_OPTIONS.items():
        commands.choices["plan"].add_argument(
            f"--{option}", action="store_true", dest=f"show_{option}", help=text
        )
    for name, text in ON_A_RUN.items():
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.add_argument("run", metavar="RUN", help="run directory, such as runs/quickstart")
    _add_samples_options(commands.choices["samples"])
    _add_replay_options(commands.choices["replay"])
    _add_export_options(commands.choices["export"])
    return parser, commands.choices


def _add_samples_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "-n",
        type=int,
        default=3,
        metavar="N",
        dest="count",
        help="completions to show; default: 3",
    )
    command.add_argument(
        "--order",
        choices=["newest", "best", "worst"],
        default="newest",
        help="the latest completions, or the best or worst by reward; default: newest",
    )
    command.add_argument(
        "--version",
        type=int,
        metavar="V",
        dest="of_version",
        help="only completions whose first token is from policy version V",
    )


def _recorded_number(text: str) -> int:
    """A number that a 64-bit column can have."""
    try:
        number = int(text)
    except ValueError:
        number = -1
    if not 0 <= number < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number from 0 to 2**63 - 1")
    return number


def _add_replay_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "ordinal",
        type=_recorded_number,
        metavar="ORDINAL",
        help="number of the prompt, as `samples` shows it",
    )
    command.add_argument(
        "--sample", type=int, metavar="N", help="only this session of the prompt; default: all"
    )
    command.add_argument(
        "--attempt",
        type=_recorded_number,
        metavar="N",
        help="the run's attempt that recorded them; default: the newest one",
    )


def _add_export_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="policy version of the checkpoint; default: the newest",
    )
    command.add_argument(
        "--out", metavar="DIRECTORY", help="default: export/step_N in the run directory"
    )


def run(command: str, path: str, overrides: list[str], options: Collection[str] = ()) -> int:
    """Run a subcommand on a config and return its exit code. Training goes on without its standard
    output, and SIGTERM and SIGHUP stop it as Ctrl-C does.

    Args:
        options: the given PLAN_OPTIONS.
    """
    if command in ("plan", "check-env"):
        return _run(command, path, overrides, options)
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


def _run(command: str, path: str, overrides: list[str], options: Collection[str]) -> int:
    user_folder_last()  # reward functions may be in it
    try:
        config = (
            load_offline(path, overrides, objective=command)
            if command in OFFLINE
            else load_any(path, overrides)
        )
        if command == "plan":
            with _reader_may_leave():
                return _plan(config, options)
        if command == "check-env":
            with _reader_may_leave():
                return _check_env(config)
        return _train(command, config, path, overrides)
    except ConfigError as error:
        print_shown(f"asyncrl: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        cause = str(stop) or "Ctrl-C"
        print_shown(f"\nasyncrl: interrupted ({cause}); nothing was started", file=sys.stderr)
        return 130


def _train(command: str, config: Config | OfflineConfig, path: str, overrides: list[str]) -> int:
    from asyncrl.run.before_start import check_before_start

    config, finished = check_before_start(config)
    if finished is not None:
        print_shown(finished)
        return 0
    # Imported after that, because they take seconds.
    from asyncrl.run.supervise import command_name

    resume = [command_name(), command, path, *overrides]
    if isinstance(config, OfflineConfig):
        from asyncrl.run.offline.run import run_offline

        return run_offline(config, resume)
    from asyncrl.run.train import run_training

    return run_training(config, resume, asked=process_began())


@contextlib.contextmanager
def _reader_may_leave() -> Iterator[None]:
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


def _plan(config: Config | OfflineConfig, options: Collection[str]) -> int:
    from asyncrl.preflight.machine import refuse_machine

    refuse_machine(config)
    if isinstance(config, OfflineConfig):
        return _offline_plan(config, options)
    from asyncrl.preflight.model_snapshot import resolve_models
    from asyncrl.preflight.plan.plan import make_plan
    from asyncrl.preflight.trials.code import try_code
    from asyncrl.preflight.trials.rewards import reward_trial, rewards_text
    from asyncrl.preflight.trials.user_functions import own_text, try_own

    config, brief = resolve_models(config), "brief" in options
    with reward_trial(config) as try_rewards:
        plan = make_plan(config)
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
        # Imported last, because it imports DeepSpeed, which takes seconds.
        from asyncrl.preflight.resources.memory_estimate import memory_text

        print_shown(f"\n{memory_text(config)}")
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


def _offline_plan(config: OfflineConfig, options: Collection[str]) -> int:
    from asyncrl.preflight.model_snapshot import resolve_models
    from asyncrl.preflight.plan.offline import make_offline_plan

    if "cluster" in options:
        raise ConfigError(
            "--cluster: a run on a dataset asks the cluster only for its learner ranks; run"
            " `ray status` to see whether it has room, and leave the option out"
        )
    plan = make_offline_plan(resolve_models(config))
    if "config" in options:
        print_shown(f"{plan.config_text()}\n")
    print_shown(plan.brief() if "brief" in options else plan.text())
    if "brief" not in options:
        # Imported last, because it imports DeepSpeed, which takes seconds.
        from asyncrl.preflight.resources.memory_estimate import memory_text

        print_shown(f"\n{memory_text(config)}")
    return 0


def on_a_run(known: argparse.Namespace) -> int:
    """Run a subcommand on a run directory and return its exit code."""
    import pyarrow as pa

    from asyncrl.rundir.reader import RunNotFoundError, open_run

    try:
        directory = open_run(known.run)
        if known.command == "audit":
            from asyncrl.run.audit import audit, audit_text

            checks = audit(directory)
            print_shown(audit_text(checks))
            return 0 if all(check.passed for check in checks) else 1
        if known.command == "samples":
            return _samples(directory, known.count, known.order, known.of_version)
        if known.command == "replay":
            return _replay(directory, known.ordinal, known.sample, known.attempt)
        return _export(directory.checkpoints_directory, directory.directory, known.step, known.out)
    except (RunNotFoundError, ConfigError) as error:
        print_shown(f"asyncrl: {error}", file=sys.stderr)
        return 2
    except pa.ArrowInvalid as error:
        print_shown(f"asyncrl: {error}; restore the file, or move it away", file=sys.stderr)
        return 2
    except OutputError:
        raise
    except OSError as error:
        refused = isinstance(error, PermissionError)
        way_out = "; give this user permission, or name another path" if refused else ""
        named = f"{error.filename}: " if error.filename else ""
        print_shown(f"asyncrl: {named}{error.strerror}{way_out}", file=sys.stderr)
        return 2


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


if __name__ == "__main__":
    main()
