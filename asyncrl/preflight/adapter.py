"""What a plan says of an adapter (LoRA)."""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.config import Config, LoraConfig, RunSettings
from asyncrl.weights.layout import ITEM_BYTES
from asyncrl.weights.published import Outline

__all__ = ["adapter_text", "trained_elements"]

NOT_LINEAR = ("embed", "lm_head", "wte", "wpe")
"""Parts of the names of matrices that are no linear layers, or the output head."""


def trained_elements(lora: LoraConfig, parameters: Mapping[str, tuple[int, ...]]) -> int:
    """Elements of the adapter's matrices: r · (in + out) of each layer. An estimate, because the
    names of the parameters decide which of them are linear layers.

    Args:
        parameters: name → shape.
    """
    layers = {
        name.removesuffix(".weight"): shape
        for name, shape in parameters.items()
        if name.endswith(".weight")
        and len(shape) == 2
        and not any(part in name for part in NOT_LINEAR)
    }
    targets = lora.target_modules
    chosen = [
        shape
        for layer, shape in layers.items()
        if isinstance(targets, str) or layer.rpartition(".")[2] in targets
    ]
    return lora.r * sum(rows + columns for rows, columns in chosen)


def adapter_text(config: RunSettings, version: Outline) -> str:
    """The adapter's size, and what it means for versions. Empty without an adapter."""
    lora = config.lora
    if lora is None:
        return ""
    trained, whole = trained_elements(lora, version.parameters), version.trained
    where = (
        lora.target_modules
        if isinstance(lora.target_modules, str)
        else ", ".join(lora.target_modules)
    )
    text = (
        f"# adapter (LoRA)\n  rank {lora.r}, scale {lora.scale:g}, on {where}: about"
        f" {trained / 1e6:,.2f} M elements are trained, {trained / whole:.1%} of the model's"
        f" {whole / 1e6:,.2f} M; checkpoints contain only these"
    )
    if not isinstance(config, Config):
        return text
    size = trained * ITEM_BYTES[config.model.dtype] / (1 << 20)
    return (
        f"{text}\n  each version is an adapter of {size:,.1f} MiB in vLLM; a completion keeps the"
        " one that it began with, so no update pauses a generator, and generator.in_flight has no"
        f" meaning; at most {config.max_loras} adapters in one batch"
    )
