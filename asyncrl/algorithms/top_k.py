"""The reverse KL divergence from a teacher over some of the vocabulary's tokens. Differentiable."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.kl import LOG_RATIO_LIMIT

LEAST_TAIL = 1e-6
"""Smaller probabilities of the tail count as this in its log-ratio. In float32, 1 minus a sum of
probabilities is only exact to about 1e-7."""


def top_k_reverse_kl(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Return KL(student || teacher) [N], in nats, over M tokens and the tail, which is one event
    that stands for all other tokens. Also return the student's probability [N] of the tail.

    Σ_k π(k)·log(π(k) / π_teacher(k)) + π(tail)·log(π(tail) / π_teacher(tail)), with the gradient of
    the student's log-probs. Merging tokens cannot raise a divergence, so this is a lower bound of
    the divergence over the whole vocabulary. With all tokens but one it is that divergence. Without
    the tail, a student could move its probability there (Tail-Aware Top-k On-Policy Distillation,
    arXiv:2608.14728). The divergence is the on-policy reverse KL of arXiv:2306.13649, section 3.2.
    Log-ratios are clamped to ± 20 nats.

    Args:
        student: [N, M] log-probs of M different tokens, in nats, with gradient.
        teacher: [N, M] log-probs of the same tokens by the teacher, in nats.

    Raises:
        ValueError: the shapes differ.
    """
    if student.shape != teacher.shape:
        raise ValueError(
            f"log-probs of shape {tuple(student.shape)} came with {tuple(teacher.shape)} of the"
            " teacher; give one of each for every token"
        )
    probabilities = student.exp()
    log_ratio = (student - teacher).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    tail = (1 - probabilities.sum(-1)).clamp(min=0)
    teacher_tail = 1 - teacher.exp().sum(-1)
    tail_ratio = tail.clamp(min=LEAST_TAIL) / teacher_tail.clamp(min=LEAST_TAIL)
    divergence = (probabilities * log_ratio).sum(-1) + tail * torch.log(tail_ratio)
    return divergence, tail.detach()
