"""A last check of the loaded model before its first step: its log-probs must be right, and packed
trajectories must not affect one another."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from asyncrl.models.micro_batches import Example, micro_batch, plain_example, token_example
from asyncrl.models.supported import WAY_OUT, Packing

NOT_FINITE = (
    "model.path = {path!r}: its weights contain NaN or Inf, or its logits overflow; use an earlier"
    " checkpoint"
)

TOKENS = 12
"""Tokens of each trajectory: more than any short convolution spans."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Rounding error, in nats: the largest of single log-probs between rows of one shape, and the mean
between rows of different shapes. Between shapes, bfloat16 may round a single logit differently in
its last digit. That is 0.06 for a logit of 8, and more for a larger one."""


@torch.no_grad()
def check_isolation(
    forward: Callable[..., tuple[Tensor, ...]],
    vocabulary: int,
    device: torch.device | str,
    dtype: torch.dtype,
    model: str,
    packing: Packing = "rows",
) -> None:
    """Compare the log-probs of one trajectory in different surroundings.

    Alone, they must equal those of transformers' own forward. In a packed row, they must not change
    with the trajectory before it, nor with one that continues the same prompt. Unpacked, they must
    not change with the tokens that follow.

    This finds errors that a list of model types cannot: a recurrent state, a shifted token, wrong
    positions, or a model that looks ahead. It also finds an expert that runs full, a change of the
    logits after the head, and a soft cap that an attention ignores. With ZeRO-3 all ranks take
    part.

    Args:
        forward: a policy, or the engine around it. It runs at temperature 1, because a lower one
            magnifies rounding.
        vocabulary: the check draws token ids below this number.
        dtype: the type that the forward computes in.
        model: the model's path, for the error.

    Raises:
        ValueError: the log-probs differ by more than rounding.
    """

    def logprobs(*rows: Example, plain: bool = False) -> Tensor:
        """Those of the last row."""
        batch = micro_batch(rows, range(len(rows)), device)
        found: tuple[Tensor, ...] = forward(batch, 1.0, False, plain)[0].split(list(batch.counts))
        return found[batch.order.index(len(rows) - 1)]

    half, ids = TOKENS // 2, np.random.default_rng(0).integers(0, vocabulary, (3, TOKENS))
    first, second, probed = (token_example((row[:half], row[half:])) for row in ids)
    tolerance = TOLERANCE[dtype]
    alone = logprobs(probed)
    _check_arithmetic(alone, logprobs(probed, plain=True), vocabulary, tolerance, model)
    if packing == "none":
        short = plain_example(probed.tokens[:-2], probed.prompt_length, probed.loss_mask[:-2])
        _check_causal(alone[:-2], logprobs(short), tolerance, model)
        return
    prompt = probed.tokens[:half].tolist()
    siblings = [token_example((prompt, row[half:])) for row in ids[:2]]
    for others in ([first, second], siblings):
        beside_first, beside_second = (logprobs(other, probed) for other in others)
        _check_apart(alone, beside_first, beside_second, tolerance, model)


def _check_arithmetic(
    alone: Tensor, plain: Tensor, vocabulary: int, tolerance: float, model: str
) -> None:
    if not plain.isfinite().all():
        raise ValueError(NOT_FINITE.format(path=model))
    error = float((alone - plain).abs().mean())
    # The two use different attention kernels, and their rounding grows with the logits. A random
    # guess costs log(vocabulary).
    sharpness = max(1.0, float(plain.abs().mean()) / np.log(vocabulary))
    if not error <= tolerance * sharpness:
        raise ValueError(
            f"model.path = {model!r}: the learner's log-probs are {error:.2g} nats from those of"
            " the model as transformers runs it, so learner and generators would have different"
            " policies; use another model, and report this one"
        )


def _check_causal(alone: Tensor, shortened: Tensor, tolerance: float, model: str) -> None:
    ahead = float((alone - shortened).abs().mean())
    if not ahead <= tolerance:
        raise ValueError(
            f"model.path = {model!r} looks ahead: log-probs change by {ahead:.2g} with the tokens"
            " that follow; use a decoder that predicts the next token"
        )


def _check_apart(
    alone: Tensor, beside_first: Tensor, beside_second: Tensor, tolerance: float, model: str
) -> None:
    between_rows = float((beside_first - beside_second).abs().max())
    leak = max(between_rows, float((alone - beside_first).abs().mean()))
    if not leak <= tolerance:
        raise ValueError(
            f"model.path = {model!r} carries one packed trajectory into the next: log-probs change"
            f" by {leak:.2g} with the trajectory beside; {WAY_OUT}"
        )
