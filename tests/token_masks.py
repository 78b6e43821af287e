"""Masks of attention, token by token, to compare with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asyncrl.models.forest import ROOT


def whole_mask(lengths: Sequence[int], parents: Sequence[int], window: int | None) -> Tensor:
    """Which tokens each token of a packed row attends to: [T, T] bool."""
    before = list[list[int]]()
    ends = list[int]()
    for length, parent in zip(lengths, parents, strict=True):
        for number in range(length):
            last = len(before) - 1 if number else (ROOT if parent == ROOT else ends[parent])
            before.append([*(before[last] if last != ROOT else []), len(before)])
        ends.append(len(before) - 1)
    mask = torch.zeros(len(before), len(before), dtype=torch.bool)
    for token, path in enumerate(before):
        mask[token, path if window is None else path[-window:]] = True
    return mask
