"""The learning rate of each policy step."""

from __future__ import annotations

import math
from typing import Literal

__all__ = ["SAME", "BatchSizes", "learning_rate_at", "rows_at"]

BatchSizes = tuple[tuple[int, float], ...]
"""(applied steps before it, rows of each of the following steps), in order. The first is at 0."""
SAME: BatchSizes = ((0, 1),)
"""Every step has as many rows."""


def rows_at(applied: int, sizes: BatchSizes) -> float:
    """Rows of the first `applied` steps."""
    ends = [*(first for first, _ in sizes[1:]), math.inf]
    return sum(
        max(0, min(applied, end) - first) * rows
        for (first, rows), end in zip(sizes, ends, strict=True)
    )


def learning_rate_at(
    applied: int,
    peak: float,
    warmup_steps: int,
    max_steps: int,
    kind: Literal["constant", "linear", "cosine"],
    sizes: BatchSizes = SAME,
) -> float:
    """Learning rate of the step after `applied` steps. It rises linearly over `warmup_steps`. Then
    it is constant, or falls to 0 at `max_steps`, evenly over the rows of the steps between."""
    warmup = min(1.0, (applied + 1) / max(1, warmup_steps))
    at, start, end = (rows_at(step, sizes) for step in (applied, warmup_steps, max_steps))
    done = max(0.0, min(1.0, (at - start) / max(1, end - start)))
    decay = {
        "constant": 1.0,
        "linear": 1.0 - done,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
    }[kind]
    return peak * warmup * decay
