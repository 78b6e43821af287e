"""The log-probs of a reference policy and of a teacher for sessions: from real models, through
rewards and files, to the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from ended_sessions import rewarded_table
from recorded import learner_config, state_without_model
from test_session_examples import CHAIN, TREE, context, gradient, turn
from transformers import AutoModelForCausalLM

from asyncrl.config import Config
from asyncrl.contracts.group_table import groups_to_table
from asyncrl.contracts.nodes import ORPHAN, Node
from asyncrl.contracts.rows import (
    REFERENCE_LOGPROBS,
    Completion,
    Group,
    Prompt,
    ReferenceLogprobs,
    TopLogprobs,
    Trajectory,
    VersionSpan,
)
from asyncrl.contracts.session_table import flat_completion
from asyncrl.environments.running import Ended
from asyncrl.learning.examples.batches import examples_of
from asyncrl.learning.frozen.reference import Reference
from asyncrl.learning.steps.distillation import with_teacher_advantages
from asyncrl.models.micro_batches import WHOLE, Example
from asyncrl.preflight.specs import reference_spec, scoring_spec
from asyncrl.rewards.reference_rows import ReferenceRows, reference_rows
from asyncrl.rewards.score import score_table
from asyncrl.rewards.source import _with_reference, _with_teacher
from asyncrl.rundir.audited_rows import read_rows

TOP_K = 3
COEF = 0.5
ORPHANED = [
    context(None, 5, 6),
    turn(0, 30, 31, status=ORPHAN),
    turn(0, 7),
    context(2, 10, 11),
    turn(3, 12, 13),
]
"""Its agent never received the first turn."""
NOTHING = [context(None, 5, 6), turn(0, 9, 9, status=ORPHAN)]
"""No token of it is trained."""
SESSIONS = [CHAIN, TREE, ORPHANED, NOTHING]
REWARDS = [1.0, 2.0, 4.0, 0.0]
KL = {"advantage": "dr_grpo", "reference": {"kl_coef": COEF}}


def config(model: Path | str, **algorithm: Any) -> Config:
    return Config.model_validate(
        {
            "name": "sessions",
            "max_steps": 1,
            "model": {"path": str(model)},
            "data": {"train": "unused", "max_prompt_length": 4, "max_length": 32},
            "environment": {"function": "m:solve"},
            "rollout": {"n_samples_per_prompt": 4, "max_completion_length": 8},
            "learner": {"max_tokens_per_gpu": 64},
            "algorithm": algorithm or KL,
            "staleness": {"max_staleness": 0},
        }
    )


def rewarded(sessions: Sequence[Sequence[Node]] = SESSIONS) -> pa.Table:
    """One group with raw rewards, as the rollout workers and the reward functions leave it."""
    played = [(nodes, Ended("done", 0.0)) for nodes in sessions]
    return rewarded_table(played, REWARDS[: len(sessions)], prompt_ids=(5, 6))


def answered(answer: object) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(answer)
    return future


def referred(logprobs: Sequence[np.ndarray]) -> pa.Table:
    """The group with these log-probs of the reference policy for its rows, scored."""
    group, asked = rewarded(), reference_rows(rewarded())
    answer = answered(ReferenceLogprobs(0, list(logprobs)))
    return score_table(_with_reference(group, asked, answer), scoring_spec(config("unused")))


def paths(nodes: Sequence[Node]) -> list[tuple[bool, list[int], list[int]]]:
    """For each turn: whether it is trained, the tokens before it, and its own."""
    whole: list[list[int]] = []
    found = []
    for node in nodes:
        before = [] if node.parent is None else whole[node.parent]
        whole.append([*before, *node.token_ids])
        if node.sampled:
            found.append((node.status == "ok", before, list(node.token_ids)))
    return found


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


def every_logprob(model: Any, before: list[int], ids: list[int]) -> torch.Tensor:
    """[C, vocabulary] by transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([[*before, *ids]])).logits[0, len(before) - 1 : -1]
    return cast(torch.Tensor, logits.log_softmax(-1))


def wanted(model: Any, nodes: Sequence[Node]) -> np.ndarray:
    """Of each sampled token of a session, after the tokens before it; 0 where it is not trained."""
    parts = [
        every_logprob(model, before, ids).gather(1, torch.tensor(ids)[:, None])[:, 0].numpy()
        if trained
        else np.zeros(len(ids), np.float32)
        for trained, before, ids in paths(nodes)
    ]
    return np.concatenate(parts)


@pytest.fixture
def no_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.learning.frozen.reference.claim_caches", lambda name: None)


@pytest.mark.usefixtures("no_caches")
def test_every_trained_token_is_scored_once_after_what_the_generator_saw(
    tiny_model: Path, plain: Any
) -> None:
    asked = reference_rows(rewarded())
    reference = Reference(reference_spec(config(tiny_model)))
    version, answers = reference.versioned_logprobs(asked.rows, asked.scored)
    trained = sum(len(ids) for nodes in SESSIONS for ok, _, ids in paths(nodes) if ok)
    assert version == 0 and sum(map(len, answers)) == trained
    found, top = asked.of_trajectories(cast("Any", answers))
    assert top == []
    for nodes, values in zip(SESSIONS, found, strict=True):
        np.testing.assert_allclose(values, wanted(plain, nodes), atol=1e-4)
    # Without the tokens between the turns, they would be others.
    (completion, _) = flat_completion(CHAIN, "")
    (joined,) = reference.logprobs([((5, 6), completion.token_ids)])
    assert np.abs(joined - found[0]).max() > 1e-2


@pytest.mark.usefixtures("no_caches")
def test_a_teacher_gives_other_tokens_at_trained_places(tiny_model: Path, plain: Any) -> None:
    use = {"name": "top_k", "top_k": TOP_K}
    settings = config(tiny_model, distillation={"teacher": str(tiny_model), "use": use})
    group, asked = rewarded(), reference_rows(rewarded())
    answers = Reference(reference_spec(settings)).top_logprobs(asked.rows, asked.scored)
    table = _with_teacher(group, asked, answered(answers), 0.5, top_k=True)
    scored = score_table(table, scoring_spec(settings))
    assert scored["status"].to_pylist() == [["ok", "ok", "ok", "no_token"]]
    assert scored["teacher_failure"].to_pylist() == [None]
    seen = 0
    for example in examples_of(scored):
        assert example.teacher_ids is not None and example.teacher_logprobs is not None
        assert example.reference_logprobs is not None
        for place in np.flatnonzero(example.loss_mask):
            at = example.prompt_length + int(place)
            token = int(example.tokens[at])
            (every,) = every_logprob(plain, example.tokens[:at].tolist(), [token])
            assert example.reference_logprobs[place] == pytest.approx(float(every[token]), abs=1e-4)
            every[token] = -math.inf
            values, ids = every.topk(TOP_K)
            assert sorted(example.teacher_ids[place].tolist()) == sorted(ids.tolist())
            np.testing.assert_allclose(
                np.sort(example.teacher_logprobs[place]), values.sort().values, atol=1e-4
            )
            seen += 1
    assert seen == sum(map(sum, rewarded()["loss_mask"].to_pylist()[0]))


def row_values(asked: ReferenceRows, value: float = -2.0) -> list[np.ndarray]:
    """An answer with the same log-prob for each scored token."""
    assert asked.scored is not None
    return [np.full(sum(mask), value, np.float32) for mask in asked.scored]


def test_the_reward_loses_the_divergence_of_trained_tokens() -> None:
    table = referred(row_values(reference_rows(rewarded())))
    (row,) = table.to_pylist()
    assert row["status"] == ["ok", "ok", "ok", "no_token"] and row["reference_version"] == 0
    for nodes, reward, before in zip(SESSIONS, row["reward"], REWARDS, strict=True):
        kl = sum(value + 2.0 for node in nodes if node.status == "ok" for value in node.logprobs)
        assert reward == pytest.approx(before - COEF * kl, abs=1e-5)
    # Tokens of the constrained turn and of the orphan have no log-probs, and no part in it.
    assert row["reference_logprobs"][1][4:6] == [0.0, 0.0]
    assert row["reference_logprobs"][2] == [0.0, 0.0, -2.0, -2.0, -2.0]


def test_a_row_that_is_not_scored_masks_its_session() -> None:
    asked = reference_rows(rewarded())
    assert asked.positions is not None and [index for index, _ in asked.positions] == [0, 1, 1, 2]
    bad = row_values(asked)
    bad[2] = np.full(len(bad[2]), math.nan, np.float32)
    assert referred(bad)["status"].to_pylist() == [["ok", "bad_logprob", "ok", "no_token"]]
    short = row_values(asked)
    short[0] = short[0][1:]
    assert referred(short)["status"].to_pylist() == [["bad_logprob", "ok", "ok", "no_token"]]
    lost = referred(row_values(asked)[1:])
    assert "4 rows of sessions got 3 answers" in lost["failure"][0].as_py()
    assert lost["reference_version"].to_pylist() == [None]


def test_the_audit_notices_log_probs_that_do_not_fit(tmp_path: Path) -> None:
    table = referred(row_values(reference_rows(rewarded())))
    place = table.schema.get_field_index("reference_logprobs")
    right = table["reference_logprobs"][0].as_py()
    for index, values, odd in (
        (0, right[0], False),
        (0, right[0][1:], True),
        (1, [*right[1][1:], math.nan], True),
        (3, [math.nan] * len(right[3]), False),  # no token of it is trained
    ):
        changed = [*right[:index], values, *right[index + 1 :]]
        column = pa.array([changed], REFERENCE_LOGPROBS)
        pq.write_table(
            table.set_column(place, "reference_logprobs", column), tmp_path / "groups.parquet"
        )
        (row,) = read_rows(tmp_path / "groups.parquet")
        assert ("invalid log-probs of the reference policy" in row.faults) == odd


def test_a_teacher_that_misses_a_row_masks_its_session_only() -> None:
    settings = config("unused", distillation={"teacher": "/teacher", "reward_weight": 0.5})
    asked = reference_rows(rewarded())
    bad = row_values(asked)
    bad[2] = np.full(len(bad[2]), math.nan, np.float32)
    table = _with_teacher(rewarded(), asked, answered(bad), 0.5)
    scored = score_table(table, scoring_spec(settings))
    assert scored["status"].to_pylist() == [["ok", "no_teacher", "ok", "no_token"]]
    distillation = settings.algorithm.distillation
    assert distillation is not None
    examples = examples_of(scored)
    assert [example.trajectory for example in examples] == [0, 2]
    adjusted = with_teacher_advantages(examples, distillation)
    terms = [
        -2.0 - example.behavior_logprobs[example.loss_mask].astype(np.float64)
        for example in examples
    ]
    assert len(terms) == 2  # two trajectories: each is compared with the other one
    for example, term, other in zip(adjusted, terms, reversed(terms), strict=True):
        mean = other.mean()
        of_rewards = examples[0 if example.trajectory == 0 else 1].advantage
        expected = distillation.use.coef * (term - mean) + distillation.reward_weight * of_rewards
        found = np.asarray(example.advantage)[example.loss_mask]
        np.testing.assert_allclose(found, expected, atol=1e-5)
        assert not np.asarray(example.advantage)[~example.loss_mask].any()


def test_top_k_answers_with_a_missing_token_mask_their_session() -> None:
    algorithm = {"distillation": {"teacher": "/teacher", "use": {"name": "top_k", "top_k": 2}}}
    asked = reference_rows(rewarded())
    answers = [
        TopLogprobs(values, np.ones((len(values), 2), np.int32), np.full((len(values), 2), -3.0))
        for values in row_values(asked)
    ]
    answers[1] = answers[1]._replace(other_ids=answers[1].other_ids[1:])
    table = _with_teacher(rewarded(), asked, answered(answers), 0.5, top_k=True)
    scored = score_table(table, scoring_spec(config("unused", **algorithm)))
    assert scored["status"].to_pylist() == [["ok", "no_teacher", "ok", "no_token"]]
    lengths = [len(ids) for ids in scored["completion_ids"][0].as_py()]
    assert [len(ids) for ids in scored["teacher_ids"][0].as_py()] == [
        2 * lengths[0],
        0,
        2 * lengths[2],
        2 * lengths[3],
    ]


def as_one_completion(table: pa.Table) -> Example:
    """CHAIN as a plain trajectory: one prompt, and a completion whose mask leaves out what the
    environment said."""
    (example, *_) = examples_of(table)
    count, begin = len(example.loss_mask), example.prompt_length
    trajectory = Trajectory(
        Completion(
            tuple(example.tokens[begin:].tolist()),
            tuple(example.behavior_logprobs.tolist()),
            (VersionSpan(3, 0, count),),
            "stop",
        ),
        tuple(example.loss_mask.astype(int).tolist()),
        1.0,
        {},
        float(example.advantage),
        reference_logprobs=tuple(
            np.where(example.loss_mask, example.reference_logprobs, -9.0).tolist()
        ),
    )
    prompt = Prompt(3, 0, "p", tuple(example.tokens[:begin].tolist()))
    (plain_one,) = examples_of(
        groups_to_table([Group(0, prompt, (trajectory,), "r", 1.0, 2.0, 3.0)])
    )
    assert plain_one.leaf == WHOLE
    return plain_one


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_kl_of_a_session_in_the_loss_is_that_of_one_row(
    tiny_model: Path, estimator: str
) -> None:
    algorithm = {"reference": {"kl_loss_coef": 1.0, "estimator": estimator}}
    state = state_without_model(learner_config(tiny_model, algorithm=algorithm))
    random = np.random.default_rng(0)
    asked = reference_rows(rewarded())
    answers = [np.float32(-3.5 + random.standard_normal(len(one))) for one in row_values(asked)]
    table = referred(answers)
    # Without advantages, the loss is the KL term alone.
    chain, first, second, orphaned = (replace(one, advantage=0.0) for one in examples_of(table))
    assert chain.reference_logprobs is not None
    assert chain.reference_logprobs[chain.loss_mask].tolist() == answers[0].tolist()
    assert first.reference_logprobs is not None and second.reference_logprobs is not None
    assert first.reference_logprobs[first.loss_mask].tolist() == answers[1].tolist()
    assert second.reference_logprobs[second.loss_mask].tolist() == answers[2].tolist()
    assert orphaned.reference_logprobs is not None
    assert orphaned.reference_logprobs[orphaned.loss_mask].tolist() == answers[3].tolist()
    found = gradient(state, tiny_model, [chain], [[0]])
    one = replace(as_one_completion(table), advantage=0.0)
    torch.testing.assert_close(found, gradient(state, tiny_model, [one], [[0]]))
    assert found.abs().max() > 1e-3
    # Other log-probs of the reference give another gradient.
    other = replace(chain, reference_logprobs=chain.reference_logprobs - 1)
    assert (gradient(state, tiny_model, [other], [[0]]) - found).abs().max() > 1e-4


def test_completions_are_asked_for_as_before() -> None:
    trajectories = tuple(
        Trajectory(
            Completion((7,) * n, (-1.0,) * n, (VersionSpan(0, 0, n),) if n else (), "stop"),
            (1,) * n,
        )
        for n in (2, 0)
    )
    group = Group(0, Prompt(3, 0, "p", (5, 6)), trajectories, "r", 1.0, 2.0)
    asked = reference_rows(groups_to_table([group]))
    assert asked.rows == [([5, 6], [7, 7]), ([5, 6], [])] and asked.scored is None
    answers = [np.float32([-1, -2]), np.zeros(0, np.float32)]
    assert asked.of_trajectories(cast("Any", answers))[0] == answers
