"""Metrics as the points of a chart."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from asyncrl.charts.drawing import Points


def points(metrics: pa.Table, event: str, name: str, by: str = "") -> Points:
    """(step, value) of a metric in the records of one event, in order. An evaluation has a version
    instead of a step, because training goes on meanwhile. Of a step that an attempt repeated, the
    newest record counts. Values that are missing or not finite are left out.

    Args:
        metrics: `Run.metrics`.
        by: the column in the place of the step; default: as above.
    """
    by = by or ("version" if event == "evaluation" else "step")
    if name not in metrics.column_names:
        return []
    table = metrics.select(dict.fromkeys(("event", by, name)))
    table = table.filter(pc.equal(table["event"], event))
    found = dict(zip(table[by].to_pylist(), table[name].to_pylist(), strict=True))
    return sorted(
        (at, float(value))
        for at, value in found.items()
        if isinstance(value, int | float) and math.isfinite(value) and at is not None
    )


def band(metrics: pa.Table, event: str, low: str, high: str) -> list[tuple[float, float, float]]:
    """(step, low, high) of two metrics of one event."""
    highs = dict(points(metrics, event, high))
    return [(at, value, highs[at]) for at, value in points(metrics, event, low) if at in highs]


def names_of(
    metrics: pa.Table, event: str, prefix: str, *, without: Sequence[str] = ()
) -> list[str]:
    """The metrics of an event whose name begins with `prefix`, in their order, except those that
    end in one of `without`."""
    return [
        name
        for name in metrics.column_names
        if name.startswith(prefix)
        and not name.endswith(tuple(without))
        and points(metrics, event, name)
    ]
