"""Alarms, and that docs/metrics.md knows every metric that has one."""

import re
from pathlib import Path

import pytest

from asyncrl.observe.alarms import RANGES, alarms

DOCS = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


def test_a_line_for_each_metric_outside_its_range():
    assert alarms({"ess": 0.9, "kl_k3": 0.01, "loss": 1e9, "rollout/truncated_ratio": 0.3, "nonfinite_loss": None}) == []
    lines = alarms({"ess": 0.25, "rollout/truncated_ratio": 0.8})
    assert lines[0].startswith("ess = 0.25 is outside 0.5 to 1: lower staleness.max_staleness") and "max_completion_length" in lines[1]


def test_gibberish_raises_an_alarm():
    assert alarms({"rollout/logprob_mean": -0.7, "rollout/loop_ratio": 0.02, "rollout/unprintable_ratio": 0.0}) == []
    lines = alarms({"rollout/logprob_mean": -11.9, "rollout/loop_ratio": 0.4, "rollout/unprintable_ratio": 0.2})
    assert [line.split(" ")[0] for line in lines] == ["rollout/logprob_mean", "rollout/loop_ratio", "rollout/unprintable_ratio"]
    assert all("garbled" in line for line in lines) and "rollout.repetition_stop" in lines[1]


def test_every_range_is_explained():
    names = set(re.findall(r"`([a-z_0-9/<>]+)`", DOCS))
    assert set(RANGES) <= names


def test_the_list_of_metrics_with_an_alarm_is_whole():
    listed = DOCS[DOCS.index("An `alarm` event") : DOCS.index("leaves its range")]
    assert set(re.findall(r"`([a-z_0-9/]+)`", listed)) - {"alarm"} == set(RANGES)


def test_what_compares_two_distributions_raises_no_alarm_where_one_of_them_is_cut():
    metrics = {"ess": 0.25, "chi2": 1.5, "ratio_mean": 0.7, "kl_k3": 0.3, "rollout/truncated_ratio": 0.8}
    assert len(alarms(metrics)) == 5 and len(alarms(metrics, cut=True)) == 1


OFF_POLICY = ("ess", "chi2", "ratio_mean", "kl_k3", "clip_fraction")
RECORDED = {
    "healthy": (1, 1e-4, (0.9973, 0.002809, 0.9893, 0.001442, 0.0), ()),
    "healthy, later": (1, 1e-4, (1.0, 2.492e-05, 1.001, 1.245e-05, 0.0), ()),
    "stale": (8, 1e-3, (0.16, 18.18, 1.826, 1.089, 0.8008), OFF_POLICY),
    "stale, later": (8, 1e-3, (0.6081, 0.9446, 1.188, 0.2292, 0.6774), ("kl_k3", "clip_fraction")),
    "diverging": (1, 1e-2, (0.06411, 363.6, 4.886, 4.767, 0.8537), OFF_POLICY),
    "diverging faster": (1, 3e-2, (0.2955, 0.7986, 0.4623, 1.209, 0.4323), ("ess", "ratio_mean", "kl_k3", "clip_fraction")),
}
"""Steps of the real learner on the tests' tiny Qwen3, its own log-probs as the generator's: versions of staleness, learning rate, the OFF_POLICY metrics,
and those that have an alarm."""


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_steps_raise_the_alarms_of_their_kind_with_advice_that_follows(name):
    staleness, _, values, expected = RECORDED[name]
    lines = alarms(dict(zip(OFF_POLICY, values, strict=True)) | {"staleness/max": staleness})
    assert tuple(line.split(" ")[0] for line in lines) == expected
    for line in lines:
        assert line.endswith(": lower learner.learning_rate" if staleness == 1 else ": lower staleness.max_staleness or learner.learning_rate")
