"""Exact resume of a run of sessions: a killed run ends as one that was never stopped."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from independent_audit import wrong
from safetensors.numpy import load_file

import asyncrl
from asyncrl.run.audit import audit, audit_text
from asyncrl.rundir import Run
from jobs.guess.task import make_data, make_model

STEPS, EVERY, GROUPS, SAMPLES = 10, 3, 4, 4
EXACT = ("completion_ids", "turn_parent", "turn_context", "turn_tokens", "session_end", "reward")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_run_of_sessions_ends_with_the_same_groups_and_weights(
    start_run: Callable[..., Any], tmp_path: Path
) -> None:
    """At staleness 0, seed and data determine every turn: its sampling seed comes from ordinal,
    sample, turn and the session's own retry, and not from the run's attempt."""
    make_model(tmp_path / "model", seed=0)
    make_data(tmp_path, seed=0)
    changes = {
        "max_steps": STEPS,
        "model.path": str(tmp_path / "model"),
        "data": {
            "train": str(tmp_path / "train.parquet"),
            "max_prompt_length": 16,
            "max_length": 120,
        },
        "environment": {"function": "environments_for_runs:three_questions", "processes": 1},
        "reward": {
            "functions": {"env": {"function": "asyncrl.rewards.builtin:environment"}},
            "processes": 1,
        },
        "rollout": {
            "rollout_batch_size": GROUPS,
            "n_samples_per_prompt": SAMPLES,
            "max_completion_length": 12,
        },
        "staleness.max_staleness": 0,
        "eval": {},
        "checkpoint.every_steps": EVERY,
    }
    whole = start_run(changes, name="whole")
    assert whole.wait() == 0, whole.output

    stopped = tmp_path / "runs" / "stopped"
    first = start_run(changes, name="stopped")
    first.until(lambda: steps_of(stopped) > EVERY and (stopped / "checkpoints" / "LATEST").exists())
    first.stop(signal.SIGKILL)
    first.wait()
    assert first.gone(180) == []
    committed = max(
        int(path.name.removeprefix("step_"))
        for path in (stopped / "checkpoints").glob("step_*")
        if (path / "COMMITTED").exists()
    )
    second = start_run(changes, "--resume", "must", name="stopped")
    assert second.wait() == 0, second.output
    assert f"resuming at version {committed}" in second.output

    runs = {name: asyncrl.open_run(tmp_path / "runs" / name) for name in ("whole", "stopped")}
    for name, run in runs.items():
        checks = audit(run)
        assert all(check.passed for check in checks), audit_text(checks)
        assert wrong(tmp_path / "runs" / name) == []
    wanted, found = (groups(run) for run in runs.values())
    assert wanted.keys() <= found.keys() and len(wanted) >= STEPS * GROUPS
    attempts = {attempt for made in found.values() for attempt, _ in made}
    again = [ordinal for ordinal, made in found.items() if len(made) > 1]
    assert len(attempts) == 2 and again, "no group was made in both attempts"
    for ordinal, ((_, group),) in wanted.items():
        for attempt, other in found[ordinal]:
            assert other == group, (ordinal, attempt)
    weights = [hugging_face_weights(run.directory) for run in runs.values()]
    assert weights[0].keys() == weights[1].keys() and weights[0]
    for name, tensor in weights[0].items():
        np.testing.assert_allclose(tensor, weights[1][name], atol=1e-6, rtol=0, err_msg=name)


def steps_of(directory: Path) -> int:
    """Steps that the run has recorded, over all attempts."""
    if not (directory / "metrics.jsonl").exists():
        return 0
    return len(asyncrl.open_run(directory).records("step"))


def groups(run: Run) -> dict[int, list[tuple[int, dict[str, Any]]]]:
    """Ordinal → (attempt, what must be the same) of each attempt that made the group."""
    found: dict[int, list[tuple[int, dict[str, Any]]]] = {}
    for row in run.groups().to_pylist():
        exact = {name: row[name] for name in EXACT}
        found.setdefault(row["ordinal"], []).append((row["attempt"], exact))
    return found


def hugging_face_weights(directory: Path) -> dict[str, np.ndarray]:
    return {
        name: tensor
        for file in (directory / "hf").glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
