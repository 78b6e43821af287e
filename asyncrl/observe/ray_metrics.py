"""The run's main metrics as gauges of Ray, which each node serves to Prometheus."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ray.util.metrics import Gauge

from asyncrl.contracts.protocols import TableRow
from asyncrl.observe.metric_catalog import meaning_of

EXPORTED = (
    "reward/mean",
    "staleness/mean",
    "staleness/max",
    "train/loss",
    "train/entropy",
    "train/ess",
    "train/kl_k3",
    "train/clip_fraction",
    "train/grad_norm",
    "train/tokens_per_s",
    "time/step_s",
    "time/learner_waited_s",
    "time/generators_waited_s",
    "rollout/generated_tokens_per_s",
    "rollout/completion_tokens",
    "rollout/truncated_ratio",
    "weights/pause_s",
    "control/running",
    "control/ready",
    "control/wasted_tokens",
    "pref/accuracy",
)
"""Metrics, as sinks name them, that have a gauge: `reward/mean` is `ray_asyncrl_reward_mean` in
Prometheus."""
ACCURACY = re.compile(r"eval/(.+)_accuracy")
"""The accuracy of an evaluation set: `ray_asyncrl_eval_accuracy` with the label `set`."""

WRITTEN = {"Σ": "sum ", "‖": "||", "·": "*", "π": "pi", "²": "^2", "≤": "<=", "–": "-", "…": "..."}
"""Letters of the catalog that Ray does not take in a description."""


def gauge_name(metric: str) -> str:
    """The gauge of a metric, without Ray's prefix."""
    return "asyncrl_" + re.sub(r"\W", "_", metric)


class RayMetricsSink:
    """Sets one gauge for each of EXPORTED, and `asyncrl_step`, all with the label `run`."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._gauges: dict[str, Gauge] = {}

    def add(self, step: int, now: float, scalars: Mapping[str, float]) -> None:
        self._set("asyncrl_step", "Steps attempted.", step)
        for name, value in scalars.items():
            if name in EXPORTED:
                self._set(gauge_name(name), meaning_of(name), value)
            elif (found := ACCURACY.fullmatch(name)) is not None:
                meaning = "Held-out accuracy of an evaluation set."
                self._set("asyncrl_eval_accuracy", meaning, value, {"set": found[1]})

    def add_histogram(self, step: int, now: float, name: str, values: Sequence[float]) -> None:
        """Nothing: a gauge is one number."""

    def add_table(self, step: int, now: float, name: str, rows: Sequence[TableRow]) -> None:
        """Nothing, as for a histogram."""

    def close(self, failed: bool = False) -> None:
        """Nothing: the gauges end with this process."""

    def _set(
        self, name: str, meaning: str, value: float, labels: Mapping[str, str] | None = None
    ) -> None:
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, _ascii(meaning), tag_keys=("run", *(labels or {})))
        self._gauges[name].set(value, {"run": self._run, **(labels or {})})


def _ascii(text: str) -> str:
    """The text in the letters that Ray takes."""
    for letter, written in WRITTEN.items():
        text = text.replace(letter, written)
    return text.encode("ascii", "replace").decode()
