"""Exact resume of a run of sessions: a killed run ends as one that was never stopped."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from audited_runs import audited
from safetensors.numpy import load_file

import asyncrl
from asyncrl.rundir import Run

STEPS, EVERY, GROUPS, SAMPLES = 10, 3, 4, 4
EXACT = ("completion_ids", "turn_parent", "turn_context", "turn_tokens", "session_end", "reward")


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_a_killed_run_of_sessions_ends_with_the_same_groups_and_weights(
    start_run: Callable[..., Any], session_task: dict[str, Any], tmp_path: Path
) -> None:
    """At staleness 0, seed and data determine every turn: its sampling seed comes from ordinal,
    sample, turn and the session's own retry, and not from the run's attempt."""
    changes = session_task | {
        "max_steps": STEPS,
        "environment": {"function": "environments_for_runs:three_questions", "processes": 1},
        "rollout.rollout_batch_size": GROUPS,
        "rollout.n_samples_per_prompt": SAMPLES,
        "staleness.max_staleness": 0,
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

    runs = [audited(tmp_path / "runs" / name) for name in ("whole", "stopped")]
    wanted, found = map(groups, runs)
    assert wanted.keys() <= found.keys() and len(wanted) >= STEPS * GROUPS
    attempts = {attempt for made in found.values() for attempt, _ in made}
    again = [ordinal for ordinal, made in found.items() if len(made) > 1]
    assert len(attempts) == 2 and again, "no group was made in both attempts"
    for ordinal, ((_, group),) in wanted.items():
        for attempt, other in found[ordinal]:
            assert other == group, (ordinal, attempt)
    weights = [hugging_face_weights(run.directory) for run in runs]
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
