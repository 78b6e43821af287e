"""Estimates pass@k, the probability that at least one of k samples passes, from n samples."""

from __future__ import annotations

import math


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Return an unbiased estimate of pass@k: 1 - C(n - passed, k) / C(n, k).

    Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1. It is computed
    in integers up to the last division, which avoids cancellation.

    Args:
        n: samples of the prompt.
        passed: how many of them pass.

    Raises:
        ValueError: k is not between 1 and n, or `passed` is not between 0 and n.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@k of {n} samples needs k from 1 to {n}, not {k}")
    if not 0 <= passed <= n:
        raise ValueError(f"{passed} of {n} samples cannot have passed")
    drawn = math.comb(n, k)
    return (drawn - math.comb(n - passed, k)) / drawn
