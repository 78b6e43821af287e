"""Advantages of one group's trajectories from their rewards. Numpy only: scoring workers call it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

__all__ = ["STD_FLOOR", "group_advantages"]

STD_FLOOR = 1e-6
"""Added to the group's standard deviation, so that equal rewards give zero advantages and no division by zero."""


def group_advantages(rewards: Sequence[float | None], usable: Sequence[bool], method: Literal["grpo", "dr_grpo"]) -> list[float | None]:
    """Advantage of each trajectory of one group; None where it is not usable. Only usable trajectories enter the statistics.

    grpo: (r - mean) / (std + 1e-6), population std (DeepSeekMath, arXiv:2402.03300, eq. 3 and section 4.1.2).
    dr_grpo: r - mean (arXiv:2503.20783, section 3.2).

    Example:
        group_advantages([1.0, 0.0, None], [True, True, False], "dr_grpo") == [0.5, -0.5, None]

    Raises:
        ValueError: the lengths differ, the method is unknown, or a usable trajectory has no finite reward.
    """
    if len(rewards) != len(usable):
        raise ValueError(f"{len(rewards)} rewards came with {len(usable)} usable flags; give one flag for each trajectory")
    if method not in ("grpo", "dr_grpo"):
        raise ValueError(f"algorithm.advantage = {method!r} is unknown; use grpo or dr_grpo")
    kept = np.array([np.nan if reward is None else reward for reward, use in zip(rewards, usable, strict=True) if use], dtype=np.float64)
    if not kept.size:
        return [None] * len(rewards)
    if not np.isfinite(kept).all():
        raise ValueError(f"rewards of usable trajectories must be finite numbers, not {kept.tolist()}; give those trajectories another status")
    centred = kept - kept.mean()
    if method == "grpo":
        centred = centred / (kept.std() + STD_FLOOR)
    values = iter(centred.tolist())
    return [next(values) if use else None for use in usable]
