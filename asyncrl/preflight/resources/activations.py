"""The memory of a pass's activations, from the sizes in a model's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

WIDTH = ("hidden_size", "n_embd", "n_embed", "d_model")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads")
INNER = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_inner")
"""Names of these sizes in config.json, newest first."""
OF_WIDTH, OF_ATTENTION, OF_INNER = 8, 4, 4
"""Tensors of each width that a layer keeps for its backward pass: of the residual stream (its
norms compute in float32), of queries, keys and values, and of the MLP. With them, the estimate for
a Qwen3 of 0.6 B parameters in bfloat16 is 1.06 of what it took on an H200 (docs/evidence.md)."""


class Activations(NamedTuple):
    """Bytes of one pass."""

    kept: int
    """What all layers keep from the forward to the backward pass."""
    layer: int
    """What one layer keeps."""


def activations(
    text: Mapping[str, object], tokens: int, item: int, checkpointing: bool
) -> Activations:
    """The activations of a pass over `tokens` tokens of `item` bytes an element. With
    checkpointing, each layer keeps its input only. Zeros for a model with other names of sizes."""
    layers, width = size_of(text, LAYERS), size_of(text, WIDTH)
    layer = item * tokens * _elements(text, width)
    each = item * tokens * width if checkpointing else layer
    return Activations(layers * each, layer)


def size_of(text: Mapping[str, object], names: tuple[str, ...]) -> int:
    """The first of these settings in the config; 0 if it has none."""
    values = (text.get(name) for name in names)
    return next((int(value) for value in values if isinstance(value, int | float) and value), 0)


def _elements(text: Mapping[str, object], width: int) -> int:
    """Elements that a layer keeps for a token."""
    heads = size_of(text, HEADS)
    head = size_of(text, ("head_dim",)) or (width // heads if heads else 0)
    attention = head * (heads + 2 * (size_of(text, KEY_HEADS) or heads))
    return OF_WIDTH * width + OF_ATTENTION * attention + OF_INNER * _inner(text, width)


def _inner(text: Mapping[str, object], width: int) -> int:
    """Width of the MLP; of a mixture, of all experts that a token has."""
    experts = size_of(text, ("num_experts_per_tok", "moe_topk", "moe_k"))
    if not experts:
        return size_of(text, INNER) or 4 * width
    expert = size_of(text, ("moe_intermediate_size", *INNER))
    return experts * expert + size_of(text, ("shared_expert_intermediate_size",))
