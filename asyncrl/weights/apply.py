"""The vLLM side of a weight update: map a staging file and load its tensors into the running model.
Runs in the engine's worker process."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from asyncrl.weights.direct_copies import DirectCopies

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel


class LoadsWeights(Protocol):
    """A vLLM model: it can load a checkpoint's tensors."""

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> object: ...


@dataclass
class StagedInit(WeightTransferInitInfo):
    """Empty: no connection is needed, because every update names its file."""


@dataclass
class StagedUpdate(WeightTransferUpdateInfo):
    """A staging file that has been checked. `tensors` are (name, shape, dtype, offset in bytes)."""

    path: str
    nbytes: int
    tensors: list[tuple[str, list[int], str, int]] = field(default_factory=list)


class StagedWeights(WeightTransferEngine[StagedInit, StagedUpdate]):
    """Loads a version from one staging file. vLLM's weight loaders read the mapped file directly,
    without another copy."""

    init_info_cls = StagedInit
    update_info_cls = StagedUpdate
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: StagedInit) -> None:
        pass

    def start_weight_update(self) -> None:
        self._received: list[tuple[str, torch.Tensor]] = []
        self._mixtures = (
            _without_kernels(self.model) if torch.device(self.device).type == "cpu" else []
        )
        _name_loaders(self.model)
        with torch.device(self.device):
            initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: StagedUpdate) -> None:
        # vLLM keeps references to a layer's tensors until all of them have arrived (q, k and v
        # become one). The mapping must therefore outlive this call. It ends with its last tensor,
        # in `finish_weight_update`.
        self._received = map_tensors(update_info)
        with torch.device(self.device):
            copies = DirectCopies(self.model)
            with copies:
                cast(LoadsWeights, self.model).load_weights(iter(self._received))
            copies.finish()

    def finish_weight_update(self) -> None:
        with torch.device(self.device):
            finalize_layerwise_reload(self.model, self.model_config)
        for method, kernel in self._mixtures:
            if method.moe_kernel is None:  # the update had no weights for this layer
                method.moe_kernel = kernel
        for head in _tied_heads(self.model):
            # On CPU the head computes with a packed copy of the embedding's weight, which the
            # reload does not update.
            head.quant_method.process_weights_after_loading(head)
        self._received = []

    def shutdown(self) -> None:
        self._received = []


def _name_loaders(model: torch.nn.Module) -> None:
    """Give weight loaders that are partial functions (MiniMax-M2) a `__name__`. vLLM's reload reads
    that attribute of each loader."""
    for layer in model.modules():
        parameters, buffers = get_layerwise_info(layer).restore_metadata
        for tensor in (
            *layer._parameters.values(),
            *layer._buffers.values(),
            *parameters.values(),
            *buffers.values(),
        ):
            loader = getattr(tensor, "weight_loader", None)
            if isinstance(loader, functools.partial) and not hasattr(loader, "__name__"):
                loader.__name__ = getattr(loader.func, "__name__", "partial")  # type: ignore[attr-defined]


def _without_kernels(model: torch.nn.Module) -> list[tuple[FusedMoEMethodBase, FusedMoEKernel]]:
    """Remove the kernels of a model's mixture-of-experts layers. Returns (method, kernel) of each.

    On CPU, vLLM packs the experts' weights only when it creates a kernel. A layer that kept its
    kernel would compute with new weights that are not packed.
    """
    taken: list[tuple[FusedMoEMethodBase, FusedMoEKernel]] = []
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        kernel: FusedMoEKernel | None = getattr(method, "moe_kernel", None)
        if method is not None and kernel is not None:
            taken.append((method, kernel))
            method.moe_kernel = None
    return taken


def _tied_heads(model: torch.nn.Module) -> list[ParallelLMHead]:
    """Output heads that share their weight with another module. All modules are searched, because
    the head of a vision model is nested deeper."""
    owners = Counter(
        id(parameter) for module in model.modules() for parameter in module._parameters.values()
    )
    return [
        module
        for module in model.modules()
        if isinstance(module, ParallelLMHead) and owners[id(module.weight)] > 1
    ]


def map_tensors(update: StagedUpdate) -> list[tuple[str, torch.Tensor]]:
    """Map the file copy-on-write (nothing writes to it) and view each parameter in it.

    Raises:
        ValueError: the file's size differs from its layout.
    """
    size = os.path.getsize(update.path)
    if size != update.nbytes:
        raise ValueError(
            f"staging file {update.path} has {size} bytes, but its layout needs {update.nbytes};"
            " publish the version again"
        )
    flat = torch.from_file(update.path, shared=False, size=update.nbytes, dtype=torch.uint8)
    return [
        (name, _view(flat, shape, getattr(torch, dtype), offset))
        for name, shape, dtype, offset in update.tensors
    ]


def _view(flat: torch.Tensor, shape: list[int], dtype: torch.dtype, offset: int) -> torch.Tensor:
    count = 1
    for length in shape:
        count *= length
    return flat[offset : offset + count * dtype.itemsize].view(dtype).view(shape)
