"""The vLLM side of an update: map a staging file and load its tensors into the running model. Lives in the engine's worker process."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

__all__ = ["StagedInit", "StagedUpdate", "StagedWeights", "map_tensors"]


@dataclass
class StagedInit(WeightTransferInitInfo):
    """Nothing to connect to: every update names its file."""


@dataclass
class StagedUpdate(WeightTransferUpdateInfo):
    """A staging file, already checked, and where each parameter lies in it: (name, shape, dtype, offset in bytes)."""

    path: str
    nbytes: int
    tensors: list[tuple[str, list[int], str, int]] = field(default_factory=list)


class StagedWeights(WeightTransferEngine[StagedInit, StagedUpdate]):
    """Loads a version from one staging file, without a copy between the file and vLLM's own weight loaders."""

    init_info_cls = StagedInit
    update_info_cls = StagedUpdate
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: StagedInit) -> None:
        pass

    def start_weight_update(self) -> None:
        self._received: list[tuple[str, torch.Tensor]] = []
        with torch.device(self.device):
            initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: StagedUpdate) -> None:
        # vLLM keeps references to the tensors of a layer until all of them have come (q, k and v become one), so the
        # mapping has to outlive this call: it ends with its last tensor, in finish_weight_update.
        self._received = map_tensors(update_info)
        model: Any = self.model
        model.load_weights(iter(self._received))

    def finish_weight_update(self) -> None:
        with torch.device(self.device):
            finalize_layerwise_reload(self.model, self.model_config)  # type: ignore[no-untyped-call]
        self._repack_tied_head()
        self._received = []

    def _repack_tied_head(self) -> None:
        """A tied head shares the embedding's weight but computes on CPU from a packed copy, which the reload does not renew."""
        head: Any = getattr(self.model, "lm_head", None)
        if head is not None and getattr(self.model_config.hf_text_config, "tie_word_embeddings", False):
            head.quant_method.process_weights_after_loading(head)

    def shutdown(self) -> None:
        self._received = []


def map_tensors(update: StagedUpdate) -> list[tuple[str, torch.Tensor]]:
    """Map the file copy-on-write (it is never written) and view each parameter in place.

    Raises:
        ValueError: the file is not as long as its layout says.
    """
    size = os.path.getsize(update.path)
    if size != update.nbytes:
        raise ValueError(f"staging file {update.path} has {size} bytes, its layout says {update.nbytes}; publish the version again")
    flat = torch.from_file(update.path, shared=False, size=update.nbytes, dtype=torch.uint8)
    return [(name, _view(flat, shape, getattr(torch, dtype), offset)) for name, shape, dtype, offset in update.tensors]


def _view(flat: torch.Tensor, shape: list[int], dtype: torch.dtype, offset: int) -> torch.Tensor:
    count = 1
    for length in shape:
        count *= length
    return flat[offset : offset + count * dtype.itemsize].view(dtype).view(shape)
