"""Tensors of checkpoints that no model of their family loads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UNUSED = (
    r"rotary_emb\.inv_freq$",
    r"(^|\.)position_ids$",
    r"\.masked_bias$",
    r"\.causal_mask$",
)
"""Buffers of old checkpoints: models compute them anew."""
PREDICTS = re.compile(r".*\blayers\.\d+\.(?=eh_proj\.)")
"""A layer behind the model's own, which predicts several tokens (arXiv:2412.19437). It joins the
hidden state with the next embedding."""


def unused(shapes: Mapping[str, Sequence[int]], model: type[PreTrainedModel]) -> set[str]:
    """The tensors that this class does not load, among these without a parameter: rotary
    frequencies and causal masks of old checkpoints, and layers that predict several tokens."""
    further = {found[0] for name in shapes if (found := PREDICTS.match(name))}
    patterns = [*UNUSED, *(model._keys_to_ignore_on_load_unexpected or ())]

    def is_unused(name: str, shape: Sequence[int]) -> bool:
        mask = name.endswith(".bias") and len(shape) == 4 and tuple(shape[:2]) == (1, 1)
        return mask or name.startswith(tuple(further)) or any(re.search(p, name) for p in patterns)

    return {name for name, shape in shapes.items() if is_unused(name, shape)}
