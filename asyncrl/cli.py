"""The `asyncrl` command: its arguments. What it does is imported after they are parsed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from importlib.metadata import version

from asyncrl.runtime.encodings import restart_in_utf8, safe_output
from asyncrl.runtime.imports import current_folder
from asyncrl.runtime.output import open_missing_streams
from asyncrl.runtime.redact import print_shown

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
REPORT = (
    "write a run as one HTML page: a verdict, charts, groups with their tokens, what was lost, and"
    " the settings; works while it runs"
)
STATUS = (
    "show on one screen what a run does now, what it waits for and since when, and what went wrong"
)
WATCH = (
    "serve the page of a run to this machine's browsers, and let it grow with the run; ending it"
    " leaves the run alone"
)
GPU = (
    "plan for machines with these GPUs, such as h100:8, which this one need not have: what a rank"
    " and an engine take of them, and whether that fits"
)
TRAINS = ("train", "sft", "dpo", "reward_model")
WATCHED = "serve the run's page while it runs, and open it in this machine's browser"
LIST = "list the runs of a folder with state, step, reward and age, the newest first"
ON_A_RUN = {
    "status": STATUS,
    "report": REPORT,
    "watch": WATCH,
    "samples": SAMPLES,
    "replay": REPLAY,
    "audit": AUDIT,
    "export": EXPORT,
}
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
    from asyncrl.commands import on_a_run, reader_may_leave, run, show_help

    if known.command not in ON_A_CONFIG:
        if overrides:
            commands[known.command].error(f"unrecognized arguments: {' '.join(overrides)}")
        with reader_may_leave():
            sys.exit(on_a_run(known))
    if known.help is not None:
        with reader_may_leave():
            sys.exit(show_help(commands[known.command], known.command, known.help))
    if known.config is None:
        print_shown(
            "asyncrl: CONFIG is missing: give the path of a YAML file, such as"
            " jobs/quickstart/quickstart.yaml",
            file=sys.stderr,
        )
        sys.exit(2)
    options = {option for option in PLAN_OPTIONS if getattr(known, f"show_{option}", False)}
    options |= {"watch"} if getattr(known, "watch", False) else set()
    gpu = getattr(known, "gpu", "")
    sys.exit(run(known.command, known.config, overrides, options, gpu))


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
        metavar=f"{{{','.join([*ON_A_CONFIG, 'ls', *ON_A_RUN])}}}",
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
    for name in TRAINS:
        commands.choices[name].add_argument("--watch", action="store_true", help=WATCHED)
    for option, text in PLAN_OPTIONS.items():
        commands.choices["plan"].add_argument(
            f"--{option}", action="store_true", dest=f"show_{option}", help=text
        )
    commands.choices["plan"].add_argument("--gpu", metavar="KIND[:COUNT]", default="", help=GPU)
    listing = commands.add_parser("ls", help=LIST, description=LIST, allow_abbrev=False)
    listing.add_argument(
        "folder", nargs="?", metavar="FOLDER", help="default: ASYNCRL_RUNS, or else runs"
    )
    for name, text in ON_A_RUN.items():
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.add_argument("run", metavar="RUN", help="run directory, such as runs/quickstart")
    commands.choices["report"].add_argument(
        "--out",
        metavar="FILE",
        help="a file or a folder; default: report.html in the run directory",
    )
    watch = commands.choices["watch"]
    watch.add_argument("--port", type=int, default=0, metavar="PORT", help="default: a free one")
    watch.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="HOST",
        help="the address to listen on; another than this machine's own needs a secret in the"
        " environment variable ASYNCRL_WATCH_TOKEN; default: 127.0.0.1",
    )
    watch.add_argument(
        "--open", action="store_true", help="also open the page in this machine's browser"
    )
    watch.add_argument("--attached", action="store_true", help=argparse.SUPPRESS)
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


if __name__ == "__main__":
    main()
