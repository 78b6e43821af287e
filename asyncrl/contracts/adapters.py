"""The names of an adapter's (LoRA) matrices, and of the matrices that get none."""

from __future__ import annotations

PREFIX = "base_model.model."
"""PEFT's prefix of the names in an adapter's file, before the layer's name and `.lora_A.weight` or
`.lora_B.weight`."""
NOT_LINEAR = ("embed", "lm_head", "wte", "wpe")
"""Parts of the names of embeddings and output heads."""


def may_be_linear(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter of a checkpoint seems to be a linear layer's weight, by its name and
    shape. Embeddings and output heads get no adapter."""
    return (
        name.endswith(".weight")
        and len(shape) == 2
        and not any(part in name for part in NOT_LINEAR)
    )
