"""Records weights that a vLLM model copies into its parameters without their weight loaders.

While vLLM reloads a model, its parameters are on the meta device. A weight loader keeps its tensors
until the layer is complete. Some models call `parameter.copy_` in `load_weights` instead: GPT-OSS
for its experts and sinks, MiMo-V2, MiniMax-M2, Ling 3. A copy into a meta tensor has no effect and
raises no error, so the layer would keep its old weights. This module records such copies and
repeats them when the layer is materialized.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_layer


@dataclass(frozen=True, slots=True)
class _Copy:
    """A recorded copy into a parameter or into a view of it."""

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
    """Context manager around `model.load_weights` that records direct copies. Call `finish` after
    it. Both calls belong between the start and the end of a layerwise reload.

    A layer is processed as soon as it is complete, so at most one layer's weights are in memory
    twice.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters: dict[int, tuple[torch.nn.Module, str]] = {}
        self._pending: dict[torch.nn.Module, list[_Copy]] = defaultdict(list)
        for layer in model.modules():
            for name, tensor in [*layer._parameters.items(), *layer._buffers.items()]:
                if tensor is not None and tensor.is_meta:
                    self._parameters[_storage(tensor)] = layer, name

    def __torch_dispatch__(
        self,
        function: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if function is torch.ops.aten.copy_.default:
            target, source = args[:2]
            assert isinstance(target, torch.Tensor)
            assert isinstance(source, torch.Tensor)
            if target.is_meta and not source.is_meta:
                self._keep(target, source)
        return function(*args, **(kwargs or {}))

    def _keep(self, target: torch.Tensor, source: torch.Tensor) -> None:
        layer, name = self._parameters.get(_storage(target), (None, ""))
        if layer is None:
            return
        info = get_layerwise_info(layer)
        if not info.can_load() or any(name == loaded for loaded, _ in info.loaded_weights):
            return  # vLLM's loader already counts this tensor
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
        """Process the layers that are still incomplete. Some of their tensors have padding, or no
        weights in the checkpoint."""
        for layer in list(self._pending):
            self._process(layer)

    def _process(self, layer: torch.nn.Module) -> None:
        info, copies = get_layerwise_info(layer), self._pending.pop(layer)
        updated = {copy.parameter for copy in copies} | {name for name, _ in info.loaded_weights}
        materialize_layer(layer, info)
        for old_tensors in info.kernel_tensors or ():
            for name, tensor in old_tensors.items():
                if name not in updated and getattr(layer, name).shape == tensor.shape:
                    getattr(layer, name).data.copy_(tensor)  # no new weights: keep the old ones
        for copy in copies:
            copy.make(layer)
        _layerwise_process(layer, info)


def _storage(tensor: torch.Tensor) -> int:
    """A number that identifies the storage of a tensor and its views, also on the meta device."""
    return int(tensor.untyped_storage()._cdata)
