"""What reading prompts and supervised rows needs of a run."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config import DataConfig, EvalConfig, WarmStartConfig

__all__ = ["DataSpec"]


@dataclass(frozen=True, slots=True)
class DataSpec:
    """The settings of one run that its data needs."""

    data: DataConfig
    eval: EvalConfig
    warm_start: WarmStartConfig
    model_path: str
    """Hugging Face checkpoint directory: its tokenizer and its chat template."""
    max_completion_length: int
    """Tokens."""
    seed: int
    """Of the data's order."""
