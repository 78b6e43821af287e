"""Notes of the plan: settings that are allowed, but probably not meant."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from asyncrl.algorithms.optimizers import AdamW
from asyncrl.config import Config, OfflineConfig, RunSettings
from asyncrl.preflight.machine import starts_ray_here
from asyncrl.preflight.resources.adapter import loaded_dropout, trained_elements
from asyncrl.text.stops import chat_end_token
from asyncrl.text.tokenizer import load_tokenizer
from asyncrl.weights.outline import Outline

SMALL = 10_000_000
"""Trained elements below which high learning rates are usual, as for adapters."""
HIGH_RATE, HIGH_RATE_OF_SMALL, LOW_RATE = 1e-3, 1e-2, 1e-9
"""AdamW moves an element by about the learning rate in a step. Published recipes of post-training
stay below 1e-4 for whole models and 1e-3 for adapters, and above 1e-7."""


def gpus_here() -> int:
    """NVIDIA GPUs of this machine."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def plan_notes(config: Config | OfflineConfig, version: Outline, gpus: int | None) -> list[str]:
    """A sentence for each setting that is probably not meant.

    Args:
        version: the model's tensors.
        gpus: GPUs of this machine. None: the plan is for others.
    """
    lora = config.lora
    trained = version.trained if lora is None else trained_elements(version)
    notes = [
        _no_gpu(config, gpus),
        _learning_rate(config, trained),
        loaded_dropout(config),
        _no_end(config),
    ]
    return [*filter(None, notes)]


def counted(names: Collection[str]) -> str:
    """The number of names, and the first."""
    return f"{len(names)} (first {next(iter(names))})" if names else "none"


def notes_text(notes: list[str]) -> list[str]:
    """The notes as a section of the plan; nothing without notes."""
    return ["\n".join(["# notes", *(f"  {note}" for note in notes)])] if notes else []


def _no_gpu(config: RunSettings, gpus: int | None) -> str:
    on_cuda = ["learner.device: cuda"] if config.learner.device == "cuda" else []
    if isinstance(config, Config) and config.engines.device == "cuda":
        on_cuda.append("generator.device: cuda")
    if gpus != 0 or not on_cuda or not starts_ray_here():
        return ""
    return (
        f"this machine has no GPU for {' and '.join(on_cuda)}; set RAY_ADDRESS to a cluster with"
        " GPUs, or set device: cpu"
    )


def _no_end(config: Config | OfflineConfig) -> str:
    tokenizer = load_tokenizer(config.model.path)
    has_template = getattr(tokenizer, "chat_template", None)
    if not has_template or chat_end_token(tokenizer, config.data.chat_template_kwargs) is not None:
        return ""
    return (
        f"the chat template of model.path = {config.model.path!r} shows no token that ends a turn,"
        " so only EOS, generation_config.json and the settings say where a completion ends"
    )


def _learning_rate(config: RunSettings, trained: int) -> str:
    rate = config.learning_rate
    small = config.lora is not None or trained < SMALL
    most = HIGH_RATE_OF_SMALL if small else HIGH_RATE
    if not isinstance(config.learner.optimizer, AdamW) or not rate or LOW_RATE <= rate <= most:
        return ""
    what = "an adapter" if config.lora is not None else f"a model of {trained:,} elements"
    if rate < LOW_RATE:
        return f"learner.learning_rate = {rate:g} hardly changes a weight; usual is 1e-7 or more"
    return (
        f"learner.learning_rate = {rate:g} moves each weight by about {rate:g} in a step; usual for"
        f" {what} is at most {most:g}"
    )
