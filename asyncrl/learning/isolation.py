"""The last guard against leaks between packed trajectories: the loaded model itself is asked, before its first step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from asyncrl.learning.batches import MicroBatch, micro_batch, token_example
from asyncrl.learning.supported import WAY_OUT

__all__ = ["check_isolation"]

TOKENS = 12
"""Of each trajectory: more than any short convolution spans."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Rounding, in nats, of rows of other shapes."""


@torch.no_grad()
def check_isolation(forward: Callable[[MicroBatch], tuple[Tensor, ...]], vocabulary: int, device: torch.device | str, dtype: torch.dtype, model: str) -> None:
    """Compare the log-probs of one trajectory alone and packed behind each of two others. Three forwards; under ZeRO-3 all ranks take part.

    It sees what no list of names can: a recurrent state, a shifted token, a position that counts on, an expert that runs full.

    Args:
        forward: a policy, or the engine around it; in eval mode.
        vocabulary: token ids to draw from are below this.
        dtype: that the forward computes in.
        model: its path, for the error.

    Raises:
        ValueError: they differ by more than rounding.
    """
    ids = np.random.default_rng(0).integers(0, vocabulary, (3, TOKENS))
    first, other, probed = (token_example((row[: TOKENS // 2], row[TOKENS // 2 :])) for row in ids)
    logprobs = [forward(micro_batch(rows, range(len(rows)), device))[0] for rows in ([probed], [first, probed], [other, probed])]
    alone, *behind = (found[-probed.loss_tokens :] for found in logprobs)
    leak = max(float((one - two).abs().max()) for one, two in ((behind[0], behind[1]), (alone, behind[0])))
    if not leak <= TOLERANCE[dtype]:
        raise ValueError(f"model.path = {model!r} carries one packed trajectory into the next: log-probs change by {leak:.2g} with what lies before; {WAY_OUT}")
