"""Tokens beyond the staleness bound get no gradient, and the others count as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded import learner_config, state_without_model

from asyncrl.algorithms.objective import token_weights
from asyncrl.contracts.group_table import groups_to_table
from asyncrl.contracts.rows import Completion, Group, Prompt, Trajectory, VersionSpan
from asyncrl.learning.steps import policy_step
from asyncrl.learning.steps.stale_tokens import kept_metrics, with_fresh_tokens
from asyncrl.models.micro_batches import Example

VERSIONS = [(3, 3), (0, 0, 1, 4), (0, 1), (2, 2, 2, 3, 3, 3, 4, 4)]
"""Version of each token of four completions."""
AT, BOUND = 5, 2
AGGREGATIONS = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "fixed")


def example(versions: tuple[int, ...], mask: tuple[int, ...] | None = None) -> Example:
    count = len(versions)
    return Example(
        tokens=np.arange(2 + count),
        prompt_length=2,
        loss_mask=np.array(mask or (1,) * count, dtype=bool),
        behavior_logprobs=np.full(count, -1.0, dtype=np.float32),
        advantage=1.0,
        versions=np.array(versions, dtype=np.int32),
    )


def spans(versions: tuple[int, ...]) -> tuple[VersionSpan, ...]:
    return tuple(
        VersionSpan(version, versions.index(version), versions.index(version) + count)
        for version in sorted(set(versions))
        if (count := versions.count(version))
    )


def test_old_tokens_are_masked_and_weights_stay() -> None:
    examples = [example(versions) for versions in VERSIONS]
    kept, weights = with_fresh_tokens(examples, [0.1, 0.2, 0.3, 0.4], AT - BOUND)
    assert [one.loss_mask.tolist() for one in kept] == [
        [True, True],
        [False, False, False, True],
        [False] * 3 + [True] * 5,
    ]
    assert weights == [0.1, 0.2, 0.4]
    assert all(one.loss_mask.all() for one in examples), "the given examples stay"


def test_tokens_without_loss_stay_without_loss() -> None:
    (kept,), _ = with_fresh_tokens([example((1, 4, 4), (1, 0, 1))], [1.0], 3)
    assert kept.loss_mask.tolist() == [False, False, True]
    assert with_fresh_tokens([example((4, 4), (0, 0))], [1.0], 3) == ([], [])


def test_kept_metrics_by_hand() -> None:
    found = kept_metrics([example(versions) for versions in VERSIONS], AT - BOUND)
    assert found["stale/masked_ratio"] == pytest.approx(8 / 16)
    assert found["stale/empty_ratio"] == pytest.approx(1 / 4)
    by_length = [found[f"stale/kept_by_length_{quarter}"] for quarter in (1, 2, 3, 4)]
    assert by_length == pytest.approx([1, 0, 1 / 4, 5 / 8])
    by_position = [found[f"stale/kept_by_position_{quarter}"] for quarter in (1, 2, 3, 4)]
    # First quarters: 3 | 0 | 0 | 2 2. Second: 0 | 2 3. Third: 3 | 1 | 1 | 3 3. Fourth: 4 | 4 4.
    assert by_position == pytest.approx([1 / 5, 1 / 3, 3 / 5, 1])
    assert kept_metrics([], 0) == {}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_step_trains_fresh_tokens_with_the_weights_of_whole_trajectories(
    aggregation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = learner_config(Path("model"), algorithm={"loss_aggregation": aggregation})
    tree = config.model_dump(exclude_unset=True)
    tree["staleness"] = {"max_staleness": BOUND, "on_stale": "mask"}
    state = state_without_model(type(config).model_validate(tree))
    state.applied = AT
    given: dict[str, Any] = {}

    def train(
        _: Any, examples: list[Example], weights: list[float], *rest: Any, **more: Any
    ) -> Any:
        given.update(examples=examples, weights=weights)
        return {"applied": 0.0}

    monkeypatch.setattr(policy_step, "train", train)
    monkeypatch.setattr(policy_step, "keep_if_bad", lambda *_: "")
    group = Group(
        0,
        Prompt(7, 0, "p", (5, 6)),
        tuple(
            Trajectory(
                Completion((9,) * len(versions), (-1.0,) * len(versions), spans(versions), "stop"),
                (1,) * len(versions),
                1.0,
                {},
                advantage,
                "ok",
            )
            for advantage, versions in enumerate(VERSIONS)
        ),
        "replica",
        0.0,
        1.0,
        2.0,
    )
    result = policy_step.policy_step(state, [groups_to_table([group])])
    assert result.metrics["stale/masked_ratio"] == pytest.approx(1 / 2)
    assert [one.loss_tokens for one in given["examples"]] == [2, 1, 5]
    assert [one.advantage for one in given["examples"]] == [0, 1, 3]
    whole = token_weights(
        [len(versions) for versions in VERSIONS],
        aggregation,
        state.spec.online.rollout.max_completion_length,
    )
    assert given["weights"] == [whole[0], whole[1], whole[3]]


def test_without_mask_every_token_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_without_model(learner_config(Path("model")))
    state.applied = AT
    examples = [example(versions) for versions in VERSIONS]
    assert policy_step._fresh(state, examples, [1.0] * 4) == (examples, [1.0] * 4)
