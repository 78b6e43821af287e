"""What a plan says of an adapter (LoRA)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from asyncrl.config import Config, ConfigError, LoraConfig, OfflineConfig, RunSettings, explain
from asyncrl.config.rules import check_lora
from asyncrl.models.adapter_files import AdapterFilesError, AdapterFolder, open_adapter
from asyncrl.weights.layout import ITEM_BYTES
from asyncrl.weights.outline import Outline, outline

Kind = TypeVar("Kind", Config, OfflineConfig)


def run_outline(config: RunSettings) -> Outline:
    """The outline of what the run publishes, with its adapter."""
    return outline(config.model.path, config.trains_reward_model, config.lora)


def trained_elements(version: Outline) -> int:
    """Elements of the adapter's matrices."""
    return sum(math.prod(shape) for shape in version.adapter.values())


def with_loaded_adapter(config: Kind) -> Kind:
    """The config with the settings of the adapter in `lora.load` where it has none of its own.

    Raises:
        ConfigError: the folder has no adapter, or none that can be trained with these settings.
    """
    lora = config.lora
    if lora is None or lora.load is None:
        return config
    stored = _stored(lora.load).settings
    given = {name: getattr(lora, name) for name in lora.model_fields_set}
    for name, value in stored.items():
        if name != "target_modules" and given.get(name, value) != value:
            raise ConfigError(
                f"lora.{name} = {given[name]}, but the adapter of lora.load = {lora.load!r} has"
                f" {value}; leave it out"
            )
    try:
        found = config.model_copy(update={"lora": LoraConfig.model_validate({**stored, **given})})
        if isinstance(found, Config):
            check_lora(found)
    except ValidationError as error:
        raise ConfigError(f"lora.load = {lora.load!r}: {explain(error)}") from None
    except ValueError as error:
        raise ConfigError(f"lora.load = {lora.load!r}: {error}") from None
    return found


def _stored(load: str) -> AdapterFolder:
    try:
        return open_adapter(Path(load))
    except AdapterFilesError as error:
        raise ConfigError(f"lora.load: {error}") from None


def check_adapter(config: RunSettings, version: Outline) -> None:
    """Raise ConfigError if the model cannot have the adapter, or not the values of `lora.load`."""
    if version.adapter_refusal is not None:
        why = version.adapter_refusal.removeprefix("lora: ")
        raise ConfigError(f"lora: model.path = {config.model.path!r}: {why}")
    if config.lora is None or config.lora.load is None:
        return
    stored = _stored(config.lora.load)
    different = sorted(set(stored.shapes.items()) ^ set(version.adapter.items()))
    if different:
        name = different[0][0]
        shapes = [found.get(name, "none") for found in (stored.shapes, version.adapter)]
        made_for = f" It was made for {stored.base!r}." if stored.base else ""
        raise ConfigError(
            f"lora.load = {config.lora.load!r} has other matrices than lora.target_modules asks for"
            f" on model.path = {config.model.path!r}, first {name!r}: {shapes[0]} there,"
            f" {shapes[1]} here.{made_for} Set model.path to its model, or name its layers in"
            " lora.target_modules"
        )


def loaded_dropout(config: RunSettings) -> str:
    """A note that the dropout of `lora.load` has no effect; empty if it has none."""
    if config.lora is None or config.lora.load is None:
        return ""
    dropout = _stored(config.lora.load).dropout
    return (
        f"the adapter of lora.load was trained with lora_dropout = {dropout:g}; the learner uses no"
        " dropout"
        if dropout
        else ""
    )


def trained_bytes(config: RunSettings, version_bytes: int, of_element: int) -> int:
    """Bytes of the trained elements: the adapter's, or the whole model's.

    Args:
        version_bytes: bytes of the whole model in model.dtype.
        of_element: bytes of one trained element.
    """
    if config.lora is None:
        return version_bytes // ITEM_BYTES[config.model.dtype] * of_element
    return trained_elements(run_outline(config)) * of_element


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
    check_adapter(config, version)
    trained, whole = trained_elements(version), version.trained
    where = (
        lora.target_modules
        if isinstance(lora.target_modules, str)
        else ", ".join(lora.target_modules)
    )
    begins = "" if lora.load is None else f"\n  begins with the adapter of {lora.load}"
    text = (
        f"# adapter (LoRA)\n  rank {lora.r}, scale {lora.scale:g}, on {where}:"
        f" {trained / 1e6:,.2f} M elements are trained, {trained / whole:.1%} of the model's"
        f" {whole / 1e6:,.2f} M; checkpoints contain only these{begins}"
    )
    if not isinstance(config, Config):
        return text
    size = trained * ITEM_BYTES[config.model.dtype] / (1 << 20)
    return (
        f"{text}\n  each version is an adapter of {size:,.1f} MiB in vLLM; a completion keeps the"
        " one that it began with, so no update pauses a generator, and generator.in_flight has no"
        f" meaning; at most {config.max_loras} adapters in one batch"
    )
