"""What the teacher's answers do to scored groups: log-probs, masks, and the end of the run."""

from __future__ import annotations

import dataclasses
import itertools
import math
from concurrent.futures import Future
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from asyncrl.config import Config
from asyncrl.contracts.content_hash import content_hashes
from asyncrl.contracts.errors import TeacherError
from asyncrl.contracts.group_table import groups_to_table, table_from_ipc, table_to_ipc
from asyncrl.contracts.rows import Completion, Group, Prompt, TopLogprobs, Trajectory, VersionSpan
from asyncrl.control.diagnostics import scoring_metrics
from asyncrl.learning.examples.batches import examples_of
from asyncrl.learning.steps.distillation import distillation_metrics, with_teacher_advantages
from asyncrl.models.micro_batches import Example
from asyncrl.observe.alarms import alarms
from asyncrl.preflight.specs import scoring_spec
from asyncrl.rewards.pool import GroupRewards
from asyncrl.rewards.reference_rows import reference_rows
from asyncrl.rewards.score import attach_rewards, attach_teacher, score_table
from asyncrl.rewards.scoring import _unscored_in_a_row
from asyncrl.rewards.source import _with_teacher
from asyncrl.rewards.summary import summaries
from asyncrl.rundir.reader import _explode

LENGTHS = (3, 2, 4)


def config(**distillation: Any) -> Config:
    return Config.model_validate(
        {
            "name": "teacher",
            "max_steps": 1,
            "model": {"path": "unused"},
            "data": {"train": "unused", "max_prompt_length": 2},
            "rollout": {"n_samples_per_prompt": 3, "max_completion_length": 4},
            "algorithm": {"distillation": {"teacher": "/teacher", **distillation}},
            "reward": {"functions": {"a": {"function": "m:a"}}},
        }
    )


def rewarded() -> pa.Table:
    trajectories = tuple(
        Trajectory(
            Completion((5,) * n, (-1.0,) * n, (VersionSpan(2, 0, n),), "stop", ""),
            (0, *(1,) * (n - 1)),
        )
        for n in LENGTHS
    )
    group = Group(1, Prompt(3, 0, "p", (1, 2), {}), trajectories, "replica", 1.0, 2.0)
    return attach_rewards(groups_to_table([group]), GroupRewards({"a": [1.0, 0.0, 1.0]}))


def scored(logprobs: list[np.ndarray], failure: str | None = None, **distillation: Any) -> pa.Table:
    table = attach_teacher(rewarded(), logprobs, failure, 0.25)
    return score_table(table, scoring_spec(config(**distillation)))


def constant(value: float, lengths: tuple[int, ...] = LENGTHS) -> list[np.ndarray]:
    return [np.full(n, value, np.float32) for n in lengths]


@pytest.mark.parametrize(
    "bad",
    [np.array([-1.0, math.nan]), np.array([-1.0, -math.inf]), np.array([-1.0]), np.zeros(3)],
    ids=["NaN", "Inf", "too few", "too many"],
)
def test_a_completion_that_the_teacher_did_not_score_is_masked_and_counted(bad: np.ndarray) -> None:
    values = constant(-2.0)
    values[1] = bad
    table = scored(values)
    assert table["status"].to_pylist() == [["ok", "no_teacher", "ok"]]
    assert table["advantage"].to_pylist()[0][1] is None
    assert table["teacher_failure"].to_pylist() == [None]
    metrics = scoring_metrics(summaries(table))
    assert metrics["rollout/no_teacher_ratio"] == pytest.approx(1 / 3)
    assert any("rollout/no_teacher_ratio" in line for line in alarms(metrics))
    assert [example.trajectory for example in examples_of(table)] == [0, 2]


def test_a_group_without_any_answer_names_the_reason() -> None:
    table = scored([], "status 503")
    assert table["status"].to_pylist() == [["no_teacher"] * 3]
    assert table["teacher_failure"].to_pylist() == ["status 503"]
    assert scored(constant(math.nan))["teacher_failure"].to_pylist()[0].startswith("its log-probs")
    assert scored(constant(-1.0)[:2])["teacher_failure"].to_pylist() == [
        "it scored 2 of 3 completions"
    ]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (TeacherError("status 503"), "status 503"),
        (ValueError("out of memory\nmore"), "ValueError: out of memory"),
    ],
)
def test_an_error_of_the_teacher_costs_its_group(error: Exception, line: str) -> None:
    failed: Future[Any] = Future()
    failed.set_exception(error)
    table = _with_teacher(rewarded(), reference_rows(rewarded()), failed, 1.5)
    assert table["teacher_failure"].to_pylist() == [line]
    assert table["teacher_s"].to_pylist() == [1.5]


def top(length: int, ids: int = 2, value: float = -3.0) -> TopLogprobs:
    """An answer with two other tokens at each place."""
    others = np.arange(length * ids, dtype=np.int32).reshape(length, ids)
    values = np.full((length, 2), value, np.float32) - others[:, :2] / 8
    return TopLogprobs(np.full(length, -1.0, np.float32), others, values)


def answered(answers: list[TopLogprobs] | Exception) -> pa.Table:
    future: Future[Any] = Future()
    if isinstance(answers, Exception):
        future.set_exception(answers)
    else:
        future.set_result(answers)
    table = _with_teacher(rewarded(), reference_rows(rewarded()), future, 0.25, top_k=True)
    return score_table(table, scoring_spec(config(use={"name": "top_k", "top_k": 2})))


def test_the_teachers_tokens_travel_with_the_group() -> None:
    table = answered([top(length) for length in LENGTHS])
    assert table["status"].to_pylist() == [["ok"] * 3]
    again = table_from_ipc(table_to_ipc(table))
    assert content_hashes(again) == content_hashes(table)
    other = answered([top(length, value=-4.0) for length in LENGTHS])
    for name in ("scored_at",):
        other = other.set_column(other.column_names.index(name), name, table[name])
    assert content_hashes(other) != content_hashes(table)
    for example, length in zip(examples_of(again), LENGTHS, strict=True):
        wanted = top(length)
        assert example.teacher_ids.tolist() == wanted.other_ids.tolist()
        assert example.teacher_logprobs.tolist() == wanted.other_logprobs.tolist()
    exploded = _explode(table)
    assert [len(ids) for ids in exploded["teacher_ids"].to_pylist()] == [6, 4, 8]


@pytest.mark.parametrize(
    "bad",
    [top(2, value=math.nan), top(2, value=-math.inf), top(3), top(2, ids=3)],
    ids=["NaN", "Inf", "too many", "ids without log-probs"],
)
def test_a_completion_without_the_teachers_tokens_is_masked(bad: TopLogprobs) -> None:
    answers = [top(length) for length in LENGTHS]
    answers[1] = bad
    table = answered(answers)
    assert table["status"].to_pylist() == [["ok", "no_teacher", "ok"]]
    assert [len(ids) for ids in table["teacher_ids"].to_pylist()[0]] == [6, 0, 8]
    assert [example.trajectory for example in examples_of(table)] == [0, 2]


def test_a_group_whose_teacher_failed_has_the_same_columns() -> None:
    failed, good = answered(ValueError("out of memory")), answered([top(n) for n in LENGTHS])
    assert failed["status"].to_pylist() == [["no_teacher"] * 3]
    assert failed["teacher_failure"].to_pylist() == ["ValueError: out of memory"]
    assert failed.schema == good.schema and len(pa.concat_tables([failed, good])) == 2


def test_only_groups_in_a_row_end_the_run() -> None:
    distillation = config(max_failed_groups=3).algorithm.distillation
    good, bad = scored(constant(-1.0)), scored([], "status 503")
    assert _unscored_in_a_row(pa.concat_tables([bad, bad, good, bad]), 0, distillation) == 1
    with pytest.raises(TeacherError) as ended:
        _unscored_in_a_row(bad, 2, distillation)
    assert str(ended.value) == (
        "algorithm.distillation.teacher = '/teacher' scored none of the last 3 groups"
        " (max_failed_groups): status 503"
    )
    assert _unscored_in_a_row(good, 0, None) == 0


@pytest.mark.parametrize("weight", [0.0, 2.0])
def test_each_loss_token_gets_the_teachers_and_the_rewards_advantage(weight: float) -> None:
    distillation = config(use={"coef": 0.5}, reward_weight=weight).algorithm.distillation
    assert distillation is not None
    table = scored([np.array([-9.0, -1.5, -0.5]), *constant(-2.0)[1:]], reward_weight=weight)
    known = examples_of(table)
    found = with_teacher_advantages(known, distillation)
    of_rewards = weight * known[0].advantage
    mean = -0.5  # the other trajectories have 0.5 · (-2 + 1)
    assert np.asarray(found[0].advantage) == pytest.approx(
        [0.0, -0.25 - mean + of_rewards, 0.25 - mean + of_rewards]
    )
    metrics = distillation_metrics(known, [table])
    # Loss tokens: -1 + 1.5, -1 + 0.5, and four with -1 + 2.
    assert metrics["distill/reverse_kl"] == pytest.approx((0.5 - 0.5 + 4.0) / 6)
    assert metrics["distill/teacher_s"] == 0.25


@pytest.mark.parametrize("trajectories", [1, 2, 3])
def test_the_expected_gradient_is_that_of_the_divergence(trajectories: int) -> None:
    """Over every outcome of N trajectories of one token, A ∇log π has the mean -coef ∇KL."""
    distillation = config(use={"coef": 0.5}).algorithm.distillation
    assert distillation is not None
    ours, theirs = np.log([0.6, 0.3, 0.1]), np.log([0.2, 0.3, 0.5])
    probs, scores = np.exp(ours), np.eye(3) - np.exp(ours)  # scores[a] = ∇log π(a) by the logits
    (whole,) = examples_of(scored(constant(-2.0)))[:1]
    expected = np.zeros(3)
    for outcome in itertools.product(range(3), repeat=trajectories):
        examples = [one_token(whole, index, ours[a], theirs[a]) for index, a in enumerate(outcome)]
        found = with_teacher_advantages(examples, distillation)
        gradient = sum(
            np.asarray(one.advantage)[-1] * scores[a] for one, a in zip(found, outcome, strict=True)
        )
        expected += probs[list(outcome)].prod() * gradient / trajectories
    divergence = probs @ ((ours - theirs)[:, None] * scores)
    np.testing.assert_allclose(expected, -0.5 * divergence, atol=1e-7)


def one_token(whole: Example, trajectory: int, ours: float, theirs: float) -> Example:
    """A trajectory with one loss token."""
    return dataclasses.replace(
        whole,
        trajectory=trajectory,
        advantage=0.0,
        loss_mask=np.array([False, False, True]),
        behavior_logprobs=np.array([0, 0, ours]),
        reference_logprobs=np.array([0, 0, theirs]),
    )


def test_as_a_reference_the_teacher_gives_no_advantage() -> None:
    use = {"name": "ref_kl", "kl": {"kl_loss_coef": 0.1}}
    reference = config(use=use).algorithm.distillation
    assert reference is not None
    known = examples_of(scored(constant(-2.0)))
    found = with_teacher_advantages(known, reference)
    assert [example.advantage for example in found] == [0.0, 0.0, 0.0]
    assert found[0].reference_logprobs is not None
