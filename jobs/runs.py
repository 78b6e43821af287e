"""Runs of the `asyncrl` command, which the jobs with several of them share."""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def job_parser(description: str | None, kinds: Sequence[str]) -> argparse.ArgumentParser:
    """A parser of `--seeds` and `--runs`, which gives lists of seeds and of these kinds of runs."""

    def kind_list(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := set(chosen).difference(kinds):
            raise argparse.ArgumentTypeError(
                f"{', '.join(sorted(unknown))} is unknown; choose from {','.join(kinds)}"
            )
        return chosen

    def seed_list(text: str) -> list[int]:
        return [int(seed) for seed in text.split(",")]

    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seeds", type=seed_list, default=[0], help="such as 0,1,2")
    parser.add_argument("--runs", type=kind_list, default=list(kinds), help=",".join(kinds))
    return parser


def finish(command: str, config: Path, run: Path, arguments: Sequence[str]) -> None:
    """Run `asyncrl COMMAND` to the end, unless its run is finished.

    Raises:
        SystemExit: With the command's exit code, if that is not 0.
    """
    if not (run / "hf").exists():
        given = [command, str(config), "--name", run.name, "--resume", "auto"]
        module("asyncrl.cli", *given, *arguments)


def module(name: str, *arguments: str) -> None:
    """Run `python -m NAME`.

    Raises:
        SystemExit: With its exit code, if that is not 0.
    """
    if code := subprocess.run([sys.executable, "-m", name, *arguments]).returncode:
        raise SystemExit(code)
