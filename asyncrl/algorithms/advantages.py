"""Advantages of trajectories, from their rewards. Uses numpy and no torch, because scoring workers
import it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Literal, get_args

import numpy as np

from asyncrl.algorithms.own import is_own, own_advantages
from asyncrl.algorithms.pass_at_k import pass_at_k

__all__ = [
    "STD_FLOOR",
    "Advantage",
    "GroupInputs",
    "batch_normalized",
    "group_advantages",
    "moments_over_ranks",
    "over_batch_std",
    "soft_overlong_penalty",
    "standardized",
]

STD_FLOOR = 1e-6
"""Added to a standard deviation, and to MaxRL's mean. It prevents a division by zero, so that equal
rewards give zero advantages."""

Advantage = Literal[
    "grpo",
    "grpo_batch_std",
    "gdpo",
    "dr_grpo",
    "rloo",
    "remax",
    "opo",
    "maxrl",
    "pass_at_k",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "gae",
]


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """What some methods need besides the rewards of a group."""

    lengths: Sequence[int] = ()
    """Loss tokens of each trajectory (opo)."""
    parts: Sequence[tuple[float, Sequence[float | None]]] = ()
    """Of each reward function: its weight, and its rewards of the trajectories (gdpo)."""
    k: int = 1
    """Trajectories that are drawn together (pass_at_k)."""
    pass_threshold: float = 1.0
    """A trajectory passes if its reward is at least this (pass_at_k)."""
    baseline: float | None = None
    """Reward of the greedy completion of the same prompt (remax)."""

    def of(self, usable: Sequence[bool]) -> GroupInputs:
        """Return the inputs of the usable trajectories.

        Raises:
            ValueError: there is not one length, or not one reward of each function, per trajectory.
        """
        for values in (self.lengths or usable, *(part for _, part in self.parts)):
            if len(values) != len(usable):
                raise ValueError(
                    f"{len(values)} lengths or rewards came with {len(usable)} trajectories; give"
                    " one for each"
                )
        return replace(
            self,
            lengths=tuple(compress(self.lengths, usable)),
            parts=tuple((weight, tuple(compress(part, usable))) for weight, part in self.parts),
        )


def group_advantages(
    rewards: Sequence[float | None],
    usable: Sequence[bool],
    method: str,
    inputs: GroupInputs | None = None,
) -> list[float | None]:
    """Return the advantage of each trajectory of one group; None for a trajectory that is not
    usable. The statistics use only the n usable trajectories.

    - grpo: (r - mean) / (std + 1e-6), with the population std (DeepSeekMath, arXiv:2402.03300,
      eq. 3 and section 4.1.2). The sample std of verl and TRL gives sqrt((n - 1) / n) times these
      advantages.
    - dr_grpo: r - mean (arXiv:2503.20783, section 3.2).
    - rloo: r - mean of the others = n / (n - 1) · (r - mean) (arXiv:2402.14740, section 3.2).
    - remax: r - r of the greedy completion of the same prompt, by the same policy
      (arXiv:2310.10505, algorithm 2). The baseline does not depend on what was sampled,
      so a group may have a single trajectory.
    - opo: r - Σ l·r / Σ l, with l the loss tokens of each trajectory (arXiv:2505.23585, the optimal
      baseline where the squared gradient of a trajectory grows with its length).
    - maxrl: (r - mean) / (mean + 1e-6), for rewards of 0 and above (arXiv:2602.02710, section 3).
    - pass_at_k: GRPO's advantages of random subsets of k trajectories, whose reward is 1 if one of
      them passes, averaged over the subsets of each trajectory (arXiv:2508.10751, eq. 14-15).
    - grpo_batch_std: r - mean. `over_batch_std` then divides by the std of all rewards of the step.
    - gdpo: Σ weight · (part - mean) / (std + 1e-6), over the reward functions, each with its own
      mean and std (arXiv:2601.05242, section 3). `batch_normalized` then normalizes over the step's
      trajectories.
    - reinforce_plus_plus: r. reinforce_plus_plus_baseline: r - mean. `batch_normalized` then
      normalizes both over the step.
    - gae: r. The learner computes token advantages from it with its value head (`values.gae`).
    - package.module:function: the result of the user's function. A single trajectory has nothing to
      be compared with, and gets 0.

    Example:
        group_advantages([1.0, 0.0, None], [True, True, False], "dr_grpo") == [0.5, -0.5, None]

    Raises:
        ValueError: the lengths differ, the method is unknown, the reward of a usable trajectory is
            not finite, it is negative under maxrl, opo gets no lengths, or remax no baseline.
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
    values = iter(_advantages(kept, method, (inputs or GroupInputs()).of(usable)).tolist())
    return [next(values) if use else None for use in usable]


def _advantages(rewards: np.ndarray, method: str, inputs: GroupInputs) -> np.ndarray:
    if is_own(method):
        return own_advantages(method, rewards) if len(rewards) > 1 else np.zeros(len(rewards))
    centered: np.ndarray = rewards - rewards.mean()
    match method:
        case "grpo":
            return np.asarray(centered / (rewards.std() + STD_FLOOR))
        case "gdpo":
            return _of_parts(inputs.parts, len(rewards))
        case "opo":
            return rewards - _length_weighted_mean(rewards, inputs.lengths)
        case "remax":
            if inputs.baseline is None or not math.isfinite(inputs.baseline):
                raise ValueError(
                    f"algorithm.advantage: remax got the baseline {inputs.baseline}; give the"
                    " reward of the greedy completion, a finite number"
                )
            return np.asarray(rewards - inputs.baseline)
        case "pass_at_k":
            return _of_subsets(rewards >= inputs.pass_threshold, inputs.k)
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
        case _:  # dr_grpo, grpo_batch_std, reinforce_plus_plus_baseline
            return centered


def _length_weighted_mean(rewards: np.ndarray, lengths: Sequence[int]) -> float:
    if len(lengths) != len(rewards) or not all(length > 0 for length in lengths):
        raise ValueError(
            f"algorithm.advantage: opo got the lengths {list(lengths)} of {len(rewards)} usable"
            " trajectories; give the loss tokens of each, at least 1"
        )
    return float(np.average(rewards, weights=lengths))


def _of_parts(
    parts: Sequence[tuple[float, Sequence[float | None]]], trajectories: int
) -> np.ndarray:
    total = np.zeros(trajectories)
    for weight, rewards in parts:
        if weight:  # a function without weight may leave trajectories unscored
            part = np.array(rewards, dtype=np.float64)
            total += weight * (part - part.mean()) / (part.std() + STD_FLOOR)
    return total


def _of_subsets(passed: np.ndarray, k: int) -> np.ndarray:
    """A subset has the advantage (1 - R) / σ if one of it passes and -R / σ if none does. R is
    pass@k and σ = sqrt(R · (1 - R)). A trajectory that passes is only in subsets of the first kind.
    For another one, the other k - 1 members decide."""
    n, passing = len(passed), int(passed.sum())
    k = min(k, n)
    rate = pass_at_k(n, passing, k)
    # Without this trajectory, n - 1 remain, and the same number of them passes.
    others = pass_at_k(n - 1, passing, k - 1) if k > 1 and passing < n else 0.0
    std = math.sqrt(rate * (1 - rate)) + STD_FLOOR
    return np.where(passed, 1 - rate, others - rate) / std


def over_batch_std(advantages: Sequence[float], rewards: Sequence[float]) -> list[float]:
    """Return A / (std + 1e-6), with the population std of the rewards of all of the step's
    trajectories (Lite PPO, arXiv:2508.08221)."""
    return [advantage / (float(np.std(rewards)) + STD_FLOOR) for advantage in advantages]


def batch_normalized(advantages: Sequence[float], shares: Sequence[float]) -> list[float]:
    """Return (A - mean) / (std + 1e-6) over a whole step, where advantage i counts shares[i] times
    (REINFORCE++, arXiv:2501.03262, section 3: the loss tokens of its trajectory)."""
    values, counts = np.asarray(advantages, dtype=np.float64), np.asarray(shares, dtype=np.float64)
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
