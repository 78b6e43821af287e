"""The last guard: the loaded model itself is asked, before its first step, in the mode that
trains."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from asyncrl.models.micro_batches import Example, micro_batch, plain_example, token_example
from asyncrl.models.supported import WAY_OUT, Packing

__all__ = ["check_isolation"]

TOKENS = 12
"""Of each trajectory: more than any short convolution spans."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Rounding, in nats: of one log-prob between rows of one shape, in the mean between rows of other
shapes. There bfloat16 may round single logits by one place otherwise, which is 0.06 for a logit of
8, and more for larger ones."""


@torch.no_grad()
def check_isolation(
    forward: Callable[..., tuple[Tensor, ...]],
    vocabulary: int,
    device: torch.device | str,
    dtype: torch.dtype,
    model: str,
    packing: Packing = "rows",
) -> None:
    """Compare the log-probs of one trajectory alone with those of transformers' own forward, and
    with those behind each of two others in a packed row (unpacked: with those of the trajectory cut
    short). Under ZeRO-3 all ranks take part.

    It sees what no list of names can: a recurrent state, a shifted token, a position that counts
    on, an expert that runs full, logits changed after the head, a soft cap that an attention leaves
    out, a model that looks ahead.

    Args:
        forward: a policy, or the engine around it. It is asked at temperature 1: a lower one
            magnifies rounding.
        vocabulary: token ids to draw from are below this.
        dtype: that the forward computes in.
        model: its path, for the error.

    Raises:
        ValueError: they differ by more than rounding.
    """
    half, ids = TOKENS // 2, np.random.default_rng(0).integers(0, vocabulary, (3, TOKENS))
    first, other, probed = (token_example((row[:half], row[half:])) for row in ids)

    def logprobs(*rows: Example, plain: bool = False) -> Tensor:
        return forward(micro_batch(rows, range(len(rows)), device), 1.0, False, plain)[0]

    alone = logprobs(probed)
    plain = logprobs(probed, plain=True)
    off = float((alone - plain).abs().mean())
    # The two attend by different kernels, whose rounding grows with the logits: a guess at random
    # costs log(vocabulary).
    sharpness = max(1.0, float(plain.abs().mean()) / np.log(vocabulary))
    if not off <= TOLERANCE[dtype] * sharpness:
        raise ValueError(
            f"model.path = {model!r}: the learner's log-probs are {off:.2g} nats from those of the"
            " model as transformers runs it, so it would train another policy than the one that"
            " generates; use another model, and report this one"
        )
    if packing == "none":
        short = plain_example(probed.tokens[:-2], probed.prompt_length, probed.loss_mask[:-2])
        ahead = float((alone[:-2] - logprobs(short)).abs().mean())
        if not ahead <= TOLERANCE[dtype]:
            raise ValueError(
                f"model.path = {model!r} looks ahead: log-probs change by {ahead:.2g} with the"
                " tokens that follow; use a decoder that predicts the next token"
            )
        return
    behind, behind_other = (logprobs(row, probed)[-probed.loss_tokens :] for row in (first, other))
    leak = max(float((behind - behind_other).abs().max()), float((alone - behind).abs().mean()))
    if not leak <= TOLERANCE[dtype]:
        raise ValueError(
            f"model.path = {model!r} carries one packed trajectory into the next: log-probs change"
            f" by {leak:.2g} with what lies before; {WAY_OUT}"
        )
