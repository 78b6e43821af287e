"""A run whose engine splits every layer between two workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from independent_audit import wrong

import asyncrl
from asyncrl.run.audit import audit, audit_text


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_twenty_steps_with_two_workers(start_run: Callable[..., Any], tmp_path: Path) -> None:
    changes = {
        "max_steps": 20,
        "generator.tensor_parallel_size": 2,
        "weights.check_every_versions": 10,
        "staleness.max_staleness": 2,
        "rollout.rollout_batch_size": 8,
        "eval": {},
        "checkpoint.every_steps": 0,
    }
    started = start_run(changes)
    assert started.wait() == 0, started.output
    directory = tmp_path / "runs" / "run"
    run = asyncrl.open_run(directory)
    checks = audit(run)
    assert all(check.passed for check in checks), audit_text(checks)
    assert wrong(directory) == []
    assert sum(step["applied"] for step in run.records("step")) == 20
    differences = [record["check/logprob_max_diff"] for record in run.records("logprob_check")]
    assert len(differences) == 3 and max(differences) <= 1e-4, differences
