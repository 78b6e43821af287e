"""A user-defined loss in real learner steps equals the built-in one, on one rank and on two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recorded import learner_config, recorded_batch

from asyncrl.learning.driver import LearnerError, RayLearner
from asyncrl.preflight.specs import learner_spec

Run = Callable[[Any], Any]

SAME = ("loss", "grad_norm", "clip_fraction", "ratio_mean", "kl_k3")


def steps(run: Run, model_path: Path, loss: str, world_size: int) -> list[dict[str, float]]:
    config = learner_config(model_path, world_size, max_tokens=128, algorithm={"loss": loss})
    group = run(RayLearner.create(learner_spec(config), "run", 1))
    try:
        return [run(group.step(recorded_batch(step))).metrics for step in range(2)]
    finally:
        run(group.close())


@pytest.mark.slow
def test_a_user_loss_equals_the_built_in_one_on_one_rank_and_on_two(
    ray_cluster: Any, run: Run, model_path: Path
) -> None:
    built_in = steps(run, model_path, "ppo", 1)
    own = {
        world_size: steps(run, model_path, "own_losses:clipped", world_size)
        for world_size in (1, 2)
    }
    for step, expected in enumerate(built_in):
        assert {name: own[1][step][name] for name in SAME} == {
            name: expected[name] for name in SAME
        }
        assert {name: own[2][step][name] for name in SAME} == pytest.approx(
            {name: expected[name] for name in SAME}, rel=1e-4, abs=1e-5
        )
        assert own[2][step]["loss/ratio_below_half"] == pytest.approx(
            own[1][step]["loss/ratio_below_half"], abs=1e-6
        )
        assert (
            0 < own[1][step]["loss/ratio_below_half"] < 1
            and "loss/ratio_below_half" not in expected
        )


@pytest.mark.slow
def test_a_user_loss_with_a_wrong_shape_raises_with_file_and_line(
    ray_cluster: Any, run: Run, model_path: Path
) -> None:
    with pytest.raises(
        LearnerError,
        match=(
            r"own_losses\.py:\d+\) raised RuntimeError: .* at .*own_losses\.py:\d+, in twelve_only"
        ),
    ):
        steps(run, model_path, "own_losses:twelve_only", 1)
