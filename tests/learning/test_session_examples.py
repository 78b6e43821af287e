"""Sessions in the learner: their rows, and that a session counts as one trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from recorded import learner_config, state_without_model

from asyncrl.contracts.nodes import CONSTRAINED, Node
from asyncrl.contracts.rows import COLUMNS, TURN_ADVANTAGE, TURN_COLUMNS, VersionSpan
from asyncrl.contracts.session_table import flat_completion, nodes_of_group, turns_of_group
from asyncrl.learning.examples.batches import examples_of
from asyncrl.learning.examples.session_examples import rows_of_trajectory, with_trajectory_units
from asyncrl.learning.steps import policy_step
from asyncrl.models.micro_batches import (
    WHOLE,
    Example,
    micro_batch,
    packing_units,
    trajectories_of,
)
from asyncrl.models.policy import load_policy

ON_POLICY = {"name": "ppo", "old_policy": "learner"}
AGGREGATIONS = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "fixed")


def context(parent: int | None, *ids: int) -> Node:
    return Node(parent, ids)


def turn(parent: int, *ids: int, **changes: Any) -> Node:
    node = Node(
        parent,
        ids,
        sampled=True,
        logprobs=tuple(-4.0 - (token % 7) / 16 for token in ids),
        versions=(VersionSpan(3, 0, len(ids)),),
        finish_reason="stop",
        replica="r",
        request_hash=f"hash of {parent}",
    )
    return replace(node, **changes)


CHAIN = [
    context(None, 5, 6),
    turn(0, 7, 8, 9),
    context(1, 10),
    turn(2, 11),
    context(3, 4),
    turn(4, 12, 13),
]
"""Three turns, one after the other."""
TREE = [
    context(None, 5, 6),
    turn(0, 7, 8, 9),
    context(1, 10),
    turn(2, 11),
    context(1, 14, 15),
    turn(4, 16, 17, status=CONSTRAINED),
    context(5, 18),
    turn(6, 19, 20),
]
"""Two branches after the first turn. One has a turn that is not trained."""
SINGLE = [context(None, 5, 6), turn(0, 21, 22)]


def columns_of(sessions: Sequence[Sequence[Node]]) -> dict[str, Any]:
    """The columns of a group's turns and sampled tokens."""
    flat = [flat_completion(nodes, "") for nodes in sessions]
    return {
        **turns_of_group(sessions),
        "completion_ids": [one.token_ids for one, _ in flat],
        "logprobs": [one.logprobs for one, _ in flat],
        "loss_mask": [mask for _, mask in flat],
        "versions": [
            [{"version": s.version, "start": s.start, "end": s.end} for s in one.versions]
            for one, _ in flat
        ],
    }


def table(
    sessions: Sequence[Sequence[Node]],
    advantages: Sequence[float | None],
    status: Sequence[str] | None = None,
    ordinal: int = 7,
) -> pa.Table:
    """One group, with the columns that the learner reads."""
    columns = columns_of(sessions)
    arrays = {
        name: pa.array([columns[name]], TURN_COLUMNS.get(name) or COLUMNS[name]) for name in columns
    }
    arrays |= {
        "attempt": pa.array([0], pa.int32()),
        "ordinal": pa.array([ordinal], pa.int64()),
        "status": pa.array([status or ["ok"] * len(sessions)], pa.list_(pa.string())),
        "advantage": pa.array([list(advantages)], pa.list_(pa.float32())),
    }
    return pa.table(arrays)


def test_sessions_survive_the_way_through_arrow() -> None:
    sessions = [CHAIN, TREE, SINGLE]
    (row,) = table(sessions, [1.0, 2.0, 3.0]).to_pylist()
    found = nodes_of_group(row)
    assert turns_of_group(found) == turns_of_group(sessions)
    # log-probs are float32 there, and these are exact
    assert found[0] == CHAIN and found[2] == SINGLE
    assert [node.token_ids for node in found[1]] == [node.token_ids for node in TREE]


def test_the_tokens_of_a_trajectory_are_those_of_its_turns() -> None:
    completion, mask = flat_completion(TREE, "text")
    assert completion.token_ids == (7, 8, 9, 11, 16, 17, 19, 20) and completion.text == "text"
    assert completion.turns == (3, 1, 2, 2) and mask == (1, 1, 1, 1, 0, 0, 1, 1)
    assert [(span.start, span.end) for span in completion.versions] == [
        (0, 3),
        (3, 4),
        (4, 6),
        (6, 8),
    ]
    nothing, _ = flat_completion([context(None, 5)], "")
    assert (nothing.token_ids, nothing.finish_reason) == ((), "abort")


def test_versions_may_go_back_from_turn_to_turn_and_not_within_one() -> None:
    older = turn(2, 4, versions=(VersionSpan(1, 0, 1),))
    completion, _ = flat_completion([*SINGLE, context(1, 9), older], "")
    assert [span.version for span in completion.versions] == [3, 1]
    with pytest.raises(ValueError, match="version 1 follows 3"):
        replace(completion, turns=())
    with pytest.raises(ValueError, match="has tokens of two turns"):
        replace(completion, turns=(1, 2))


def test_a_context_of_several_turns_has_its_reason_once() -> None:
    nodes = [context(None, 1), turn(0, 2), replace(context(None, 3), branch_reason="drift")]
    nodes += [turn(2, 4), turn(2, 5, branch_reason="retry"), turn(2, 6)]
    assert turns_of_group([nodes])["turn_branch_reason"] == ["", "drift", "retry", ""]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"turn_trajectory": [0, 5, 1]}, "a turn belongs to trajectory 5 of 2"),
        ({"turn_parent": [-1, 7, -1]}, "turn 1 continues turn 7, which is not an earlier one"),
        ({"turn_parent": [-1, -2, -1]}, "turn 1 continues turn -2"),
        ({"turn_parent": [-1, 0, 0]}, "turn 2 continues turn 0"),
        ({"turn_tokens": [2, 2, 2]}, r"turns have \[4, 2\] tokens, and the trajectories \[3, 2\]"),
        ({"turn_status": ["ok"]}, "zip"),
    ],
)
def test_columns_that_do_not_agree_are_refused(changes: dict[str, Any], error: str) -> None:
    nodes = [*SINGLE, context(1, 9), turn(2, 4)]
    row = {**columns_of([nodes, SINGLE]), **changes}
    with pytest.raises(ValueError, match=error):
        nodes_of_group(row)  # type: ignore[arg-type]


def test_columns_that_sessions_do_not_support_are_refused() -> None:
    scored = table([SINGLE], [1.0])
    with pytest.raises(ValueError, match="the column 'token_rewards' is not supported"):
        examples_of(scored.append_column("token_rewards", pa.array([[[0.0, 0.0]]])))


def test_a_context_after_the_last_turn_is_left_out() -> None:
    assert turns_of_group([[*SINGLE, context(1, 9)]]) == turns_of_group([SINGLE])


@pytest.mark.parametrize(
    ("nodes", "error"),
    [
        ([context(None, 1), turn(0, 2), turn(1, 3)], "turn 2 of trajectory 0 follows no context"),
        ([context(None, 1), context(0, 2), turn(1, 3)], "turn 2 follows another context"),
    ],
)
def test_nodes_that_are_no_turns_and_contexts_are_refused(nodes: list[Node], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        turns_of_group([nodes])


def test_each_row_of_a_session_is_an_example() -> None:
    first, second, third, single = examples_of(table([CHAIN, TREE, SINGLE], [1.0, -2.0, 0.5]))
    assert first.tokens.tolist() == [5, 6, 7, 8, 9, 10, 11, 4, 12, 13]
    assert (first.prompt_length, first.advantage, first.trajectory) == (2, 1.0, 0)
    assert first.loss_mask.tolist() == [1, 1, 1, 0, 1, 0, 1, 1]
    assert second.tokens.tolist() == [5, 6, 7, 8, 9, 10, 11]
    assert third.tokens.tolist() == [5, 6, 7, 8, 9, 14, 15, 16, 17, 18, 19, 20]
    assert third.prompt_length == 10 and third.loss_mask.tolist() == [True, True]
    assert (second.trajectory, third.trajectory, single.trajectory) == (1, 1, 2)
    assert (second.advantage, third.advantage) == (-2.0, -2.0)
    assert WHOLE not in {one.leaf for one in (first, second, third, single)}
    assert rows_of_trajectory([first, second, third, single]) == [1, 2, 2, 1]
    assert trajectories_of([first, second, third, single]) == [0, 1, 1, 2]
    assert packing_units(with_trajectory_units([first, second, third])) == [(0,), (1, 2)]


def test_sessions_that_are_not_ok_have_no_example() -> None:
    found = examples_of(table([CHAIN, SINGLE], [None, 1.0], ["over_long", "ok"]))
    assert [one.trajectory for one in found] == [1]
    with pytest.raises(ValueError, match="trajectory 0 has status ok but no advantage"):
        examples_of(table([CHAIN, SINGLE], [None, 1.0]))
    with pytest.raises(ValueError, match=r"columns \['turn_status'\] are missing"):
        examples_of(table([SINGLE], [1.0]).drop_columns(["turn_status"]))


def in_three_rows(example: Example) -> list[Example]:
    """The same session with a row for each turn. Each trains its own turn."""
    places = np.arange(len(example.loss_mask))
    starts = np.flatnonzero(np.diff(np.concatenate([[0], example.loss_mask.astype(int)])) == 1)
    ends = [*starts[1:], len(places)]
    return [
        replace(
            example,
            leaf=number,
            loss_mask=example.loss_mask & (places >= start) & (places < end),
        )
        for number, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_session_in_three_rows_has_the_gradient_of_the_same_in_one(
    tiny_model: Path, aggregation: str, together: bool
) -> None:
    algorithm = {"loss_aggregation": aggregation}
    state = state_without_model(learner_config(tiny_model, algorithm=algorithm))
    chain, single = examples_of(table([CHAIN, SINGLE], [-1.5, 1.0]))
    rows = in_three_rows(chain)
    assert [one.loss_tokens for one in rows] == [3, 1, 2]
    whole = gradient(state, tiny_model, [chain, single], [[0, 1]])
    split = gradient(
        state, tiny_model, [*rows, single], [[0, 1, 2, 3]] if together else [[0, 3], [2], [1]]
    )
    torch.testing.assert_close(split, whole, atol=1e-6, rtol=1e-4)
    assert whole.abs().max() > 1e-4
    # The rows as three trajectories would be another objective.
    apart = [replace(one, leaf=WHOLE, trajectory=9 + one.leaf) for one in rows]
    other = gradient(state, tiny_model, [*apart, single], [[0, 1, 2, 3]])
    assert aggregation == "token_mean" or (other - whole).abs().max() > 1e-5


@pytest.mark.parametrize(
    "algorithm",
    [
        {"loss": "gspo"},
        {"loss": "gmpo"},
        {"loss": "vespo"},
        {"loss": ON_POLICY, "correction": {"truncation": "sequence"}},
        {"correction": {"sequence_mask": {"above": 0.02}}},
    ],
)
def test_objectives_of_whole_trajectories_see_all_rows_of_a_session(
    tiny_model: Path, algorithm: dict[str, Any]
) -> None:
    config = learner_config(tiny_model, algorithm=algorithm)
    assert config.algorithm.compares_sequences
    state = state_without_model(config)
    chain, single = examples_of(table([CHAIN, SINGLE], [-1.5, 1.0]))
    whole = gradient(state, tiny_model, [chain, single], [[0, 1]])
    split = gradient(state, tiny_model, [*in_three_rows(chain), single], [[0, 1, 2, 3]])
    torch.testing.assert_close(split, whole, atol=1e-6, rtol=1e-4)
    apart = [replace(one, leaf=WHOLE, trajectory=9 + one.leaf) for one in in_three_rows(chain)]
    other = gradient(state, tiny_model, [*apart, single], [[0, 1, 2, 3]])
    assert whole.abs().max() > 1e-5 and (other - whole).abs().max() > 1e-5


def test_plain_objectives_split_a_session_freely() -> None:
    rejects = {"correction": {"rejection": {"above": 0.5, "level": "sequence_sum"}}}
    assert learner_config(Path("model"), algorithm=rejects).algorithm.compares_sequences
    assert not learner_config(Path("model")).algorithm.compares_sequences
    correction = {"truncation": "token", "band": {"above": 2.0}}
    algorithm = {"loss": ON_POLICY, "correction": correction}
    assert not learner_config(Path("model"), algorithm=algorithm).algorithm.compares_sequences


def test_each_turn_has_its_own_advantage() -> None:
    scored = table([CHAIN, TREE, SINGLE], [1.0, -2.0, 0.5])
    # TREE's second turn on its second branch has another status, and is not trained.
    of_turns = [1.5, 0.25, -1.0, -3.0, -4.0, None, -5.0, None]
    scored = scored.append_column("turn_advantage", pa.array([of_turns], TURN_ADVANTAGE))
    first, second, third, single = examples_of(scored)
    assert at_loss_tokens(first) == [1.5, 1.5, 1.5, 0.25, -1.0, -1.0]
    assert at_loss_tokens(second) == [-3.0, -3.0, -3.0, -4.0]
    assert at_loss_tokens(third) == [-5.0, -5.0]
    assert single.advantage == 0.5  # none of its own


def at_loss_tokens(example: Example) -> list[float]:
    values = np.broadcast_to(np.asarray(example.advantage), len(example.loss_mask))
    return [float(value) for value in values[example.loss_mask]]


def test_turns_with_advantages_of_their_own_are_separately_weighted(tiny_model: Path) -> None:
    """The gradient of a session whose turns have advantages is the sum, over its turns, of the
    gradient with only that turn trained, times its advantage."""
    correction = {"truncation": "token"}
    algorithm = {"loss": "reinforce", "correction": correction}
    state = state_without_model(learner_config(tiny_model, algorithm=algorithm))
    scored = table([CHAIN, SINGLE], [1.0, 1.0])
    of_turns = pa.array([[2.0, -1.5, 0.5, 1.0]], TURN_ADVANTAGE)
    mine, single = examples_of(scored.append_column("turn_advantage", of_turns))
    (plain, _) = examples_of(scored)
    whole = gradient(state, tiny_model, [mine, single], [[0, 1]])
    parts = [replace(single, advantage=1.0), *in_three_rows(plain)]
    wanted = torch.zeros_like(whole)
    for place, advantage in enumerate((1.0, 2.0, -1.5, 0.5)):
        alone = [replace(one, advantage=float(place == number)) for number, one in enumerate(parts)]
        wanted += advantage * gradient(state, tiny_model, alone, [[0, 1, 2, 3]])
    torch.testing.assert_close(whole, wanted, atol=1e-6, rtol=1e-4)
    assert whole.abs().max() > 1e-4
    # One advantage for all turns is another gradient.
    other = gradient(state, tiny_model, [plain, single], [[0, 1]])
    assert (other - whole).abs().max() > 1e-4


def gradient(
    state: Any, model: Path, examples: list[Example], parts: Sequence[Sequence[int]]
) -> torch.Tensor:
    """The gradient of a step whose micro-batches have these examples."""
    policy = load_policy(str(model), torch.float32, 1.0)
    policy.train()
    weights = policy_step._weights_of_trajectories(state, examples)
    loss = policy_step._loss(state, 1.0)
    for indices in parts:
        batch = micro_batch(examples, indices, "cpu", weights, version=4)
        logprobs, entropy, values = policy(batch)
        loss(logprobs, entropy, values, batch)[0].backward()
    return torch.cat([one.grad.flatten() for one in policy.parameters() if one.grad is not None])
