"""The settings of low-rank adapters."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from asyncrl.config.schema import Section

__all__ = ["LoraConfig"]


class LoraConfig(Section):
    """Train a low-rank adapter (LoRA, arXiv:2106.09685) and keep the model's own weights."""

    r: int = Field(default=16, gt=0)
    """Rank of the adapter's matrices."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale: the adapter's product is multiplied by alpha / r (alpha / sqrt(r) with use_rslora)."""
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """Linear layers that get an adapter: the last parts of their names, such as `q_proj`.
    `all-linear`: every linear layer except the output head."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(r) (arXiv:2312.03732)."""
    use_dora: bool = False
    """Also train the magnitude of each output (DoRA, arXiv:2402.09353). Only in a run on a dataset:
    vLLM refuses such adapters."""
