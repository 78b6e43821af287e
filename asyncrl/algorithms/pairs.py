"""Chooses pairs of completions within a group by their rewards. Pure functions of plain values, so
the learner and the audit make the same choice. This module imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field

from asyncrl.contracts.section import ByName, Section

ROUNDING = 1e-6
"""Relative tolerance of a margin. Rewards are float32, so 0.4 - 0.3 is a little below 0.1."""


class _PairsOfGroup(Section):
    """What both kinds have."""

    min_margin: float = Field(default=1e-6, gt=0)
    """Smallest difference of the rewards of a pair. Default: rewards only have to differ."""
    missing_eos_penalty: float = Field(default=0.0, ge=0)
    """Subtract this from the reward of a completion that was cut off, before pairs are chosen. The
    recorded reward stays as it is."""


class BestWorst(_PairsOfGroup):
    """The completion with the highest reward against the one with the lowest."""

    name: Literal["best_worst"] = "best_worst"
    max_pairs: ClassVar[int] = 1

    def ordered(self, rewards: Mapping[int, float]) -> list[tuple[int, int]]:
        """Return the possible pairs as (chosen, rejected) indices, the best first, by the rewards
        of at least one trajectory. Of equal rewards, the first trajectory counts."""
        return [(max(rewards, key=rewards.__getitem__), min(rewards, key=rewards.__getitem__))]


class Margin(_PairsOfGroup):
    """All pairs, the largest differences first."""

    name: Literal["margin"] = "margin"
    max_pairs: int = Field(default=4, gt=0)
    """Most pairs of a group."""

    def ordered(self, rewards: Mapping[int, float]) -> list[tuple[int, int]]:
        """See `BestWorst.ordered`."""

        def key(pair: tuple[int, int]) -> tuple[float, tuple[int, int]]:
            chosen, rejected = pair
            return rewards[rejected] - rewards[chosen], pair

        return sorted(permutations(rewards, 2), key=key)


Pairs: TypeAlias = Annotated[BestWorst | Margin, ByName("best_worst")]


@dataclass(frozen=True, slots=True)
class Candidates:
    """The trajectories of one group. Each list has one item for each trajectory."""

    rewards: Sequence[float | None]
    usable: Sequence[bool]
    """Whether a trajectory's status is ok."""
    truncated: Sequence[bool]
    """Whether a trajectory's completion was cut off, and so has no EOS or stop."""
    completions: Sequence[Hashable]
    """Equal for completions of the same tokens, which teach nothing as a pair."""


def choose_pairs(group: Candidates, pairs: Pairs) -> list[tuple[int, int]]:
    """Return the pairs of a group as (chosen, rejected) indices of its trajectories, the largest
    differences first, at most `max_pairs`.

    A pair needs rewards that differ by at least `min_margin`, and different completions.
    Trajectories that are not usable, or whose reward is missing, NaN or infinite, are left out.

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
        index: reward - pairs.missing_eos_penalty * truncated
        for index, (reward, usable, truncated) in enumerate(
            zip(group.rewards, group.usable, group.truncated, strict=True)
        )
        if usable and reward is not None and math.isfinite(reward)
    }
    if not rewards:
        return []
    found = [pair for pair in pairs.ordered(rewards) if _differ(group, rewards, *pair, pairs)]
    return found[: pairs.max_pairs]


def _differ(
    group: Candidates, rewards: dict[int, float], chosen: int, rejected: int, pairs: Pairs
) -> bool:
    """Whether two trajectories are a pair in this order."""
    high, low = rewards[chosen], rewards[rejected]
    enough = pairs.min_margin - ROUNDING * max(abs(high), abs(low))
    different = group.completions[chosen] != group.completions[rejected]
    return high > low and high - low >= enough and different


def shuffled_rewards(
    rewards: Sequence[Sequence[float | None]],
    usable: Sequence[Sequence[bool]],
    seed: tuple[int, ...],
) -> list[list[float | None]]:
    """Return the rewards of a step's groups, with those of all usable trajectories permuted."""
    import numpy as np

    indices = [
        (group, index)
        for group, flags in enumerate(usable)
        for index, use in enumerate(flags)
        if use
    ]
    shuffled = [list(group) for group in rewards]
    order = np.random.default_rng(seed).permutation(len(indices))
    for (group, index), source in zip(indices, order, strict=True):
        drawn_group, drawn_index = indices[source]
        shuffled[group][index] = rewards[drawn_group][drawn_index]
    return shuffled
