"""A second copy of the weights within groups of ranks (ZeRO++ hpZ): the same steps, also after a
load, on four ranks in groups of two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from plain_ranks import on_ranks
from recorded import learner_config

from asyncrl.contracts.offline_rows import token_table
from asyncrl.learning.engine import zero
from asyncrl.learning.engine.state import load_state
from asyncrl.learning.rank import LearnerRank
from asyncrl.preflight.specs import learner_spec

RANKS = 4
ROWS = [((5, 6, 7 + row), (8, 9, 10 + row, 3)) for row in range(12)]


def steps(rank: int, world_size: int, path: Path, place: Path, size: int) -> dict[str, Any]:
    """Five steps, of which the last two are repeated after a load."""
    config = learner_config(path, world_size, 64, zero_hpz_partition_size=size, learning_rate=1e-3)
    learner = LearnerRank(load_state(rank, learner_spec(config)), "run", 1)

    def step() -> float:
        return float(learner.supervised_step(token_table(ROWS))["loss"])

    first = [step() for _ in range(3)]
    learner.save(place)
    dist.barrier()
    last = [step() for _ in range(2)]
    learner.load(place)
    rows = learner.logprobs(ROWS)
    weights = [
        (parameter.ds_tensor.numel(), copy.numel())
        for parameter in zero.policy_of(learner.state.engine).parameters()
        if (copy := getattr(parameter, "ds_secondary_tensor", None)) is not None
    ]
    return {
        "losses": [*first, *last],
        "again": [step() for _ in range(2)],
        "rows": {number: values.tolist() for number, values in rows.items()},
        "copies": weights,
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_second_copies_change_nothing_and_follow_a_load(model_path: Path, tmp_path: Path) -> None:
    plain, second = (
        on_ranks(RANKS, steps, model_path, tmp_path / str(size), size) for size in (1, 2)
    )
    assert not any(found["copies"] for found in plain)
    for found in second:
        assert found["copies"] and all(copy == 2 * own for own, copy in found["copies"])
    for one, other in zip(plain, second, strict=True):
        assert other["losses"] == pytest.approx(one["losses"], rel=1e-5)
        assert other["again"] == pytest.approx(other["losses"][3:], rel=1e-6)
        assert other["rows"].keys() == one["rows"].keys()
        for number, values in one["rows"].items():
            np.testing.assert_allclose(other["rows"][number], values, atol=1e-5)
