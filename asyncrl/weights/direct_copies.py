"""Weights that a vLLM model copies into its parameters itself, past their loaders.

While vLLM reloads a model, its parameters are on the meta device: a loader keeps what it is given
until its layer is complete. A model that calls `parameter.copy_` in its `load_weights` (GPT-OSS its
experts and sinks, MiMo-V2, MiniMax-M2, Ling 3) copies into nothing, and nothing says so: its layer
would go on with its old weights. Here such copies are kept as well, and made when the layer is
materialized.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_layer

__all__ = ["DirectCopies"]


@dataclass(frozen=True, slots=True)
class _Copy:
    """One copy into a parameter, or into a view of it."""

    parameter: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    source: torch.Tensor

    def make(self, layer: torch.nn.Module) -> None:
        torch.as_strided(
            getattr(layer, self.parameter).data, self.size, self.stride, self.offset
        ).copy_(self.source)


class DirectCopies(TorchDispatchMode):
    """Use as a context manager around `model.load_weights`, and call `finish` after it, both
    between the initialization and the end of a layerwise reload. A layer is processed as soon as it
    is complete, so that no more than one layer's weights are held twice.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places: dict[int, tuple[torch.nn.Module, str]] = {}
        self._pending: dict[torch.nn.Module, list[_Copy]] = defaultdict(list)
        for layer in model.modules():
            for name, tensor in [*layer._parameters.items(), *layer._buffers.items()]:
                if tensor is not None and tensor.is_meta:
                    self._places[_storage(tensor)] = layer, name

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.copy_.default and args[0].is_meta and not args[1].is_meta:
            self._keep(args[0], args[1])
        return function(*args, **(kwargs or {}))

    def _keep(self, target: torch.Tensor, source: torch.Tensor) -> None:
        layer, name = self._places.get(_storage(target), (None, ""))
        if layer is None:
            return
        info = get_layerwise_info(layer)
        if not info.can_load() or any(name == loaded for loaded, _ in info.loaded_weights):
            return  # a loader of vLLM's counts what it will load
        kept = self._pending[layer]
        kept.append(
            _Copy(
                name,
                tuple(target.size()),
                target.stride(),
                int(target.storage_offset()),
                source.expand_as(target),
            )
        )
        assert info.load_numel_total is not None
        if info.load_numel + sum(copy.source.numel() for copy in kept) >= info.load_numel_total:
            self._process(layer)

    def finish(self) -> None:
        """Process the layers that are not complete: some of their tensors have padding, or no
        weights of their own."""
        for layer in list(self._pending):
            self._process(layer)

    def _process(self, layer: torch.nn.Module) -> None:
        info, copies = get_layerwise_info(layer), self._pending.pop(layer)
        come = {copy.parameter for copy in copies} | {name for name, _ in info.loaded_weights}
        materialize_layer(layer, info)
        for held in info.kernel_tensors or ():
            for name, tensor in held.items():
                if name not in come and getattr(layer, name).shape == tensor.shape:
                    getattr(layer, name).data.copy_(
                        tensor
                    )  # nothing came for it: it keeps what it has
        for copy in copies:
            copy.make(layer)
        _layerwise_process(layer, info)


def _storage(tensor: torch.Tensor) -> int:
    """The same number for a tensor and its views, on the meta device as well."""
    return int(tensor.untyped_storage()._cdata)
