"""Which groups a page contains with their texts, when not all have room."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

MOST_TOKENS = 300_000
"""Tokens of a page: prompts, completions, and what comes between turns. A completion's takes about
eight bytes."""
EXTREMES = 20
"""Groups with the largest rewards, and with the smallest."""


@dataclass(frozen=True, slots=True)
class Row:
    """What decides about one group."""

    tokens: int
    reward: float | None
    outcome: str | None
    step: int | None
    masked: bool
    """Whether one of its trajectories carries no loss."""


def choose(
    rows: Sequence[Row], notable: Collection[int], most_tokens: int = MOST_TOKENS
) -> list[int]:
    """Indices of the groups to show whole, in their order. First those that were lost or masked,
    those of notable steps, and the best and the worst; then others, evenly over the run.

    Args:
        notable: steps that were skipped or whose gradient spiked.
    """
    lost = [i for i, row in enumerate(rows) if row.outcome not in ("trained", None) or row.masked]
    spiking = [i for i, row in enumerate(rows) if row.step in notable]
    rated = sorted(
        (i for i, row in enumerate(rows) if row.reward is not None),
        key=lambda i: (rows[i].reward, i),
    )
    first = [*rated[:EXTREMES], *rated[-EXTREMES:], *spiking, *lost]
    found: dict[int, None] = {}
    used = 0
    for index in (*first, *_evenly(len(rows))):
        if index not in found and used + rows[index].tokens <= most_tokens:
            found[index] = None
            used += rows[index].tokens
    return sorted(found)


def _evenly(count: int) -> list[int]:
    """All indices: halves, quarters and so on, so that a part of them is spread evenly."""
    order = [0] if count else []
    width = 1
    while width < count:
        width *= 2
    while width > 1:
        order += range(width // 2, count, width)
        width //= 2
    return order
