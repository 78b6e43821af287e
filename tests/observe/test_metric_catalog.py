"""The metric catalog against the alarms and the source; tests of each station compare it with what
runs write."""

import re
from pathlib import Path

import pytest

from asyncrl.observe.alarms import RANGES
from asyncrl.observe.metric_catalog import known_names, meaning_of, metric_tables

PACKAGE = Path(__file__).parents[2] / "asyncrl"
SOURCE = "\n".join(
    path.read_text() for path in PACKAGE.rglob("*.py") if path.name != "metric_catalog.py"
)


def test_every_metric_with_an_alarm_is_explained() -> None:
    assert set(RANGES) <= known_names()


def test_each_metric_is_explained_once() -> None:
    names = [
        name
        for table in metric_tables()
        for metric in table.metrics
        for name in metric.names.split(", ")
    ]
    assert sorted(names) == sorted(known_names())


@pytest.mark.parametrize("name", sorted(known_names()))
def test_the_source_has_each_word_of_a_name(name: str) -> None:
    """The source composes some names, so only their words can be found."""
    for word in re.findall("[a-z0-9]{2,}", re.sub(r"<\w+>", "", name)):
        assert re.search(rf"(?<![a-z]){word}(?![a-z])", SOURCE), word


@pytest.mark.parametrize("metric", [one for table in metric_tables() for one in table.metrics])
def test_an_alarm_brings_its_own_range_and_advice(metric) -> None:
    if metric.alarm():
        assert not metric.healthy and not metric.advice


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("train/grad_norm", "L2 norm of the gradient"),
        ("reward/mean", "mean reward; mean of each reward function"),
        ("reward/correct", "mean reward; mean of each reward function"),
        ("reward/std", "population standard deviation"),
        ("reward/correct/unscored_ratio", "share of the trajectories"),
        ("eval/math_accuracy", "mean of the reward `eval.accuracy`"),
        ("train/no_such_metric", ""),
    ],
)
def test_a_sink_finds_the_meaning_of_a_metric(name: str, meaning: str) -> None:
    assert meaning_of(name).startswith(meaning) and bool(meaning_of(name)) == bool(meaning)
