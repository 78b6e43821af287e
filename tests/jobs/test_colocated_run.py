"""Runs whose generators and learner take shifts on the same devices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from audited_runs import audited
from safetensors.numpy import load_file

import asyncrl

STEPS = 20


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.parametrize("lora", [None, {"r": 4, "alpha": 8.0}], ids=["whole", "lora"])
def test_turns_train_what_separate_sides_train(
    start_run: Callable[..., Any],
    tmp_path: Path,
    lora: dict[str, float] | None,
) -> None:
    """At staleness 0 both placements generate the same ids and end with the same weights."""
    changes = {
        "max_steps": STEPS,
        "lora": lora,
        "staleness.max_staleness": 0,
        "weights.check_every_versions": 5,
        "eval.every_steps": 10,
        "checkpoint.every_steps": 8,
    }
    directories = {}
    for placement in ("colocate", "decoupled"):
        started = start_run({**changes, "placement": placement}, name=placement)
        assert started.wait() == 0, started.output
        assert started.gone() == [] and started.left_in_shared_memory() == []
        directories[placement] = tmp_path / "runs" / placement

    runs = {name: audited(path) for name, path in directories.items()}
    for name, run in runs.items():
        steps = run.records("step")
        assert len(steps) == STEPS and all(step["staleness/mean"] == 0 for step in steps)
        shifts = [step for step in steps if {"time/rest_s", "time/wake_s"} <= step.keys()]
        assert len(shifts) == (STEPS if name == "colocate" else 0)
        differences = [record["check/logprob_max_diff"] for record in run.records("logprob_check")]
        assert len(differences) == 5 and max(differences) <= 1e-4
        assert [record["version"] for record in run.records("evaluation")] == [0, 10, 20]

    def ids(run: asyncrl.Run) -> dict[int, list[list[int]]]:
        return {row["ordinal"]: row["completion_ids"] for row in run.groups().to_pylist()}

    turned, separate = ids(runs["colocate"]), ids(runs["decoupled"])
    assert turned == separate
    weights = {
        name: {
            key: value
            for file in (path / "hf").glob("*.safetensors")
            for key, value in load_file(file).items()
        }
        for name, path in directories.items()
    }
    assert weights["colocate"] and weights["colocate"].keys() == weights["decoupled"].keys()
    for name, tensor in weights["colocate"].items():
        np.testing.assert_allclose(tensor, weights["decoupled"][name], atol=1e-6, err_msg=name)
