"""The optimizers, each with its settings. Importing this needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field

from asyncrl.contracts.section import ByName, Section

if TYPE_CHECKING:
    import torch


class AdamW(Section):
    """AdamW (arXiv:1711.05101)."""

    name: Literal["adamw"] = "adamw"
    moments: ClassVar[int] = 2
    """Tensors of the size of the weights that it keeps."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the moments."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator."""

    def of(self, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        """The optimizer of these parameter groups, with a learning rate of 0. The fused one reads
        the memory once in each step. The plain one reads it once for each operation."""
        import torch

        return torch.optim.AdamW(groups, lr=0.0, betas=self.betas, eps=self.eps, fused=True)


class Sgd(Section):
    """Plain SGD without momentum. It is for comparisons, because it does not amplify rounding
    errors."""

    name: Literal["sgd"] = "sgd"
    moments: ClassVar[int] = 0

    def of(self, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        """See `AdamW.of`."""
        import torch

        return torch.optim.SGD(groups, lr=0.0)


Optimizer: TypeAlias = Annotated[AdamW | Sgd, ByName("adamw")]
