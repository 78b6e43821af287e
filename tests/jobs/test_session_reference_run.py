"""Runs of sessions with a KL term, with everything real."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audited_runs import audited
from session_turns import sampled_turns
from transformers import AutoModelForCausalLM

STEPS, GROUPS, SAMPLES = 4, 4, 4
COEF = 0.05


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(
            {"advantage": "rloo", "reference": {"kl_coef": COEF}}, marks=pytest.mark.faults
        ),
        pytest.param(
            {"reference": {"kl_loss_coef": COEF, "update_interval": 2}}, marks=pytest.mark.slow
        ),
    ],
    ids=["reward", "loss"],
)
def test_sessions_are_compared_with_the_reference_policy(
    start_run: Callable[..., Any],
    session_task: dict[str, Any],
    tmp_path: Path,
    algorithm: dict[str, Any],
) -> None:
    changes = session_task | {
        "max_steps": STEPS,
        "environment": {"function": "branching_sessions:branches", "processes": 1},
        "rollout.rollout_batch_size": GROUPS,
        "rollout.n_samples_per_prompt": SAMPLES,
        "algorithm": algorithm,
        # So later sessions are sampled by other weights than the reference policy's.
        "staleness.max_staleness": 0,
    }
    started = start_run(changes)
    assert started.wait() == 0, started.output
    run = audited(tmp_path / "runs" / "run")
    steps = [record for record in run.records("step") if record["applied"]]
    assert len(steps) == STEPS
    # The weights move away from the reference, and sampled tokens are compared with it.
    divergences = [step["kl_reference"] for step in steps]
    assert np.isfinite(divergences).all() and any(divergences), divergences
    rows = run.groups().to_pylist()
    assert_reference(tmp_path / "model", rows)
    versions = {row["reference_version"] for row in rows}
    assert versions == ({0, 2} if "update_interval" in algorithm["reference"] else {0})
    assert max(abs(kl(row, index)) for row in rows for index in range(SAMPLES)) > 0.01
    for row in rows:
        assert set(row["status"]) == {"ok"}
        assert row["turn_status"].count("orphan") == SAMPLES
        assert len(row["turn_status"]) == 5 * SAMPLES
        for index in range(SAMPLES):
            divergence = kl(row, index) if "kl_coef" in algorithm["reference"] else 0.0
            expected = row["session_reward"][index] - COEF * divergence
            assert row["reward"][index] == pytest.approx(expected, abs=1e-4)


def kl(row: dict[str, Any], trajectory: int) -> float:
    """The divergence of a session by its trained tokens, in nats."""
    names = ("logprobs", "reference_logprobs", "loss_mask")
    ours, theirs, mask = (np.array(row[name][trajectory]) for name in names)
    return float((ours - theirs)[mask == 1].sum())


def assert_reference(model_path: Path, rows: list[dict[str, Any]]) -> None:
    """What the first reference policy gave to each turn is what transformers computes after its
    tokens; an orphan has 0."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    later = 0
    for row in rows:
        if row["reference_version"] != 0:
            continue
        begins = [0] * SAMPLES
        for (trajectory, before, ids, _, _), status in zip(
            sampled_turns(row), row["turn_status"], strict=True
        ):
            begin = begins[trajectory]
            begins[trajectory] += len(ids)
            found = np.array(row["reference_logprobs"][trajectory][begin : begin + len(ids)])
            if status != "ok":
                assert not found.any()
                continue
            with torch.no_grad():
                logits = model(torch.tensor([[*before, *ids]])).logits[0, len(before) - 1 : -1]
            known = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0].numpy()
            np.testing.assert_allclose(found, known, atol=1e-4)
            later += len(before) > 30
    assert later > GROUPS * SAMPLES
