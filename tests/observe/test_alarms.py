"""Alarms, and that docs/metrics.md knows every metric that has one."""

import re
from pathlib import Path

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
