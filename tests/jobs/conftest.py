"""Starts whole runs in separate processes: the command line, real parts, a small task."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from run_variables import HERE, run_variables

DIGITS = "rewards_for_runs:digits"


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, Any]:
    """A small arithmetic task for the tiny model, as a config tree."""
    from jobs.quickstart.task import make_data

    directory = tmp_path_factory.mktemp("task")
    make_data(directory, seed=0, held_out_rows=40, max_digits=1)
    return {
        "max_steps": 8,
        "model": {"path": str(tiny_model)},
        "data": {"train": str(directory / "train.parquet"), "max_prompt_length": 12},
        "rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 4, "max_completion_length": 6},
        "reward": {"functions": {"digits": {"function": DIGITS}}, "processes": 1},
        "generator": {"max_num_seqs": 64, "kv_cache_memory_bytes": 64 << 20},
        "learner": {"learning_rate": 1e-3},
        "eval": {"data": str(directory / "held_out.parquet"), "max_prompts": 16},
        "checkpoint": {"every_steps": 2},
        "weights": {"check_every_versions": 4},
        "placement_timeout_s": 120,
    }


@pytest.fixture
def sft(task: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """The tiny model's task as a config of an SFT run in `tmp_path / "runs"`."""
    return {
        "name": "run",
        "runs_root": str(tmp_path / "runs"),
        "objective": "sft",
        "max_steps": 400,
        "batch_size": 16,
        "model": task["model"],
        "data": {"train": task["data"]["train"], "target_column": "answer", "max_length": 16},
        "eval": {"data": task["eval"]["data"]},
        "learner": {"learning_rate": 1e-3},
        "checkpoint": {"every_steps": 20},
        "placement_timeout_s": 120,
    }


@pytest.fixture
def session_task(tmp_path: Path) -> dict[str, Any]:
    """The guessing game for its tiny model, as changes of `task`. It has no environment or agent
    yet, and no evaluation; the held-out tasks are in `tmp_path / "held_out.parquet"`."""
    from jobs.guess.task import make_data, make_model

    make_model(tmp_path / "model", seed=0)
    make_data(tmp_path, seed=0)
    return {
        "model.path": str(tmp_path / "model"),
        "data": {
            "train": str(tmp_path / "train.parquet"),
            "max_prompt_length": 16,
            "max_length": 120,
        },
        # The environment's own reward. `task` names another one.
        "reward": {
            "functions": {"env": {"function": "asyncrl.rewards.builtin:environment"}},
            "processes": 1,
        },
        "rollout.max_completion_length": 12,
        "eval": {},
        "checkpoint.every_steps": 0,
    }


def merged(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A copy of the tree with some values changed, by dotted name."""
    copy: dict[str, Any] = yaml.safe_load(yaml.safe_dump(tree))
    for name, value in changes.items():
        *parents, leaf = name.split(".")
        at = copy
        for parent in parents:
            at = at.setdefault(parent, {})
        at[leaf] = value
    return copy


def lives(process: psutil.Process) -> bool:
    """Whether a process runs. It may end during the call."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command_line(process: psutil.Process) -> str:
    """The command line of a process in one line; "" if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def born(process: psutil.Process) -> float:
    """When a process started; 0 if it has ended."""
    try:
        return process.create_time()
    except psutil.NoSuchProcess:
        return 0.0


class RunProcess:
    """`asyncrl train` in its own process group."""

    def __init__(
        self, config: Path, log: Path, arguments: list[str], environment: dict[str, str]
    ) -> None:
        self.log = log
        command = [Path(sys.executable).with_name("asyncrl"), "train", config, *arguments]
        self.process = subprocess.Popen(
            command,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            cwd=HERE,  # where the rewards are
            env=environment,
            start_new_session=True,
        )
        self.seen: dict[int, psutil.Process] = {}

    @property
    def output(self) -> str:
        return self.log.read_text()

    def descendants(self) -> list[psutil.Process]:
        """All living processes of this run, including those whose parent has ended."""
        if self.process.poll() is None:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self.seen[child.pid] = child
        return [child for child in self.seen.values() if lives(child)]

    def having(self, part: str) -> list[psutil.Process]:
        """The living processes whose command line contains `part`, oldest first. An old one may
        still be ending."""
        found = [process for process in self.descendants() if part in command_line(process)]
        return sorted(found, key=born)

    def until(self, condition: Callable[[], Any], timeout_s: float = 400) -> Any:
        """Wait until the condition is true. Fail with the run's output if the run ends before."""
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            self.descendants()
            assert self.process.poll() is None, f"the run ended before:\n{self.output}"
            assert time.monotonic() < deadline, f"not within {timeout_s} s:\n{self.output}"
            time.sleep(0.2)
        return value

    def wait(self, timeout_s: float = 400) -> int:
        """Wait for the exit code, and record the run's processes until then."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            self.descendants()
            assert time.monotonic() < deadline, f"not ended within {timeout_s} s:\n{self.output}"
            time.sleep(0.2)
        return self.process.returncode

    def stop(self, number: int = signal.SIGTERM) -> None:
        self.descendants()
        self.process.send_signal(number)

    def gone(self, timeout_s: float = 15) -> list[str]:
        """Names of processes that are still alive after `timeout_s`."""
        _, alive = psutil.wait_procs(self.descendants(), timeout_s)
        return [
            f"{process.pid} {command_line(process)[:80]}" for process in alive if lives(process)
        ]

    def kill(self) -> None:
        for process in self.descendants():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start_run(
    task: dict[str, Any], tmp_path: Path, engine_starts: list[str]
) -> Iterator[Callable[..., RunProcess]]:
    """`start_run(changes, *arguments, name="run", **variables)` → a RunProcess in `tmp_path /
    "runs" / name`. `variables` are environment variables."""
    started: list[RunProcess] = []

    def start(
        changes: dict[str, Any] | None = None,
        *arguments: str,
        name: str = "run",
        starts_engine: bool = True,
        **variables: str,
    ) -> RunProcess:
        config = tmp_path / f"{name}.yaml"
        config.write_text(
            yaml.safe_dump(
                merged(task, {"name": name, "runs_root": str(tmp_path / "runs"), **(changes or {})})
            )
        )
        if starts_engine:
            engine_starts.append(
                "a run of"
                f" {os.environ.get('PYTEST_CURRENT_TEST', '').split('::')[-1].split(' ')[0]}"
            )
        log = tmp_path / f"{name}-{len(started)}.log"
        started.append(RunProcess(config, log, list(arguments), run_variables() | variables))
        return started[-1]

    yield start
    for run in started:
        run.kill()


@pytest.fixture
def start_config(tmp_path: Path) -> Iterator[Callable[[dict[str, Any]], RunProcess]]:
    """`start_config(tree)` → a RunProcess of a whole config, which starts no engine."""
    started: list[RunProcess] = []

    def start(tree: dict[str, Any]) -> RunProcess:
        config = tmp_path / f"{tree['name']}.yaml"
        config.write_text(yaml.safe_dump(tree))
        log = tmp_path / f"{tree['name']}.log"
        started.append(RunProcess(config, log, [], run_variables()))
        return started[-1]

    yield start
    for run in started:
        run.kill()


@pytest.fixture
def shared_memory() -> Callable[[], set[str]]:
    """Files in shared memory that no living process has mapped, so that a process has left them
    behind. Other programs on this machine may have such files too."""

    def left() -> set[str]:
        files = {str(path) for path in Path("/dev/shm").rglob("*") if path.is_file()}
        for maps in Path("/proc").glob("[0-9]*/maps"):
            with contextlib.suppress(OSError):
                files -= set(re.findall(r"/dev/shm/\S+", maps.read_text()))
        return files

    return left
