"""Online DPO as a whole run: stale pairs, a refreshed reference, an audit, and a resume in the
middle."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from independent_audit import wrong

import asyncrl
from asyncrl.observe.metric_catalog import known_names
from asyncrl.run.audit import audit, audit_text


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_online_dpo_trains_stale_pairs_and_resumes(
    start_run: Callable[..., Any], tmp_path: Path
) -> None:
    directory = tmp_path / "runs" / "run"
    changes = {
        "max_steps": 40,
        "staleness.max_staleness": 2,
        "algorithm.preference": {
            "loss": {"name": "sigmoid", "beta": 0.1},
            "pairs": {"name": "margin", "max_pairs": 2, "missing_eos_penalty": 0.1},
        },
        "algorithm.reference.update_interval": 3,
        "learner.learning_rate": 3e-4,
        "checkpoint.every_steps": 4,
        "resume": "auto",
    }

    def records(event: str) -> list[dict[str, Any]]:
        return asyncrl.open_run(directory).records(event) if directory.exists() else []

    first = start_run(changes)
    first.until(lambda: (directory / "metrics.jsonl").exists() and len(records("checkpoint")) >= 2)
    first.kill()
    second = start_run(changes)
    assert second.wait() == 0, second.output

    run = asyncrl.open_run(directory)
    checks = audit(run)
    assert all(check.passed for check in checks), audit_text(checks)
    assert wrong(directory) == []
    (counted,) = [check for check in checks if "learner's count" in check.name]
    assert "step_000040" in counted.summary, counted.summary
    steps = records("step")
    assert {record["attempt"] for record in steps} == {0, 1}
    assert max(record["step"] for record in steps) == 40
    applied = [record for record in steps if record["applied"]]
    assert sum(record["staleness/mean"] for record in applied) / len(applied) > 0.5
    stale = {
        name for record in applied for name in record if name.startswith("pref/margin_at_staleness")
    }
    assert {f"pref/margin_at_staleness_{age}" for age in (1, 2)} & stale, stale
    assert all(0 < record["pref/weight_mean"] <= 2 for record in applied)
    assert {"ess", "clip_fraction", "kl_reference"}.isdisjoint(applied[0])
    preferences = {name for name in applied[0] if name.startswith("pref/")} - stale
    assert preferences <= known_names()
    for row in run.groups().to_pylist():
        assert set(row["advantage"]) == {None} and len(row["reference_logprobs"]) == 4
    assert_refreshed(directory, run.groups().to_pylist(), records("gather"))
    rewards = [record["reward/mean"] for record in applied]
    assert sum(rewards[-8:]) > sum(rewards[:8]), rewards


def assert_refreshed(
    directory: Path, groups: list[dict[str, Any]], gathers: list[dict[str, Any]]
) -> None:
    """Every third version became the reference, and the second attempt began with that of its
    checkpoint."""
    start = json.loads((directory / "run.json").read_text())["attempts"][1]["version"]
    taken = {
        attempt: [
            record["version"]
            for record in gathers
            if record["attempt"] == attempt and "reference/refresh_s" in record
        ]
        for attempt in (0, 1)
    }
    assert start >= 8 and taken[1] == list(range(start // 3 * 3 + 3, 41, 3)), (start, taken)
    assert taken[0][: start // 3] == list(range(3, start + 1, 3)), (start, taken)
    seen = {
        attempt: {row["reference_version"] for row in groups if row["attempt"] == attempt}
        for attempt in (0, 1)
    }
    assert seen[0] <= {0, *taken[0]} and len(seen[0]) > 1
    # Groups of the checkpoint can take the learner to the next refresh before it needs new ones.
    assert seen[1] <= {start // 3 * 3, *taken[1]} and len(seen[1]) > 1
    for row in groups:
        began_at = min(span["version"] for spans in row["versions"] for span in spans)
        assert row["reference_version"] >= began_at // 3 * 3, row
