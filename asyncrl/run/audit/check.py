"""The result of one check, and how checks name examples and compare numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SHOWN = 5
"""Examples that a failed check names."""
TOLERANCE = 1e-5
"""Relative and absolute; rewards are kept in float32."""


@dataclass(frozen=True, slots=True)
class Check:
    """One invariant: whether it holds, and the numbers behind it in one line."""

    name: str
    passed: bool
    summary: str


def listed(found: Sequence[object]) -> str:
    """The first SHOWN items, and how many more there are."""
    return ", ".join(map(str, found[:SHOWN])) + (
        f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    )


def close(recorded: object, value: float) -> bool:
    """Whether a recorded value is a number within TOLERANCE of the recomputed one."""
    return isinstance(recorded, int | float) and math.isclose(
        recorded, value, rel_tol=TOLERANCE, abs_tol=TOLERANCE
    )
