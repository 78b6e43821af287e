"""`on_stale: mask` on sessions of several rows: what is trained, and what each token counts as."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from ended_sessions import rewarded_table
from recorded import learner_config, state_without_model

from asyncrl.algorithms.objective import token_weights
from asyncrl.config import Config
from asyncrl.contracts.messages import Scored
from asyncrl.contracts.nodes import CONSTRAINED, Node
from asyncrl.contracts.rows import VersionSpan
from asyncrl.control.diagnostics import batch_metrics
from asyncrl.environments.running import Ended
from asyncrl.learning.steps import policy_step
from asyncrl.models.micro_batches import Example
from asyncrl.observe.metric_catalog import known_names
from asyncrl.preflight.specs import scoring_spec
from asyncrl.rewards.score import score_table
from asyncrl.rewards.summary import scored_from_text, scored_to_text, summaries

AT, BOUND = 5, 2
AGGREGATIONS = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "fixed")


def turn(parent: int, *versions: int, status: str = "ok") -> Node:
    """A turn with one token of each version."""
    return Node(
        parent,
        tuple(range(10, 10 + len(versions))),
        sampled=True,
        logprobs=(-1.0,) * len(versions),
        versions=tuple(VersionSpan(one, at, at + 1) for at, one in enumerate(versions)),
        status=status,
        finish_reason="stop",
        replica="r",
        started_at=1.0,
        finished_at=2.0,
    )


TREE = [
    Node(None, (1,)),
    turn(0, 1, 2),
    Node(1, (4,)),
    turn(2, 2, 3),
    Node(1, (6,)),
    turn(4, 3, status=CONSTRAINED),
    Node(5, (7,)),
    turn(6, 4, 5),
]
"""Two rows, which share the first turn. One has a turn that is not trained."""
OLD_BRANCH = [
    Node(None, (1,)),
    turn(0, 0, 1),
    Node(1, (4,)),
    turn(2, 1, 2),
    Node(1, (6,)),
    turn(4, 3, 4),
]
"""Two rows, of which the first has no fresh token."""
OLD = [Node(None, (1,)), turn(0, 0, 1, 2)]
FAILED = [Node(None, (1,)), turn(0, 1), Node(1, (4,)), turn(2, 1), Node(1, (6,)), turn(4, 5)]
"""It would have two rows, and is not trained."""
SESSIONS = [TREE, OLD_BRANCH, OLD, FAILED]
REWARDS = [1.0, 2.0, 4.0, None]


def config(aggregation: str) -> Config:
    """That of a learner, with an environment."""
    tree = learner_config(
        Path("model"), algorithm={"advantage": "dr_grpo", "loss_aggregation": aggregation}
    ).model_dump(exclude_unset=True)
    return Config.model_validate(
        tree
        | {
            "data": {"train": "unused", "max_prompt_length": 2, "max_length": 16},
            "environment": {"function": "m:solve"},
            "rollout": {"n_samples_per_prompt": len(SESSIONS), "max_completion_length": 4},
            "reward": {},
            "staleness": {"max_staleness": BOUND, "on_stale": "mask"},
        }
    )


def scored_table(chosen: Config) -> pa.Table:
    """A scored group with SESSIONS, as the run writes it."""
    ends = [Ended("env_error" if reward is None else "done", reward) for reward in REWARDS]
    table = rewarded_table(list(zip(SESSIONS, ends, strict=True)), REWARDS)
    return score_table(table, scoring_spec(chosen))


def stepped(
    chosen: Config, table: pa.Table, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, float], list[Example], list[float]]:
    """The metrics of a policy step on the group, and the examples that it trains, with weights."""
    state = state_without_model(chosen)
    state.applied = AT
    given: dict[str, Any] = {}

    def train(_: Any, examples: list[Example], weights: list[float], *__: Any, **___: Any) -> Any:
        given.update(examples=examples, weights=weights)
        return {"applied": 0.0}

    monkeypatch.setattr(policy_step, "train", train)
    monkeypatch.setattr(policy_step, "keep_if_bad", lambda *_: "")
    result = policy_step.policy_step(state, [table])
    return dict(result.metrics), given["examples"], given["weights"]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_step_trains_the_fresh_tokens_of_every_row(
    aggregation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = config(aggregation)
    metrics, examples, weights = stepped(chosen, scored_table(chosen), monkeypatch)
    # Of TREE's first row, the second token of its second turn is fresh.
    assert [one.trajectory for one in examples] == [0, 0, 1]
    assert [one.versions[one.loss_mask].tolist() for one in examples] == [[3], [4, 5], [3, 4]]
    whole = token_weights([6, 6, 3], aggregation, 4)
    assert weights == [whole[0], whole[0], whole[1]]
    # The rows of a session are one trajectory: only OLD keeps nothing.
    assert metrics["stale/masked_ratio"] == pytest.approx(10 / 15)
    assert metrics["stale/empty_ratio"] == pytest.approx(1 / 3)
    by_length = [metrics[f"stale/kept_by_length_{quarter}"] for quarter in (1, 2, 3)]
    assert by_length == pytest.approx([0, 3 / 6, 2 / 6])
    # TREE: 1 2 | 2 | 3 4 | 5. OLD_BRANCH: 0 1 | 1 | 2 3 | 4. OLD: 0 | 1 | 2.
    by_position = [metrics[f"stale/kept_by_position_{quarter}"] for quarter in (1, 2, 3, 4)]
    assert by_position == pytest.approx([0, 0, 3 / 5, 1])


def as_control_gets(table: pa.Table) -> Scored:
    (found,) = summaries(table)
    return scored_from_text(scored_to_text(found))


def tokens_of(found: Scored, max_staleness: int) -> dict[str, Any]:
    """The metrics of session tokens of a step at AT."""
    metrics = batch_metrics([found], AT, [0], max_staleness)
    assert {name for name in metrics if name.startswith("session/")} <= (
        known_names() | {f"session/tokens_{reason}" for reason in REASONS}
    )
    prefix = "session/tokens_"
    return {
        name.removeprefix(prefix): value
        for name, value in metrics.items()
        if name.startswith(prefix)
    }


REASONS = ("stale", "constrained", "env_error")


def test_every_sampled_token_of_a_step_is_trained_or_has_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = config("token_mean")
    table = scored_table(chosen)
    found = as_control_gets(table)
    assert (found.versions, found.loss_tokens) == ((0, 1, 2, 3, 4, 5), (2, 4, 4, 2, 2, 1))
    tokens = tokens_of(found, BOUND)
    assert tokens == {"sampled": 19, "trained": 5, "stale": 10, "constrained": 1, "env_error": 3}
    assert tokens["sampled"] == sum(tokens.values()) - tokens["sampled"] == found.tokens
    _, examples, _ = stepped(chosen, table, monkeypatch)
    assert tokens["trained"] == sum(one.loss_tokens for one in examples)


def test_no_token_within_the_bound_is_stale() -> None:
    found = as_control_gets(scored_table(config("token_mean")))
    tokens = tokens_of(found, AT)
    assert tokens == {"sampled": 19, "trained": 15, "constrained": 1, "env_error": 3}


def test_tokens_that_rows_repeat_are_counted_apart() -> None:
    found = as_control_gets(scored_table(config("token_mean")))
    metrics = batch_metrics([found], AT, [0], BOUND)
    assert metrics["session/repeated_tokens"] == 4  # the first turns of TREE and OLD_BRANCH
