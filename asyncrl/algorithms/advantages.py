"""Advantages of trajectories, from their rewards. Uses numpy and no torch, because scoring workers
import it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import numpy as np

from asyncrl.algorithms.own import is_own, own_advantages

__all__ = [
    "STD_FLOOR",
    "Advantage",
    "batch_normalized",
    "group_advantages",
    "moments_over_ranks",
    "soft_overlong_penalty",
    "standardized",
]

STD_FLOOR = 1e-6
"""Added to a standard deviation, and to MaxRL's mean. It prevents a division by zero, so that equal
rewards give zero advantages."""

Advantage = Literal[
    "grpo", "dr_grpo", "rloo", "maxrl", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"
]


def group_advantages(
    rewards: Sequence[float | None], usable: Sequence[bool], method: str
) -> list[float | None]:
    """Return the advantage of each trajectory of one group; None for a trajectory that is not
    usable. The statistics use only the n usable trajectories.

    - grpo: (r - mean) / (std + 1e-6), with the population std (DeepSeekMath, arXiv:2402.03300,
      eq. 3 and section 4.1.2). The sample std of verl and TRL gives sqrt((n - 1) / n) times these
      advantages.
    - dr_grpo: r - mean (arXiv:2503.20783, section 3.2).
    - rloo: r - mean of the others = n / (n - 1) · (r - mean) (arXiv:2402.14740, section 3.2).
    - maxrl: (r - mean) / (mean + 1e-6), for rewards of 0 and above (arXiv:2602.02710, section 3).
    - reinforce_plus_plus: r. reinforce_plus_plus_baseline: r - mean. `batch_normalized` then
      normalizes both over the step.
    - gae: r. The learner computes token advantages from it with its value head (`values.gae`).
    - package.module:function: the result of the user's function. A single trajectory has nothing to
      be compared with, and gets 0.

    Example:
        group_advantages([1.0, 0.0, None], [True, True, False], "dr_grpo") == [0.5, -0.5, None]

    Raises:
        ValueError: the lengths differ, the method is unknown, the reward of a usable trajectory is
            not finite, or it is negative under maxrl.
    """
    if len(rewards) != len(usable):
        raise ValueError(
            f"{len(rewards)} rewards came with {len(usable)} usable flags; give one flag for each"
            " trajectory"
        )
    if not is_own(method) and method not in get_args(Advantage):
        raise ValueError(
            f"algorithm.advantage = {method!r} is unknown; use one of"
            f" {', '.join(get_args(Advantage))}"
        )
    kept = np.array(
        [
            np.nan if reward is None else reward
            for reward, use in zip(rewards, usable, strict=True)
            if use
        ],
        dtype=np.float64,
    )
    if not kept.size:
        return [None] * len(rewards)
    if not np.isfinite(kept).all():
        raise ValueError(
            f"rewards of usable trajectories must be finite numbers, not {kept.tolist()}; give"
            " those trajectories another status"
        )
    values = iter(_advantages(kept, method).tolist())
    return [next(values) if use else None for use in usable]


def _advantages(rewards: np.ndarray, method: str) -> np.ndarray:
    if is_own(method):
        return own_advantages(method, rewards) if len(rewards) > 1 else np.zeros(len(rewards))
    centered: np.ndarray = rewards - rewards.mean()
    match method:
        case "grpo":
            return np.asarray(centered / (rewards.std() + STD_FLOOR))
        case "rloo":
            return np.asarray(centered * (len(rewards) / max(len(rewards) - 1, 1)))
        case "maxrl":
            if (rewards < 0).any():
                raise ValueError(
                    "algorithm.advantage: maxrl needs rewards of 0 and above, not"
                    f" {rewards.tolist()}; use grpo or rloo"
                )
            return np.asarray(centered / (rewards.mean() + STD_FLOOR))
        case "reinforce_plus_plus" | "gae":
            return rewards
        case _:  # dr_grpo, reinforce_plus_plus_baseline
            return centered


def batch_normalized(advantages: Sequence[float], tokens: Sequence[int]) -> list[float]:
    """Return (A - mean) / (std + 1e-6) over the loss tokens of a whole step. Trajectory i counts
    tokens[i] times (REINFORCE++, arXiv:2501.03262, section 3)."""
    values, counts = np.asarray(advantages, dtype=np.float64), np.asarray(tokens, dtype=np.float64)
    mean = np.average(values, weights=counts)
    std = np.sqrt(np.average((values - mean) ** 2, weights=counts))
    return list(((values - mean) / (std + STD_FLOOR)).tolist())


def moments_over_ranks(
    values: np.ndarray, summed: Callable[[np.ndarray], np.ndarray]
) -> tuple[float, float]:
    """Return the mean and population std of all ranks' values.

    This takes two passes, because E[v²] - E[v]² would lose the std of values far from 0.

    Args:
        values: this rank's values, any number of them.
        summed: sums a float64 array over all ranks. Every rank calls it twice.
    """
    values = np.asarray(values, dtype=np.float64)
    total, count = summed(np.array([values.sum(), len(values)]))
    mean = total / count
    (squares,) = summed(np.array([((values - mean) ** 2).sum()]))
    return float(mean), float(np.sqrt(squares / count))


def standardized(values: np.ndarray, mean: float, std: float) -> np.ndarray:
    """Return (A - mean) / (std + 1e-6), with the mean and std of all token advantages of the step.

    This is PPO's advantage normalization (Andrychowicz et al. 2020, arXiv:2006.05990, choice
    C67)."""
    return np.asarray((values - mean) / (std + STD_FLOOR))


def soft_overlong_penalty(tokens: int, longest: int, buffer: int, penalty: float) -> float:
    """Return the penalty that is added to the reward of a long completion (DAPO's soft overlong
    punishment, arXiv:2503.14476, eq. 13).

    It is 0 up to longest - buffer tokens, then falls linearly to -penalty at longest. buffer = 0
    switches it off."""
    over = tokens - (longest - buffer)
    return -penalty * min(over, buffer) / buffer if buffer and over > 0 else 0.0
