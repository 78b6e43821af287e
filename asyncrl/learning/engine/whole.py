"""ZeRO-1 and ZeRO-2: every rank has all weights. DeepSpeed shards the optimizer's states over the
ranks, and with ZeRO-2 the gradients too. This has what its public interface lacks for them.

Written against DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer


@dataclass(frozen=True, slots=True)
class WholeParameter:
    """A parameter that every rank has, with the attributes that ZeRO-3 gives to a parameter. Rank 0
    owns all of it, so publishing and exporting need no other rank."""

    parameter: torch.Tensor

    @property
    def ds_tensor(self) -> torch.Tensor:
        """All elements, flat. DeepSpeed replaces the parameter's data: do not keep this."""
        return self.parameter.data.reshape(-1)

    @property
    def ds_numel(self) -> int:
        """Number of elements."""
        return self.parameter.numel()

    @property
    def ds_shape(self) -> torch.Size:
        """Shape of the parameter."""
        return self.parameter.shape

    @property
    def device(self) -> torch.device:
        """Where the parameter is."""
        return self.parameter.device


def keeps_whole(engine: DeepSpeedEngine) -> bool:
    """Whether every rank of this engine has all weights."""
    return int(engine.zero_optimization_stage()) < 3


def gradient_parts(engine: DeepSpeedEngine) -> Iterator[torch.Tensor]:
    """This rank's parts of the gradients of the current step."""
    for parts in engine.optimizer.averaged_gradients.values():
        yield from parts or ()


def parameter_parts(engine: DeepSpeedEngine, rank: int) -> list[torch.Tensor]:
    """The weights that this rank's optimizer changes, and on rank 0 the frozen ones. All ranks
    together have each weight once. Padding is 0."""
    optimizer: DeepSpeedZeroOptimizer = engine.optimizer
    own = [parts[rank] for parts in optimizer.parallel_partitioned_bit16_groups]
    frozen = (part.data for part in engine.module.parameters() if not part.requires_grad)
    return [*own, *(frozen if rank == 0 else ())]


def discard(engine: DeepSpeedEngine) -> None:
    """Drop the gradients of the current step, as the engine does on an overflow."""
    optimizer: DeepSpeedZeroOptimizer = engine.optimizer
    optimizer.micro_step_id = -1
    optimizer.zero_grad(set_to_none=True)
    for kept in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
        kept.update(dict.fromkeys(kept))


def held_tensors(engine: DeepSpeedEngine) -> Iterator[torch.Tensor | None]:
    """The tensors that the engine's optimizer holds between two steps, besides its states."""
    optimizer: DeepSpeedZeroOptimizer = engine.optimizer
    yield from optimizer.bit16_groups_flat
    for masters in optimizer.single_partition_of_fp32_groups:
        yield masters
        yield masters.grad
    for bucket in optimizer.ipg_buckets.values():
        yield from bucket.buffer
    yield from gradient_parts(engine)
