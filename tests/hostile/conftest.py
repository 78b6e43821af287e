"""Machines that are not ours: the commands run in namespaces, with limits, as another user and with
other variables. `make hostile` runs what has the marker `hostile`."""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
COMMAND = [str(Path(sys.executable).with_name("asyncrl"))]
CGROUPS = Path("/sys/fs/cgroup")
STRANGER = 54321
"""A user id without an entry in the system's list of users."""


@dataclass(frozen=True)
class Place:
    """A folder with a small SFT run, which every user can read and write to."""

    path: Path

    @property
    def runs(self) -> Path:
        return self.path / "runs"

    def entries(self) -> list[str]:
        return sorted(str(path.relative_to(self.path)) for path in self.path.rglob("*"))

    def run(
        self,
        *arguments: str,
        variables: Mapping[str, str | None] | None = None,
        before: str = "",
        prefix: Sequence[str] = (),
        timeout_s: float = 120,
        during: Callable[[subprocess.Popen[str]], None] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run `asyncrl` in the folder.

        Args:
            variables: changes of the environment; None = not set.
            before: shell lines that change the mount, network and host-name namespaces first.
            prefix: a command that starts the command.
            during: called with the process, which leads a process group.
        """
        command = [*prefix, *COMMAND, *arguments]
        if before:
            script = f"set -e\n{before}\nexec {shlex.join(command)}"
            command = ["unshare", "--mount", "--net", "--uts", "sh", "-c", script]
        process = subprocess.Popen(
            command,
            cwd=self.path,
            env=environment(variables or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="backslashreplace",
            start_new_session=True,
        )
        try:
            if during is not None:
                during(process)
            output, errors = process.communicate(timeout=timeout_s)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        return subprocess.CompletedProcess(command, process.returncode, output, errors)


def environment(variables: Mapping[str, str | None]) -> dict[str, str]:
    """The variables of this process without those of Ray, with these changes."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    changed: dict[str, str | None] = {**kept, "PYTHONPATH": str(ROOT), **variables}
    return {name: value for name, value in changed.items() if value is not None}


@pytest.fixture(scope="session")
def task(tiny_model: Path) -> Iterator[Path]:
    """The tiny model, rows and a config, in a folder that every user can read. Folders of pytest
    are for one user only."""
    folder = Path(tempfile.mkdtemp(prefix="hostile-", dir="/tmp"))
    shutil.copytree(tiny_model, folder / "model")
    chosen = random.Random(0)
    sums = [(chosen.randrange(10), chosen.randrange(10)) for _ in range(64)]
    rows = [{"prompt": f"{one}+{two}=", "answer": str(one + two)} for one, two in sums]
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "sft.yaml").write_text(yaml.safe_dump(sft(folder)))
    open_to_all(folder)
    yield folder
    shutil.rmtree(folder)


def sft(folder: Path) -> dict[str, Any]:
    return {
        "name": "run",
        "objective": "sft",
        "max_steps": 2,
        "batch_size": 8,
        "model": {"path": str(folder / "model")},
        "data": {
            "train": str(folder / "train.jsonl"),
            "target_column": "answer",
            "max_length": 16,
        },
        "checkpoint": {"every_steps": 0},
        "placement_timeout_s": 60,
    }


def open_to_all(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o644)


@pytest.fixture
def place(task: Path) -> Iterator[Callable[[str], Place]]:
    """`place(name)`: a new folder of this name with the config."""
    made: list[Path] = []

    def make(name: str = "work") -> Place:
        made.append(Path(tempfile.mkdtemp(prefix="hostile-", dir="/tmp")))
        made[-1].chmod(0o777)
        folder = made[-1] / name
        folder.mkdir()
        shutil.copy(task / "sft.yaml", folder)
        open_to_all(folder)
        return Place(folder)

    yield make
    for folder in made:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skips the test where this user cannot make namespaces and mounts."""
    tried = subprocess.run(
        ["unshare", "--mount", "--net", "--uts", "mount", "-t", "tmpfs", "none", "/mnt"],
        capture_output=True,
        text=True,
    )
    if tried.returncode:
        pytest.skip(f"no namespaces here, which need root: {tried.stderr.strip()}")


@pytest.fixture(scope="session")
def stranger(namespaces: None) -> tuple[str, list[str]]:
    """Shell lines after which every user can read Python and this package, and the beginning of a
    command of a user that the system does not know."""
    needed = [Path(os.path.realpath(path)) for path in (sys.base_prefix, sys.prefix, ROOT)]
    closed = sorted({folder for path in needed if (folder := closed_above(path)) is not None})
    within = [path for path in needed if any(path.is_relative_to(folder) for folder in closed)]
    held = [f"/mnt/{number}" for number in range(len(within))]
    lines = ["mount -t tmpfs -o mode=755 none /mnt"]
    for path, hold in zip(within, held, strict=True):
        lines += [f"mkdir {hold}", f"mount --bind {shlex.quote(str(path))} {hold}"]
    lines += [f"mount -t tmpfs -o mode=755 none {shlex.quote(str(folder))}" for folder in closed]
    for path, hold in zip(within, held, strict=True):
        quoted = shlex.quote(str(path))
        lines += [f"mkdir -p {quoted}", f"mount --bind {hold} {quoted}"]
    user = ["setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups"]
    return "\n".join(lines), user


def closed_above(path: Path) -> Path | None:
    """The topmost folder above the path that other users cannot pass; None if there is none."""
    above = reversed(path.parents)
    return next((folder for folder in above if not folder.stat().st_mode & 0o001), None)


@pytest.fixture
def control_group() -> Iterator[Callable[..., list[str]]]:
    """`control_group((controller, file of version 1, file of version 2, value), …)`: the beginning
    of a command that runs in new control groups with these limits."""
    made: list[Path] = []

    def make(*limits: tuple[str, str, str, str]) -> list[str]:
        for controller, first, second, value in limits:
            old = CGROUPS / controller
            group = (old if old.is_dir() else CGROUPS) / f"hostile-{os.getpid()}"
            try:
                if group not in made:
                    group.mkdir()
                    made.append(group)
                (group / (first if old.is_dir() else second)).write_text(value)
            except OSError as error:
                pytest.skip(f"this user cannot limit control groups: {error}")
        enter = "".join(f"echo $$ > {group}/cgroup.procs && " for group in made)
        return ["sh", "-c", f'{enter}exec "$@"', "sh"]

    yield make
    for group in made:
        group.rmdir()
