"""Which tokens of a step move the policy's entropy most: their covariance of log-prob and advantage
(arXiv:2505.22617). Uses numpy, over all N loss tokens of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def covariances(logprobs: np.ndarray, advantages: np.ndarray) -> np.ndarray:
    """Return (log π - mean log π)·(A - mean A) of each token, [N] (section 4.2). Their mean is the
    covariance. A step along the policy gradient lowers the entropy where it is positive."""
    if not len(logprobs):
        return np.zeros(0)
    return np.asarray((logprobs - logprobs.mean()) * (advantages - advantages.mean()))


def largest(values: np.ndarray, share: float) -> np.ndarray:
    """Return [N] bool, True for the share of tokens with the largest covariances, at least one
    (KL-Cov). Of equal values, the first ones are taken."""
    selected = np.zeros(len(values), dtype=bool)
    selected[np.argsort(-values, kind="stable")[: _count(len(values), share)]] = True
    return selected


def drawn_between(
    values: np.ndarray,
    excluded: np.ndarray,
    share: float,
    bounds: tuple[float, float],
    seed: Sequence[int],
) -> np.ndarray:
    """Return [N] bool, True for randomly drawn tokens with a covariance between the bounds
    (Clip-Cov). At most the share of all N tokens is drawn, or one.

    Args:
        excluded: [N] bool, tokens that are not drawn.
        seed: of the draw. Every rank must give the same.
    """
    low, high = bounds
    candidates = np.flatnonzero((values > low) & (values < high) & ~excluded)
    count = min(_count(len(values), share), len(candidates))
    selected = np.zeros(len(values), dtype=bool)
    selected[np.random.default_rng(seed).choice(candidates, count, replace=False)] = True
    return selected


def _count(tokens: int, share: float) -> int:
    return max(1, int(share * tokens)) if tokens else 0
