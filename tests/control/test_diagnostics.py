"""The metrics of a batch, on hand-computed numbers."""

import math

import pytest

from asyncrl.contracts.messages import Scored, ScoredBaseline
from asyncrl.contracts.outcomes import NO_BASELINE
from asyncrl.control.diagnostics import batch_metrics, scoring_metrics
from asyncrl.observe.alarms import alarms

QUANTILES = ("min", "p10", "median", "p90", "max")


def metrics_of(batch):
    """Metrics of a batch that is trained at version 5."""
    return batch_metrics(batch, 5, [5 - scored.oldest_version for scored in batch], 2)


def test_hand_computed():
    first = Scored(0, 3, None, 8, (0.0, 1.0), {"a": 0.5}, 2, 1, newest=4, lengths=(3, 5))
    second = Scored(
        1,
        5,
        None,
        6,
        (1.0, 1.0, 1.0),
        {"a": 1.0, "b": 2.0},
        3,
        0,
        newest=5,
        masked={"bad_logprob": 1},
        lengths=(1, 2, 2, 1),
    )
    metrics = metrics_of([first, second])
    assert metrics["staleness/histogram"] == [1, 0, 1]
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (1.0, 2)
    assert (metrics["staleness/in_flight_mean"], metrics["staleness/in_buffer_mean"]) == (0.5, 0.5)
    assert metrics["reward/mean"] == pytest.approx(0.8)
    assert metrics["reward/std"] == pytest.approx(0.4)
    assert [metrics[f"reward/{name}"] for name in QUANTILES] == [0, 0, 1, 1, 1]
    lengths = [metrics[f"rollout/completion_tokens_{name}"] for name in QUANTILES]
    assert lengths == [1, 1, 2, 5, 5]
    assert (metrics["reward/a"], metrics["reward/b"]) == (0.75, 2.0)
    assert metrics["rollout/completion_tokens"] == pytest.approx(14 / 6) and metrics[
        "rollout/truncated_ratio"
    ] == pytest.approx(1 / 6)


def test_the_age_of_the_reference_is_a_mean_over_the_groups_that_it_scored():
    batch = [
        Scored(0, 3, None, 8, (1.0,), {}, 2, 0, reference_version=version)
        for version in (4, 0, None)
    ]
    assert metrics_of(batch)["reference/age_mean"] == 3.0
    assert "reference/age_mean" not in metrics_of(batch[2:])


def test_each_source_has_a_share_and_a_reward():
    batch = [
        Scored(n, 3, None, 8, rewards, {}, 2, 0, source=source)
        for n, (source, rewards) in enumerate(
            (("a", (0.0, 1.0)), ("b", ()), ("a", (1.0,)), ("a", ()))
        )
    ]
    metrics = metrics_of(batch)
    assert (metrics["source/a_share"], metrics["source/b_share"]) == (0.75, 0.25)
    assert metrics["source/a_reward"] == pytest.approx(2 / 3) and math.isnan(
        metrics["source/b_reward"]
    )
    assert not any(
        name.startswith("source/") for name in metrics_of([Scored(0, 3, None, 8, (1.0,), {}, 2, 0)])
    )


def test_scoring_metrics_count_every_scored_group():
    equal = Scored(
        0,
        3,
        None,
        8,
        (1.0, 1.0),
        {},
        2,
        0,
        logprob_sum=-12.0,
        looping=1,
        characters=30,
        unprintable=1,
    )
    mixed = Scored(
        1,
        3,
        None,
        8,
        (0.0, 1.0),
        {},
        2,
        0,
        masked={"over_long": 1, "unscored": 1},
        logprob_sum=-6.0,
        characters=10,
    )
    broken = Scored(2, 3, None, 8, (), {}, 0, 0, masked={"bad_logprob": 4})
    assert scoring_metrics([equal, mixed, broken]) == {
        "rollout/unscored_ratio": 0.1,
        "rollout/bad_logprob_ratio": 0.4,
        "rollout/over_long_ratio": 0.1,
        "rollout/no_token_ratio": 0.0,
        "rollout/no_teacher_ratio": 0.0,
        "reward/zero_variance_ratio": pytest.approx(1 / 3),
        "rollout/logprob_mean": -0.75,
        "rollout/loop_ratio": 0.1,
        "rollout/unprintable_ratio": 0.025,
    }
    first = Scored(
        0, 3, None, 8, (1.0,), {}, 1, 0, masked={"unscored": 3}, unscored={"judge": 3, "exact": 0}
    )
    second = Scored(1, 3, None, 8, (1.0,) * 4, {}, 4, 0, unscored={"judge": 1, "exact": 0})
    shares = scoring_metrics([first, second])
    assert (
        shares["reward/judge/unscored_ratio"],
        shares["reward/exact/unscored_ratio"],
        shares["reward/unscored_ratio"],
    ) == (0.5, 0.0, 0.5)
    reasons = {"judge": 2, "judge/unscored_refused": 1, "other/unscored_refused": 0.5}
    third = Scored(2, 3, None, 8, (1.0,) * 2, {}, 2, 0, masked={"unscored": 2}, unscored=reasons)
    shares = scoring_metrics([third])
    assert (
        shares["reward/judge/unscored_ratio"],
        shares["reward/judge/unscored_refused_ratio"],
        shares["reward/other/unscored_refused_ratio"],
        shares["reward/unscored_refused_ratio"],
    ) == (0.5, 0.25, 0.125, 0.25)
    assert any(line.startswith("reward/unscored_refused_ratio") for line in alarms(shares))
    assert all(value != value for value in scoring_metrics([]).values()), (
        "without scored groups every metric is NaN, so that no alarm goes off"
    )


def test_baselines_have_their_own_metrics_and_none_of_the_trajectories():
    def group(rewards, baseline, failure=None):
        return Scored(
            0, 3, None, 8, rewards, {}, len(rewards), 0, baseline=baseline, failure=failure
        )

    batch = [
        group((1.0, 0.0), ScoredBaseline(1.0, 6, False)),
        group((1.0, 1.0), ScoredBaseline(0.0, 4, True)),
    ]
    metrics = metrics_of(batch)
    assert (metrics["baseline/reward"], metrics["baseline/tokens"]) == (0.5, 5.0)
    assert metrics["baseline/truncated_ratio"] == 0.5
    assert metrics["reward/mean"] == 0.75 and metrics["rollout/truncated_ratio"] == 0.0
    assert metrics["rollout/completion_tokens"] == 4.0
    arrived = [
        *batch,
        group((1.0, 1.0), ScoredBaseline(1.0, 6, False)),
        group((1.0, 1.0), ScoredBaseline(None, 0, False), f"{NO_BASELINE}it has no tokens"),
        group((), ScoredBaseline(None, 3, False), "the judge failed"),
    ]
    shares = scoring_metrics(arrived)
    assert shares["baseline/missing_ratio"] == 0.2, "a group that failed otherwise does not count"
    assert shares["reward/zero_variance_ratio"] == 0.2, "only where the baseline is equal too"
    assert not group((), ScoredBaseline(1.0, 6, False)).equal_rewards
    assert not any(name.startswith("baseline/") for name in scoring_metrics([group((1.0,), None)]))
