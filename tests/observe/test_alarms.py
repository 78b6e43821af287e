"""Alarms, and that docs/metrics.md knows every metric that has one."""

import re
from pathlib import Path

from asyncrl.observe.alarms import RANGES, alarms

DOCS = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


def test_a_line_for_each_metric_outside_its_range():
    assert alarms({"ess": 0.9, "kl_k3": 0.01, "loss": 1e9, "rollout/truncated_ratio": 0.3, "nonfinite_loss": None}) == []
    lines = alarms({"ess": 0.25, "rollout/truncated_ratio": 0.8})
    assert lines[0].startswith("ess = 0.25 is outside 0.5 to 1: lower staleness.max_staleness") and "max_completion_length" in lines[1]


def test_every_range_is_explained():
    names = set(re.findall(r"`([a-z_0-9/<>]+)`", DOCS))
    assert set(RANGES) <= names
