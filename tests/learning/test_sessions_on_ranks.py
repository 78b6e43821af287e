"""Sessions on two ranks of ZeRO-3, with rows of one session on both: the learner's log-probs are
those of transformers, and a session counts as one trajectory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_ranks import on_ranks
from recorded import learner_config, state_without_model
from test_session_examples import (
    AGGREGATIONS,
    CHAIN,
    SINGLE,
    TREE,
    context,
    gradient,
    table,
    turn,
)
from test_session_reference import ORPHANED, wanted
from transformers import AutoModelForCausalLM

from asyncrl.config import Config
from asyncrl.learning.engine import zero
from asyncrl.learning.engine.state import load_state
from asyncrl.learning.examples.batches import examples_of
from asyncrl.learning.rank import LearnerRank
from asyncrl.learning.steps import passes
from asyncrl.preflight.specs import learner_spec

RANKS = 2
RECORDED = [CHAIN, TREE, ORPHANED]
"""TREE has two rows, the others have one."""
IN_THREE = [
    context(None, 5, 6),
    turn(0, 7, 8, 9),
    context(None, 5, 6, 7, 8, 9, 10),
    turn(2, 11),
    context(None, 5, 6, 7, 8, 9, 10, 11, 4),
    turn(4, 12, 13),
]
"""The turns of CHAIN, where each is a row of its own."""
STEPS = {"one row": [CHAIN, SINGLE], "three rows": [IN_THREE, SINGLE]}
ADVANTAGES = [-1.5, 1.0]
ALGORITHMS: dict[str, dict[str, Any]] = {
    **{name: {"loss_aggregation": name} for name in AGGREGATIONS},
    "gspo": {"loss": "gspo"},
}


def config(path: Path, name: str) -> Config:
    return learner_config(path, RANKS, algorithm=ALGORITHMS[name], optimizer="sgd")


@pytest.fixture(scope="module")
def found(tiny_model: Path) -> list[dict[str, Any]]:
    """What `of_rank` returns on each rank."""
    return on_ranks(RANKS, of_rank, tiny_model)


def of_rank(rank: int, world_size: int, path: Path) -> dict[str, Any]:
    """For each algorithm and step: the whole gradient, the metrics, and the rows that this rank
    trained. And the log-probs of this rank's rows of RECORDED."""
    learner = LearnerRank(load_state(rank, learner_spec(config(path, "token_mean"))), "run", 1)
    learner.set_learning_rate(0.0)  # so that all steps have the same weights
    steps = {}
    for name in ALGORITHMS:
        learner.state.spec = learner_spec(config(path, name))
        steps |= {(name, rows): a_step(learner, rows) for rows in STEPS}
    examples = examples_of(table(RECORDED, [1.0] * len(RECORDED)))
    logprobs = {
        index: part.numpy()
        for batch, (values, *_) in passes.forward_batches(learner.state, examples)
        for index, part in zip(batch.order, values.split(list(batch.counts)), strict=True)
    }
    return {"logprobs": logprobs, "steps": steps}


def a_step(learner: LearnerRank, rows: str) -> tuple[torch.Tensor, dict[str, float], set[int]]:
    from deepspeed.utils import safe_get_full_grad

    taken: list[torch.Tensor] = []
    trained: set[int] = set()
    finite, micro_batch = zero.gradients_finite, passes.micro_batch

    def recording_finite(engine: Any) -> bool:
        gradients = [safe_get_full_grad(one) for one in zero.policy_of(engine).parameters()]
        taken.append(torch.cat([gradient.flatten() for gradient in gradients]))
        return finite(engine)

    def recording_micro_batch(examples: Any, indices: Any, *arguments: Any) -> Any:
        trained.update(indices)
        return micro_batch(examples, indices, *arguments)

    zero.gradients_finite, passes.micro_batch = recording_finite, recording_micro_batch
    try:
        result = learner.step([table(STEPS[rows], ADVANTAGES)])
    finally:
        zero.gradients_finite, passes.micro_batch = finite, micro_batch
    assert result.applied
    return taken[0], dict(result.metrics), trained


def test_log_probs_of_sessions_are_those_of_transformers(
    found: list[dict[str, Any]], tiny_model: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    examples = examples_of(table(RECORDED, [1.0] * len(RECORDED)))
    by_row = {row: values for rank in found for row, values in rank["logprobs"].items()}
    assert sorted(by_row) == [0, 1, 2, 3] and all(rank["logprobs"] for rank in found)
    for trajectory, nodes in enumerate(RECORDED):
        mine = [by_row[row] for row, one in enumerate(examples) if one.trajectory == trajectory]
        theirs = wanted(model, nodes)  # 0 at tokens that are not trained
        np.testing.assert_allclose(np.concatenate(mine), theirs[theirs != 0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_session_in_three_rows_on_two_ranks_has_the_gradient_of_one_row(
    found: list[dict[str, Any]], tiny_model: Path, name: str
) -> None:
    state = state_without_model(config(tiny_model, name))
    examples = examples_of(table(STEPS["one row"], ADVANTAGES))
    in_one_process = gradient(state, tiny_model, examples, [[0, 1]])
    assert in_one_process.abs().max() > 1e-2
    for rank in found:
        for rows in STEPS:
            taken, metrics, _ = rank["steps"][name, rows]
            assert (metrics["trajectories"], metrics["tokens"]) == (2, 8)
            torch.testing.assert_close(taken, in_one_process, atol=3e-6, rtol=1e-4)
    # An objective of whole trajectories needs all rows of the session on one rank.
    rows_of_session = [len(rank["steps"][name, "three rows"][2] - {3}) for rank in found]
    assert sorted(rows_of_session) == ([0, 3] if name == "gspo" else [1, 2])
