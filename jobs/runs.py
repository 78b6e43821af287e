"""Runs of the `asyncrl` command, which the jobs with several of them share."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["finished", "module"]


def finished(command: str, config: Path, run: Path, arguments: Sequence[str]) -> int:
    """Run `asyncrl COMMAND` to the end, unless its run is finished. Returns the exit code."""
    if (run / "hf").exists():
        return 0
    given = [command, str(config), "--name", run.name, "--resume", "auto"]
    return module("asyncrl.cli", *given, *arguments)


def module(name: str, *arguments: str) -> int:
    """Run `python -m NAME`. Returns the exit code."""
    return subprocess.run([sys.executable, "-m", name, *arguments]).returncode
