"""The schedules of the learning rate, each with its settings."""

from __future__ import annotations

import math
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from asyncrl.contracts.section import ByName, Section

BatchSizes: TypeAlias = tuple[tuple[int, float], ...]
"""(applied steps before it, rows of each of the following steps), in order. The first is at 0."""
SAME: BatchSizes = ((0, 1),)
"""Every step has as many rows."""


class _Schedule(Section):
    """What every schedule has."""

    warmup_steps: int = Field(default=0, ge=0)
    """Applied steps in which the learning rate rises linearly from 0."""

    def left(self, done: float) -> float:
        """The share of the peak after this share of the steps that follow the warm-up."""
        raise NotImplementedError


class Constant(_Schedule):
    """Constant after the warm-up."""

    name: Literal["constant"] = "constant"

    def left(self, done: float) -> float:
        return 1.0


class Linear(_Schedule):
    """Falls in a line to 0 at the last step."""

    name: Literal["linear"] = "linear"

    def left(self, done: float) -> float:
        return 1.0 - done


class Cosine(_Schedule):
    """Falls as half a cosine to 0 at the last step."""

    name: Literal["cosine"] = "cosine"

    def left(self, done: float) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * done))


Schedule: TypeAlias = Annotated[Constant | Linear | Cosine, ByName("constant")]


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
    schedule: Schedule,
    max_steps: int,
    sizes: BatchSizes = SAME,
) -> float:
    """Learning rate of the step after `applied` steps. It rises linearly over the warm-up. Then it
    follows the schedule up to `max_steps`, evenly over the rows of the steps between."""
    warmup_steps = schedule.warmup_steps
    warmup = min(1.0, (applied + 1) / max(1, warmup_steps))
    at, start, end = (rows_at(step, sizes) for step in (applied, warmup_steps, max_steps))
    done = max(0.0, min(1.0, (at - start) / max(1, end - start)))
    return peak * warmup * schedule.left(done)
