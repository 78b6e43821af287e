"""Starts whole runs in separate processes: the command line, real parts, a small task."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from run_process import RunProcess
from run_variables import run_variables

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
    """`start_config(tree, …)` → a RunProcess of a whole config, which starts no engine."""
    started: list[RunProcess] = []

    def start(tree: dict[str, Any], *arguments: str) -> RunProcess:
        config = tmp_path / f"{tree['name']}.yaml"
        config.write_text(yaml.safe_dump(tree))
        log = tmp_path / f"{tree['name']}.log"
        started.append(RunProcess(config, log, [*arguments], run_variables()))
        return started[-1]

    yield start
    for run in started:
        run.kill()
