"""A run with `on_stale: mask` whose long completions take several versions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from audited_runs import audited

from asyncrl.observe.metric_catalog import known_names

BOUND, STEPS = 1, 40


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_old_tokens_of_long_completions_are_masked_and_the_rest_is_trained(
    start_run: Callable[..., Any], tmp_path: Path
) -> None:
    directory = tmp_path / "runs" / "run"
    changes = {
        "max_steps": STEPS,
        "staleness": {"max_staleness": BOUND, "on_stale": "mask"},
        "rollout.rollout_batch_size": 2,
        "rollout.n_samples_per_prompt": 2,
        # A model with random weights ends one of 64 tokens, so few completions are long.
        "rollout.max_completion_length": 450,
        "weights.check_every_versions": 20,
        "eval": {},
        "checkpoint.every_steps": 20,
    }
    started = start_run(changes)
    assert started.wait() == 0, started.output
    run = audited(directory)
    steps = [record for record in run.records("step") if record["applied"]]
    assert len(steps) == STEPS
    differences = [record["check/logprob_max_diff"] for record in run.records("logprob_check")]
    assert max(differences) <= 1e-4, differences
    assert {name for name in steps[0] if name.startswith("stale/")} <= known_names()
    assert max(step["stale/masked_ratio"] for step in steps) > 0, "no token was masked"
    groups = {row["ordinal"]: row for row in run.groups().to_pylist()}
    trained = {
        ended["ordinal"]: ended["trained_at_version"]
        for ended in run.outcomes().to_pylist()
        if ended["outcome"] == "trained"
    }
    by_version: dict[int, list[int]] = {}
    for ordinal, at in trained.items():
        fresh = sum(
            min(span["end"], len(mask)) - span["start"]
            for spans, mask in zip(
                groups[ordinal]["versions"], groups[ordinal]["loss_mask"], strict=True
            )
            for span in spans
            if at - span["version"] <= BOUND
        )
        by_version.setdefault(at, []).append(fresh)
    for step in steps:
        assert step["tokens"] == sum(by_version[step["version"] - 1])
