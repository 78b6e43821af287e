"""What each metric means: the tables of `metrics.yaml`. The docs' metrics reference is generated
from them.

A metric with an alarm takes its healthy range and its advice from `asyncrl.observe.alarms`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from typing import Any

from asyncrl.observe.alarms import RANGES, Range
from asyncrl.runtime.files.yaml_files import parse_yaml


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the reference."""

    names: str
    """One name, or several that belong together, separated by ", ". `<…>` varies."""
    meaning: str
    healthy: str = ""
    advice: str = ""
    """What to do outside the healthy values."""

    def alarm(self) -> Range | None:
        """The range whose violation is an alarm, or None."""
        return next((RANGES[name] for name in self.names.split(", ") if name in RANGES), None)


@dataclass(frozen=True, slots=True)
class MetricTable:
    """Metrics that one kind of event carries."""

    title: str
    event: str
    metrics: tuple[Metric, ...]


@cache
def metric_tables() -> tuple[MetricTable, ...]:
    """The tables of `metrics.yaml`, in its order."""
    source = resources.files("asyncrl.observe").joinpath("metrics.yaml")
    tables: Any = parse_yaml(source.read_text("utf-8"))
    return tuple(
        MetricTable(
            table["title"], table["event"], tuple(Metric(**row) for row in table["metrics"])
        )
        for table in tables
    )


def known_names() -> frozenset[str]:
    """Every name in the catalog, with `<…>` where it varies."""
    return frozenset(
        name
        for table in metric_tables()
        for metric in table.metrics
        for name in metric.names.split(", ")
    )


@lru_cache(maxsize=4096)
def meaning_of(name: str) -> str:
    """What the catalog says of a metric as a sink names it, such as `train/loss`; empty if it does
    not know the name."""
    bare = name.partition("/")[2]
    for known, meaning in _meanings():
        if known.fullmatch(name) or known.fullmatch(bare):
            return meaning
    return ""


@cache
def _meanings() -> list[tuple[re.Pattern[str], str]]:
    """The pattern of each name and its meaning. Names with fewer parts that vary come first."""
    names = [
        (name, metric.meaning)
        for table in metric_tables()
        for metric in table.metrics
        for name in metric.names.split(", ")
    ]
    return [
        (re.compile("[^/]+".join(map(re.escape, re.split(r"<[^>]*>", name)))), meaning)
        for name, meaning in sorted(names, key=lambda known: known[0].count("<"))
    ]
