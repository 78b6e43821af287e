"""The trajectory that makes a policy step not finite is found, whichever component of the loss has
the NaN or Inf."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from recorded import learner_config, recorded_group, state_without_model

from asyncrl.contracts.group_table import groups_to_table
from asyncrl.contracts.rows import TopLogprobs
from asyncrl.learning.engine.state import LearnerState
from asyncrl.learning.steps import blame, policy_step
from asyncrl.models.micro_batches import Example, micro_batch
from asyncrl.rewards.score import attach_teacher

TOP_K = 3
BAD = (2, 1)
"""Group and trajectory."""
DISTILLATION = {"teacher": "teacher", "use": {"name": "top_k", "top_k": TOP_K, "coef": 0.5}}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "ce": {"ce": {"coef": 0.1, "min_reward": 0.5}},
    "distill": {"distillation": DISTILLATION},
}


def with_teacher(table: pa.Table) -> pa.Table:
    """The group with a teacher's answers: tokens 0 to TOP_K - 1 are its most probable others."""
    answers = [
        TopLogprobs(
            np.full(len(ids), -3.0, np.float32),
            np.tile(np.arange(TOP_K, dtype=np.int32), (len(ids), 1)),
            np.full((len(ids), TOP_K), -2.0, np.float32),
        )
        for ids in table["completion_ids"][0].as_py()
    ]
    return attach_teacher(table, [answer.logprobs for answer in answers], None, 0.1, answers)


def infinite_backward(
    state: LearnerState, examples: list[Example], weights: list[float], loss: Any, temperature: None
) -> tuple[dict[str, float], None]:
    """The loss where the model finds BAD impossible. Its policy loss is finite: the ratio is 0."""
    batch = micro_batch(examples, range(len(examples)), "cpu", weights)
    parts = []
    for index in batch.order:
        example = examples[index]
        bad = (example.group, example.trajectory) == BAD
        parts.append(torch.full((example.loss_tokens,), -torch.inf if bad else -4.0))
    logprobs = torch.cat(parts)
    ours = torch.full((len(logprobs), TOP_K), -3.0)
    ours[logprobs.isinf()] = torch.nan
    batch = replace(batch, learner_logprobs=ours)
    found, _ = loss(logprobs, torch.zeros_like(logprobs), torch.zeros_like(logprobs), batch)
    return {"nonfinite_loss": float(not found.isfinite()), "nonfinite_gradient": 0.0}, None


@pytest.mark.parametrize("component", ALGORITHMS)
def test_a_component_that_is_not_finite_is_found(
    component: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_without_model(
        learner_config(tmp_path / "model", algorithm=ALGORITHMS[component], find_nonfinite=True)
    )
    monkeypatch.setattr(blame, "backward", infinite_backward)
    monkeypatch.setattr(policy_step, "train", lambda *_, **__: {"applied": 0.0})
    monkeypatch.setattr(blame.zero, "parameters_finite", lambda engine: True)
    monkeypatch.setattr(blame.zero, "discard_gradients", lambda engine: None)
    tables = [groups_to_table([recorded_group(ordinal)]) for ordinal in range(4)]
    if component == "distill":
        tables = [with_teacher(table) for table in tables]
    result = policy_step.policy_step(state, tables)
    assert "NaN or Inf in loss or gradient from group 2, trajectory 1; its" in result.note
