"""The run's main metrics in Ray's own metrics, and the Grafana dashboard that shows them."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from asyncrl.observe.metric_catalog import meaning_of
from asyncrl.observe.ray_metrics import EXPORTED, RayMetricsSink, _ascii, gauge_name

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana_dashboard.json"


def test_every_gauge_is_known_and_every_panel_has_one() -> None:
    assert [name for name in EXPORTED if not meaning_of(name)] == []
    for name in EXPORTED:
        assert _ascii(meaning_of(name)).count("?") == meaning_of(name).count("?"), name
    gauges = {gauge_name(name) for name in EXPORTED} | {"asyncrl_step", "asyncrl_eval_accuracy"}
    dashboard = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    names = [re.fullmatch(r'ray_(\w+)\{run=~"\$run"\}', expression) for expression in asked]
    assert all(names) and {found[1] for found in names if found} == gauges
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    assert dashboard["templating"]["list"][1]["query"]["query"].startswith(
        "label_values(ray_asyncrl_"
    )


@pytest.mark.slow
def test_prometheus_gets_the_metrics_of_a_run(ray_cluster: Any) -> None:
    sink = RayMetricsSink("mine")
    every = dict.fromkeys(EXPORTED, 0.25)
    sink.add(3, 0.0, every | {"eval/greedy_accuracy": 0.75, "other/metric": 1.0})
    sink.add(4, 0.0, {"reward/mean": 0.5})
    port = ray_cluster.nodes()[0]["MetricsExportPort"]
    end, found = time.monotonic() + 60, {}
    while len(found) < len(EXPORTED) + 2 and time.monotonic() < end:
        time.sleep(0.5)  # Ray exports every few seconds
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        found = {
            line.partition("{")[0]: line
            for line in text.splitlines()
            if line.startswith("ray_asyncrl_") and 'run="mine"' in line
        }
    values = {name: float(line.split()[-1]) for name, line in found.items()}
    assert values == {f"ray_{gauge_name(name)}": 0.25 for name in EXPORTED} | {
        "ray_asyncrl_step": 4,
        "ray_asyncrl_reward_mean": 0.5,
        "ray_asyncrl_eval_accuracy": 0.75,
    }
    assert 'set="greedy"' in found["ray_asyncrl_eval_accuracy"]
