"""Masks the tokens of a step that are older than the staleness bound (`on_stale: mask`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from asyncrl.models.micro_batches import Example, trajectories_of

QUARTERS = (1, 2, 3, 4)
"""Quarters of the step's trajectories by length, and of a trajectory's loss tokens by position."""


def with_fresh_tokens(
    examples: Sequence[Example], weights: Sequence[float], oldest_version: int
) -> tuple[list[Example], list[float]]:
    """Mask the loss tokens of versions before `oldest_version`. Examples that keep none are left
    out.

    Advantages and weights stay those of whole trajectories. A weight by the tokens that are left
    would give each of them more weight, because others were masked.

    Returns:
        The examples that keep a loss token, and their weights.
    """
    kept, of_kept = [], []
    for example, weight in zip(examples, weights, strict=True):
        fresh = example.loss_mask & (example.versions >= oldest_version)
        if fresh.any():
            kept.append(replace(example, loss_mask=fresh))
            of_kept.append(weight)
    return kept, of_kept


def kept_metrics(examples: Sequence[Example], oldest_version: int) -> dict[str, float]:
    """What `with_fresh_tokens` leaves of the step, as shares of loss tokens: in total, by quarter
    of the trajectories from the shortest to the longest, and by quarter of each trajectory from its
    first to its last token. The rows of one session are one trajectory. NaN where there are no
    tokens."""
    of_trajectory: dict[int, list[np.ndarray]] = {}
    for number, example in zip(trajectories_of(examples), examples, strict=True):
        fresh = (example.versions >= oldest_version)[example.loss_mask]
        of_trajectory.setdefault(number, []).append(fresh)
    kept = sorted((np.concatenate(parts) for parts in of_trajectory.values()), key=len)
    kept = [fresh for fresh in kept if len(fresh)]
    if not kept:
        return {}
    by_length = np.array_split(np.arange(len(kept)), len(QUARTERS))
    tokens = np.concatenate(kept)
    quarters = np.concatenate([np.arange(len(one)) * len(QUARTERS) // len(one) for one in kept])
    return {
        "stale/masked_ratio": float(1 - tokens.mean()),
        "stale/empty_ratio": sum(not fresh.any() for fresh in kept) / len(kept),
        **{
            f"stale/kept_by_length_{quarter}": _share([kept[index] for index in indices])
            for quarter, indices in zip(QUARTERS, by_length, strict=True)
        },
        **{
            f"stale/kept_by_position_{quarter}": _share([tokens[quarters == quarter - 1]])
            for quarter in QUARTERS
        },
    }


def _share(parts: Sequence[np.ndarray]) -> float:
    values = np.concatenate(parts) if parts else np.zeros(0)
    return float(values.mean()) if len(values) else float("nan")
