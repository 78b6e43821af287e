"""Scoring: reward functions in separate processes, fed by a Ray Data stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.runtime.exports import lazy_exports

if TYPE_CHECKING:
    from asyncrl.rewards.contract import (
        GroupCall as GroupCall,
        RewardError as RewardError,
        call_reward as call_reward,
    )
    from asyncrl.rewards.scoring import RayScores as RayScores

__getattr__ = lazy_exports(
    __name__,
    call_reward="contract",
    GroupCall="contract",
    RayScores="scoring",
    RewardError="contract",
)
