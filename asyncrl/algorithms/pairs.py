"""Chooses pairs of completions within a group by their rewards. Pure functions of plain values, so
the learner and the audit make the same choice. This module imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

__all__ = ["Candidates", "PairChoice", "PairSpec", "choose_pairs", "shuffled_rewards"]

PairChoice = Literal["best_worst", "margin"]

ROUNDING = 1e-6
"""Relative tolerance of a margin. Rewards are float32, so 0.4 - 0.3 is a little below 0.1."""


@dataclass(frozen=True, slots=True)
class PairSpec:
    """Which pairs a group gives. The settings reference explains each value under
    `algorithm.preference`."""

    choice: PairChoice = "best_worst"
    min_margin: float = 1e-6
    """Smallest difference of the rewards of a pair, above 0."""
    max_pairs: int = 4
    """Most pairs of a group (choice: margin)."""
    missing_eos_penalty: float = 0.0
    """Subtracted from the reward of a completion that was cut off."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The trajectories of one group, one item each."""

    rewards: Sequence[float | None]
    usable: Sequence[bool]
    """Whether its status is ok."""
    truncated: Sequence[bool]
    """Whether its completion was cut off, and so has no EOS or stop."""
    completions: Sequence[Hashable]
    """Equal for completions of the same tokens, which teach nothing as a pair."""


def choose_pairs(group: Candidates, spec: PairSpec) -> list[tuple[int, int]]:
    """Return the pairs of a group as (chosen, rejected) places of its trajectories.

    - best_worst: the completion with the highest reward against the one with the lowest.
    - margin: all pairs, the largest differences first, at most `max_pairs`.

    Of equal rewards, the first trajectory counts. A pair needs rewards that differ by at least
    `min_margin`, and different completions. Trajectories that are not usable, or whose reward is
    missing, NaN or infinite, are left out.

    Raises:
        ValueError: the lists have different lengths.
    """
    lengths = {len(group.rewards), len(group.usable), len(group.truncated), len(group.completions)}
    if len(lengths) > 1:
        raise ValueError(
            f"the lists of a group's trajectories have the lengths {sorted(lengths)}; give one item"
            " for each trajectory"
        )
    rewards = {
        place: reward - spec.missing_eos_penalty * truncated
        for place, (reward, usable, truncated) in enumerate(
            zip(group.rewards, group.usable, group.truncated, strict=True)
        )
        if usable and reward is not None and math.isfinite(reward)
    }
    if not rewards:
        return []
    if spec.choice == "best_worst":
        best, worst = max(rewards, key=rewards.__getitem__), min(rewards, key=rewards.__getitem__)
        return [(best, worst)] if _differ(group, rewards, best, worst, spec) else []
    found = [
        (chosen, rejected)
        for chosen in rewards
        for rejected in rewards
        if _differ(group, rewards, chosen, rejected, spec)
    ]
    found.sort(key=lambda pair: (rewards[pair[1]] - rewards[pair[0]], pair))
    return found[: spec.max_pairs]


def _differ(
    group: Candidates, rewards: dict[int, float], chosen: int, rejected: int, spec: PairSpec
) -> bool:
    """Whether two trajectories are a pair in this order."""
    high, low = rewards[chosen], rewards[rejected]
    enough = spec.min_margin - ROUNDING * max(abs(high), abs(low))
    different = group.completions[chosen] != group.completions[rejected]
    return high > low and high - low >= enough and different


def shuffled_rewards(
    rewards: Sequence[Sequence[float | None]],
    usable: Sequence[Sequence[bool]],
    seed: tuple[int, ...],
) -> list[list[float | None]]:
    """Return the rewards of a step's groups, with those of all usable trajectories permuted."""
    places = [
        (group, index)
        for group, flags in enumerate(usable)
        for index, use in enumerate(flags)
        if use
    ]
    shuffled = [list(group) for group in rewards]
    order = np.random.default_rng(seed).permutation(len(places))
    for (group, index), source in zip(places, order, strict=True):
        drawn_group, drawn_index = places[source]
        shuffled[group][index] = rewards[drawn_group][drawn_index]
    return shuffled
