"""The spec for reading prompts and supervised rows."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config import DataConfig, EvalConfig, WarmStartConfig


@dataclass(frozen=True, slots=True)
class DataSpec:
    """The settings of a run that its data needs."""

    data: DataConfig
    eval: EvalConfig
    warm_start: WarmStartConfig | None
    model_path: str
    """Hugging Face checkpoint directory, for its tokenizer and chat template."""
    max_completion_length: int
    """Tokens."""
    seed: int
    """Seed of the data order."""
    sessions: bool = False
    """Whether an environment asks the model, and the prompts' own variables reach no template."""
