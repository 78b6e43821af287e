"""ReMax as a whole run of 20 steps, with an engine of two workers: groups of one, with a greedy
completion each, and an audit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from audited_runs import audited
from transformers import AutoModelForCausalLM

from asyncrl.observe.metric_catalog import known_names


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_a_remax_run_compares_each_completion_with_the_greedy_one(
    start_run: Callable[..., Any], tmp_path: Path, tiny_model: Path
) -> None:
    directory = tmp_path / "runs" / "run"
    changes = {
        "max_steps": 20,
        "algorithm.advantage": "remax",
        "generator.tensor_parallel_size": 2,
        "weights.check_every_versions": 10,
        "staleness.max_staleness": 2,
        "rollout.rollout_batch_size": 8,
        "rollout.n_samples_per_prompt": 1,
        "eval": {},
        "checkpoint.every_steps": 0,
    }
    started = start_run(changes)
    assert started.wait() == 0, started.output
    run = audited(directory)
    steps = [record for record in run.records("step") if record["applied"]]
    assert len(steps) == 20
    differences = [record["check/logprob_max_diff"] for record in run.records("logprob_check")]
    assert len(differences) == 3 and max(differences) <= 1e-4, differences
    # A step at which no new group has arrived has no share of missing baselines.
    missing = [step["baseline/missing_ratio"] for step in steps if "baseline/missing_ratio" in step]
    assert missing and not any(missing)
    shown = {name for step in steps for name in step if name.startswith("baseline/")}
    assert len(shown) == 4 and shown <= known_names()
    rows = run.groups().to_pylist()
    rewards = {(row["reward"][0], row["baseline_reward"]) for row in rows}
    assert any(reward != baseline for reward, baseline in rewards), "nothing was learned from"
    for row in rows:
        assert len(row["completion_ids"]) == len(row["status"]) == 1
        assert row["advantage"][0] == pytest.approx(row["reward"][0] - row["baseline_reward"])
    assert_greedy(tiny_model, rows)


def assert_greedy(model_path: Path, rows: list[dict[str, Any]]) -> None:
    """The baselines of version 0 are the most probable tokens of the model, token by token."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    first = [row for row in rows if {span["version"] for span in row["baseline_versions"]} == {0}]
    assert len(first) >= 8
    for row in first:
        ids, begin = row["baseline_ids"], len(row["prompt_ids"]) - 1
        with torch.no_grad():
            logits = model(torch.tensor([[*row["prompt_ids"], *ids]])).logits[0, begin:-1]
        best = logits.max(-1).values
        chosen = logits.gather(-1, torch.tensor(ids)[:, None])[:, 0]
        torch.testing.assert_close(chosen, best, atol=1e-4, rtol=0)
