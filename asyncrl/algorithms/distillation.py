"""On-policy distillation: the advantage that a teacher gives to each sampled token. Pure numpy."""

from __future__ import annotations

import numpy as np

from asyncrl.algorithms.kl import LOG_RATIO_LIMIT


def teacher_advantages(behavior: np.ndarray, teacher: np.ndarray, coef: float) -> np.ndarray:
    """Return coef * (log π_teacher - log π_behavior) of each of T tokens, in units of coef per nat.

    E[A · ∇log π] over tokens that π sampled is -coef times the gradient of KL(π || π_teacher) at
    each visited state. The effect of a token on later states is not counted (Agarwal et al. 2023,
    arXiv:2306.13649, section 3.2, on-policy with the reverse KL; see also MiniLLM,
    arXiv:2306.08543, eq. 2). Log-ratios are clamped to ± 20 nats.

    Args:
        behavior: [T] log-probs by the policy that sampled, in nats.
        teacher: [T] log-probs of the same tokens by the teacher, in nats.

    Raises:
        ValueError: the lengths differ, or a log-prob is not finite.
    """
    return -coef * reverse_kl_terms(behavior, teacher)


def reverse_kl_terms(behavior: np.ndarray, teacher: np.ndarray) -> np.ndarray:
    """Return log π_behavior - log π_teacher of each of T tokens, in nats, clamped to ± 20. Their
    mean estimates KL(π_behavior || π_teacher) per token.

    Raises:
        ValueError: the lengths differ, or a log-prob is not finite.
    """
    ours, theirs = np.asarray(behavior, np.float64), np.asarray(teacher, np.float64)
    if ours.shape != theirs.shape:
        raise ValueError(
            f"{ours.size} log-probs came with {theirs.size} of the teacher; give one of each for"
            " every token"
        )
    if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        raise ValueError(
            "a log-prob of the policy or the teacher is not finite; mask that trajectory"
        )
    return np.clip(ours - theirs, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
