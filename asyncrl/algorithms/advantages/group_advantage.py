"""What every advantage has, and the advantages of a group. Uses numpy and no torch, because scoring
workers import it. Importing it needs neither."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from asyncrl.contracts.section import Section

if TYPE_CHECKING:
    import numpy as np

STD_FLOOR = 1e-6
"""Added to a standard deviation, and to MaxRL's mean. It prevents a division by zero, so that equal
rewards give zero advantages."""

DIVIDES_BY_STD = (
    "In a group with equal rewards, dividing by their std makes the KL term's noise as large as a"
    " reward; use dr_grpo, rloo or kl_loss_coef"
)
NEEDS_KL_OF_TOKENS = (
    "It needs one KL value per token, and kl_coef subtracts one sum from the trajectory's reward;"
    " use kl_loss_coef"
)
"""Two values of `no_kl_in_reward`."""


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """What some advantages need besides the rewards of a group."""

    lengths: Sequence[int] = ()
    """Loss tokens of each trajectory (opo)."""
    parts: Sequence[tuple[float, Sequence[float | None]]] = ()
    """Weight of each reward function, and its rewards of the trajectories (gdpo)."""
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


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What some advantages need of a whole step, one item for each row that it trains."""

    tokens: Sequence[int]
    """Loss tokens of the row."""
    rows: Sequence[int]
    """Rows of the row's trajectory."""
    rewards: Sequence[float]
    """The rewards of all usable trajectories of the step."""


class TurnRewards(Section):
    """Rewards of turns, which an environment returns as `turns`. A token of turn k then has the
    advantage A + coef * C. A is that of its session. C compares the credit of its turn with that of
    turn k of the group's other sessions, as A compares rewards (MT-GRPO)."""

    coef: float = Field(gt=0)
    """Weight of C."""
    gamma: float = Field(default=0.0, ge=0, le=1)
    """Discount of the rewards of later turns in the credit of a turn: its reward plus gamma times
    the credit of the next turn. 0 = its own reward, 1 = all rewards up to the end."""


class GroupAdvantage(Section):
    """An advantage that a group's rewards give."""

    compares_siblings: ClassVar[bool] = True
    """Whether an advantage depends on the other trajectories of the group."""
    needs_baseline: ClassVar[bool] = False
    """Whether each group needs the prompt's greedy completion."""
    of_each_token: ClassVar[bool] = False
    """Whether each token has its own advantage, from a value head on the learner."""
    least_reward: ClassVar[float | None] = None
    """The least reward for which it is defined. None = any."""
    learns_from_equal: ClassVar[bool] = False
    """Whether a group with equal rewards may have advantages other than 0."""
    no_kl_in_reward: ClassVar[str] = ""
    """Why a KL term must not lower the reward. "" = it may."""
    no_penalties: ClassVar[str] = ""
    """Why neither a KL term nor an overlong penalty may lower the reward. "" = both may."""

    @property
    def turn_rewards(self) -> TurnRewards | None:
        """How rewards of turns act. None = they are only measured."""
        return None

    def of_group(self, rewards: np.ndarray, inputs: GroupInputs) -> np.ndarray:
        """Return the advantages [n] of a group's n usable trajectories with these rewards, n > 0.

        Raises:
            ValueError: an input is missing, or the rewards are out of range.
        """
        raise NotImplementedError


class StepAdvantage(GroupAdvantage):
    """An advantage that also uses statistics of the whole step."""

    def of_step(self, advantages: Sequence[float], step: StepInputs) -> Sequence[float]:
        """Return the advantages of a step's rows, from those that `of_group` gave."""
        raise NotImplementedError


class ComparesTurns(GroupAdvantage):
    """An advantage that also compares the turns of a group's sessions."""

    turns: TurnRewards | None = None
    """Rewards of turns. None = they are only measured."""

    @property
    def turn_rewards(self) -> TurnRewards | None:
        return self.turns


def group_advantages(
    rewards: Sequence[float | None],
    usable: Sequence[bool],
    advantage: GroupAdvantage,
    inputs: GroupInputs | None = None,
) -> list[float | None]:
    """Return the advantage of each trajectory of one group; None for a trajectory that is not
    usable. The statistics use only the n usable trajectories.

    Example:
        group_advantages([1.0, 0.0, None], [True, True, False], DrGrpo()) == [0.5, -0.5, None]

    Raises:
        ValueError: the lengths differ, the reward of a usable trajectory is not finite, or see
            `of_group`.
    """
    import numpy as np

    if len(rewards) != len(usable):
        raise ValueError(
            f"{len(rewards)} rewards came with {len(usable)} usable flags; give one flag for each"
            " trajectory"
        )
    kept = [
        math.nan if reward is None else reward
        for reward, use in zip(rewards, usable, strict=True)
        if use
    ]
    if not kept:
        return [None] * len(rewards)
    if not all(map(math.isfinite, kept)):
        raise ValueError(
            f"rewards of usable trajectories must be finite numbers, not {kept}; give those"
            " trajectories another status"
        )
    found = advantage.of_group(np.array(kept, np.float64), (inputs or GroupInputs()).of(usable))
    values = iter(found.tolist())
    return [next(values) if use else None for use in usable]
