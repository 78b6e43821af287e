"""The settings of low-rank adapters."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from asyncrl.contracts.section import Section
from asyncrl.runtime.setting_paths import LocalPath


class LoraConfig(Section):
    """Train a low-rank adapter (LoRA, arXiv:2106.09685) and keep the model's own weights."""

    load: LocalPath | None = None
    """PEFT's folder of an adapter with which training begins, such as `hf/adapter` of another run.
    Its settings apply to those below that are not set. `{runs_root}` in it is replaced."""
    r: int = Field(default=16, gt=0, le=16384)
    """Rank of the adapter's matrices. vLLM serves ranks up to 512."""
    alpha: int | float = Field(default=32, gt=0, allow_inf_nan=False)
    """Scale: the adapter's product is multiplied by alpha / r (alpha / sqrt(r) with use_rslora)."""
    target_modules: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = "all-linear"
    """Linear layers that get an adapter: the last parts of their names, such as `q_proj`.
    `all-linear`: every linear layer except the output head."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(r) (arXiv:2312.03732)."""
    use_dora: bool = False
    """Also train the length of each row of a layer's weight (DoRA, arXiv:2402.09353). Not in runs
    with generators: vLLM takes no such adapters."""

    @property
    def scale(self) -> float:
        """The factor of the adapter's product."""
        return self.alpha / (math.sqrt(self.r) if self.use_rslora else self.r)
