"""The last guard against leaks between packed trajectories: the loaded model itself is asked, before its first step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from asyncrl.learning.batches import micro_batch, token_example
from asyncrl.learning.supported import WAY_OUT

__all__ = ["check_isolation"]

TOKENS = 12
"""Of each trajectory: more than any short convolution spans."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Rounding, in nats: of one log-prob between rows of one shape, in the mean between rows of other shapes. There bfloat16 may round single logits by one
place otherwise, which is 0.06 for a logit of 8, and more for larger ones."""


@torch.no_grad()
def check_isolation(forward: Callable[..., tuple[Tensor, ...]], vocabulary: int, device: torch.device | str, dtype: torch.dtype, model: str) -> None:
    """Compare the log-probs of one trajectory alone and packed behind each of two others. Three forwards; under ZeRO-3 all ranks take part.

    It sees what no list of names can: a recurrent state, a shifted token, a position that counts on, an expert that runs full.

    Args:
        forward: a policy, or the engine around it; in eval mode. It is asked at temperature 1: a lower one magnifies rounding.
        vocabulary: token ids to draw from are below this.
        dtype: that the forward computes in.
        model: its path, for the error.

    Raises:
        ValueError: they differ by more than rounding.
    """
    ids = np.random.default_rng(0).integers(0, vocabulary, (3, TOKENS))
    first, other, probed = (token_example((row[: TOKENS // 2], row[TOKENS // 2 :])) for row in ids)
    logprobs = [forward(micro_batch(rows, range(len(rows)), device), 1.0)[0] for rows in ([probed], [first, probed], [other, probed])]
    alone, behind, behind_other = (found[-probed.loss_tokens :] for found in logprobs)
    leak = max(float((behind - behind_other).abs().max()), float((alone - behind).abs().mean()))
    if not leak <= TOLERANCE[dtype]:
        raise ValueError(f"model.path = {model!r} carries one packed trajectory into the next: log-probs change by {leak:.2g} with what lies before; {WAY_OUT}")
