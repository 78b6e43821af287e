"""Advantages and loss of a value head (PPO)."""

from __future__ import annotations

import numpy as np
from torch import Tensor


def gae(
    reward: float,
    values: np.ndarray,
    gamma: float,
    lam: float,
    token_rewards: np.ndarray | None = None,
    after: float = 0.0,
) -> np.ndarray:
    """Return the advantages [T] of one trajectory's tokens by generalized advantage estimation
    (arXiv:1506.02438, eq. 16).

    A_t = δ_t + γ·λ·A_{t+1}, with δ_t = r_t + γ·V_{t+1} - V_t. The last token gets the part of the
    reward that no other token got.

    Args:
        values: [T], V of the state in which each token was chosen.
        token_rewards: [T], the part of the reward that each token gets. Default: 0.
        after: V of the state after the last token. It is 0 at the end of an answer. Where a limit
            cut the answer, it stands for the rewards that would have followed (arXiv:1712.00378,
            section 3.2).
    """
    following = np.append(values[1:], after)
    rewards = np.zeros(len(values)) if token_rewards is None else token_rewards.astype(np.float64)
    rewards[-1:] += reward - rewards.sum()
    deltas = rewards + gamma * following - values
    advantages = np.zeros(len(values))
    running = 0.0
    for index in range(len(values) - 1, -1, -1):
        running = deltas[index] + gamma * lam * running
        advantages[index] = running
    return advantages


def value_loss(values: Tensor, returns: Tensor, weights: Tensor) -> Tensor:
    """Return the sum over tokens [N] of weight · (V - R)² / 2.

    PPO's value clipping would have no effect, because each batch gets one step: the clip is around
    the values before the step, which are V itself."""
    return (weights * (values - returns).square()).sum() / 2
