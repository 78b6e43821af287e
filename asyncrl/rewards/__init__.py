"""Scoring: reward functions in separate processes, fed by a Ray Data stream."""

from __future__ import annotations

from asyncrl.runtime.exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    GroupCall="contract",
    RewardError="contract",
    call_reward="contract",
)
