"""Sums, means and maxima over the tokens of each trajectory. `values` and `sequence` have shape
[N]: `sequence` is the index of each token's trajectory, below `sequences`. This module imports no
torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def none_of(values: Tensor) -> Tensor:
    """Return a mask [N] that is False everywhere."""
    import torch

    return torch.zeros_like(values, dtype=torch.bool)


def sequence_sum(values: Tensor, sequence: Tensor, sequences: int) -> Tensor:
    """Return the sum over each trajectory's tokens: [N] → [sequences]."""
    return values.new_zeros(sequences).index_add(0, sequence, values)


def sequence_mean(values: Tensor, sequence: Tensor, sequences: int) -> Tensor:
    """Return the mean over each trajectory's loss tokens, 0 without tokens: [N] → [sequences]."""
    counts = sequence_sum(values.new_ones(values.shape), sequence, sequences)
    return sequence_sum(values, sequence, sequences) / counts.clamp(min=1)


def sequence_max(values: Tensor, sequence: Tensor, sequences: int) -> Tensor:
    """Return the maximum over each trajectory's tokens: [N] → [sequences]."""
    return values.new_full((sequences,), -math.inf).scatter_reduce(0, sequence, values, "amax")
