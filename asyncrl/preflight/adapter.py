"""What a plan says of an adapter (LoRA)."""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.config import Config, ConfigError, LoraConfig, RunSettings
from asyncrl.contracts.adapters import may_be_linear
from asyncrl.weights.layout import ITEM_BYTES
from asyncrl.weights.outline import Outline, outline

__all__ = [
    "adapter_text",
    "check_targets",
    "published_bytes",
    "trained_bytes",
    "trained_elements",
]


def trained_elements(lora: LoraConfig, parameters: Mapping[str, tuple[int, ...]]) -> int:
    """Elements of the adapter's matrices: r · (in + out) of each layer, and out with DoRA. An
    estimate, because the names of the parameters decide which of them are linear layers.

    Args:
        parameters: name → shape.
    """
    layers = {
        name.removesuffix(".weight"): shape
        for name, shape in parameters.items()
        if may_be_linear(name, shape)
    }
    targets = lora.target_modules
    chosen = [
        shape
        for layer, shape in layers.items()
        if isinstance(targets, str)
        or any(layer == target or layer.endswith(f".{target}") for target in targets)
    ]
    lengths = sum(rows for rows, _ in chosen) if lora.use_dora else 0
    return lora.r * sum(rows + columns for rows, columns in chosen) + lengths


def check_targets(config: RunSettings, version: Outline) -> None:
    """Raise ConfigError for one of lora.target_modules that is no linear layer of the model."""
    lora = config.lora
    if lora is None:
        return
    targets = [lora.target_modules] if isinstance(lora.target_modules, str) else lora.target_modules
    for target in targets:
        alone = lora if isinstance(lora.target_modules, str) else _only(lora, target)
        if not trained_elements(alone, version.parameters):
            raise ConfigError(
                f"lora.target_modules = {lora.target_modules!r}: {target} names no linear layer of"
                f" model.path = {config.model.path!r}; use all-linear, or the last parts of its"
                " layers' names"
            )


def _only(lora: LoraConfig, target: str) -> LoraConfig:
    return lora.model_copy(update={"target_modules": [target]})


def trained_bytes(config: RunSettings, version_bytes: int, of_element: int) -> int:
    """Bytes of the trained elements: the adapter's, or the whole model's.

    Args:
        version_bytes: bytes of the whole model in model.dtype.
        of_element: bytes of one trained element.
    """
    if config.lora is None:
        return version_bytes // ITEM_BYTES[config.model.dtype] * of_element
    return trained_elements(config.lora, outline(config.model.path).parameters) * of_element


def published_bytes(config: RunSettings, version_bytes: int) -> int:
    """Bytes of one published version: the adapter, or the whole model."""
    if config.lora is None:
        return version_bytes
    return trained_bytes(config, version_bytes, ITEM_BYTES[config.model.dtype])


def adapter_text(config: RunSettings, version: Outline) -> str:
    """The adapter's size, and what it means for versions. Empty without an adapter."""
    lora = config.lora
    if lora is None:
        return ""
    check_targets(config, version)
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
