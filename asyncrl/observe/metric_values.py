"""Reads numbers out of metrics records, whose values may also be text, lists or None."""

from __future__ import annotations

from collections.abc import Mapping


def number(metrics: Mapping[str, object], name: str) -> float | None:
    """The value of a metric; None if the record lacks it or its value is not a number."""
    value = metrics.get(name)
    return value if isinstance(value, int | float) else None
