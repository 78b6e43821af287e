"""The vLLM side of an update: map a staging file and load its tensors into the running model. Lives
in the engine's worker process."""

from __future__ import annotations

import functools
import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

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

__all__ = ["StagedInit", "StagedUpdate", "StagedWeights", "map_tensors"]


@dataclass
class StagedInit(WeightTransferInitInfo):
    """Nothing to connect to: every update names its file."""


@dataclass
class StagedUpdate(WeightTransferUpdateInfo):
    """A staging file, already checked, and where each parameter lies in it: (name, shape, dtype,
    offset in bytes)."""

    path: str
    nbytes: int
    tensors: list[tuple[str, list[int], str, int]] = field(default_factory=list)


class StagedWeights(WeightTransferEngine[StagedInit, StagedUpdate]):
    """Loads a version from one staging file, without a copy between the file and vLLM's own weight
    loaders."""

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
        # vLLM keeps references to the tensors of a layer until all of them have come (q, k and v
        # become one), so the mapping has to outlive this call: it ends with its last tensor, in
        # finish_weight_update.
        self._received = map_tensors(update_info)
        model: Any = self.model
        with torch.device(self.device):
            copies = DirectCopies(model)
            with copies:
                model.load_weights(iter(self._received))
            copies.finish()

    def finish_weight_update(self) -> None:
        with torch.device(self.device):
            finalize_layerwise_reload(self.model, self.model_config)
        for method, kernel in self._mixtures:
            if method.moe_kernel is None:  # none of its weights came
                method.moe_kernel = kernel
        for head in _tied_heads(self.model):
            # It computes on CPU from a packed copy of the embedding's weight, which the reload does
            # not renew.
            head.quant_method.process_weights_after_loading(head)
        self._received = []

    def shutdown(self) -> None:
        self._received = []


def _name_loaders(model: torch.nn.Module) -> None:
    """Name the loaders that are partial functions (MiniMax-M2's): vLLM's reload asks each loader
    for its name, which those do not have."""
    for layer in model.modules():
        kept = get_layerwise_info(layer).restore_metadata
        for tensor in (
            *layer._parameters.values(),
            *layer._buffers.values(),
            *kept[0].values(),
            *kept[1].values(),
        ):
            loader = getattr(tensor, "weight_loader", None)
            if isinstance(loader, functools.partial) and not hasattr(loader, "__name__"):
                loader.__name__ = getattr(loader.func, "__name__", "partial")  # type: ignore[attr-defined]


def _without_kernels(model: torch.nn.Module) -> list[tuple[Any, Any]]:
    """Take the kernels from a model's mixtures of experts; (method, kernel) of each. On CPU vLLM
    packs the experts' weights only while it makes a kernel. A mixture that has one would compute
    with new weights that are not packed."""
    taken: list[tuple[Any, Any]] = []
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            taken.append((method, method.moe_kernel))
            method.moe_kernel = None
    return taken


def _tied_heads(model: torch.nn.Module) -> list[Any]:
    """Output heads whose weight is another module's as well; in a model with vision they lie
    deeper."""
    owners = Counter(
        id(parameter) for module in model.modules() for parameter in module._parameters.values()
    )
    return [
        module
        for module in model.modules()
        if isinstance(module, ParallelLMHead) and owners[id(module.weight)] > 1
    ]


def map_tensors(update: StagedUpdate) -> list[tuple[str, torch.Tensor]]:
    """Map the file copy-on-write (it is never written) and view each parameter in place.

    Raises:
        ValueError: the file is not as long as its layout says.
    """
    size = os.path.getsize(update.path)
    if size != update.nbytes:
        raise ValueError(
            f"staging file {update.path} has {size} bytes, its layout says {update.nbytes}; publish"
            " the version again"
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
