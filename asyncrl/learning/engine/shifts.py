"""A rank's shift on a GPU that it shares with an engine (`placement: colocate`): between its
shifts, the storages of its tensors are on the host.

DeepSpeed's `offload_states` does not serve here. In 0.19.8 it moves master weights and moments of
its own FusedAdam only. It also maps the flat buffer of trained weights onto all parameters in the
order of the module, which overwrites frozen parameters with values of other parameters. Emptying a
storage and filling it again, as FSDP does, leaves every tensor and view as it is.

Written against DeepSpeed 0.19.8. It ran on the CPU, whose storages can be emptied too, and without
an engine on one H200.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from asyncrl.contracts.errors import GpuMemoryError
from asyncrl.learning.engine import whole
from asyncrl.runtime.processes.gpu_memory import CUDA_CONTEXT_BYTES, check_room, gpu_memory

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

    from asyncrl.learning.engine.state import LearnerState

ROOM_S = 300.0
"""Longest wait for the memory of a replica that is starting, and rests once it has started."""
LOOK_EVERY_S = 0.2


class DeviceShifts:
    """Moves one rank's states off its device and back. Between `leave` and `take`, nothing may use
    a tensor of the engine: no step, gather, save, load, export or forward pass."""

    def __init__(
        self,
        engine: DeepSpeedEngine,
        device: str,
        rank_memory: float,
        engine_memory: float,
        room_s: float = ROOM_S,
    ) -> None:
        """
        Args:
            device: type of the device that the states leave.
            rank_memory, engine_memory: gpu_memory_utilization of learner and generator.
            room_s: seconds that the GPU's memory may take to be free.
        """
        self._engine, self._device = engine, device
        self._rank_memory, self._engine_memory = rank_memory, engine_memory
        self._room_s = room_s
        self._left: list[tuple[torch.UntypedStorage, torch.Tensor]] | None = None
        """The emptied storages, and their bytes on the host. None in this rank's shift."""
        self._hosts: dict[int, torch.Tensor] = {}
        """Storage → its memory on the host, which is reused: pinned memory is slow to allocate."""
        self._released: int | None = None
        """Bytes of the GPU that the last `leave` released. None before the first `leave`."""

    def leave(self) -> None:
        """Move the states to the host, and release their memory. Does nothing after `leave`.

        Raises:
            GpuMemoryError: no engine has started yet, and this rank left too little for one.
        """
        if self._left is not None:
            return
        # Neither unreachable tensors nor a cache of activations is what `take` needs back.
        if self._device == "cuda":
            gc.collect()
        _empty_cache(self._device)
        first, before = self._released is None, _free(self._device)
        left = [(storage, self._host(storage)) for storage in self._storages()]
        for storage, host in left:
            host.copy_(_bytes(storage))
        for storage, _ in left:
            storage.resize_(0)
        self._left = left
        self._hosts = {storage._cdata: host for storage, host in left}
        _empty_cache(self._device)
        self._released = _free(self._device) - before
        if first and self._device == "cuda":
            memory = gpu_memory()
            check_room(
                "the generators cannot start: an engine needs",
                int(self._engine_memory * memory[1]) + CUDA_CONTEXT_BYTES,
                memory,
                "what stays of the learner, and other processes, hold",
                f"lower generator.gpu_memory_utilization = {self._engine_memory:g}",
            )

    def take(self) -> None:
        """Move the states back. Does nothing in this rank's shift.

        Raises:
            GpuMemoryError: the bytes that `leave` released are not free in time.
        """
        if self._left is None:
            return
        if self._device == "cuda":
            self._wait_for_room()
        for storage, host in self._left:
            storage.resize_(host.numel())
            _bytes(storage).copy_(host)
        self._left = None

    def _wait_for_room(self) -> None:
        deadline = time.monotonic() + self._room_s
        while True:
            try:
                check_room(
                    "the learner's shift cannot begin: a rank needs back",
                    self._released or 0,
                    gpu_memory(),
                    "the engine, and what stays of the rank, hold",
                    f"lower learner.gpu_memory_utilization = {self._rank_memory:g}, which limits"
                    " what a rank keeps",
                )
            except GpuMemoryError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(LOOK_EVERY_S)
            else:
                return

    def _host(self, storage: torch.UntypedStorage) -> torch.Tensor:
        known = self._hosts.get(storage._cdata)
        if known is not None and known.numel() == storage.nbytes():
            return known
        return torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self._device == "cuda")

    def _storages(self) -> list[torch.UntypedStorage]:
        """Each storage on the device that a tensor of the engine uses, once."""
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in _tensors(self._engine):
            storage = tensor.untyped_storage()
            if storage.device.type == self._device and storage.nbytes():
                found[storage._cdata] = storage
        return list(found.values())


def device_shifts(state: LearnerState) -> DeviceShifts | None:
    """The shifts of a rank whose GPU an engine uses too; None without such an engine."""
    learner, engine_share = state.spec.learner, state.spec.engine_share
    if engine_share is None:
        return None
    # The rank must answer with its error before the driver takes it for dead.
    return DeviceShifts(
        state.engine,
        learner.device,
        state.spec.rank_share,
        engine_share,
        min(ROOM_S, learner.call_timeout_s / 2),
    )


def _tensors(engine: DeepSpeedEngine) -> Iterator[torch.Tensor]:
    """The tensors that an engine holds between two steps."""
    yield from (parameter.data for parameter in engine.module.parameters())
    yield from engine.module.buffers()
    held = whole.held_tensors(engine) if whole.keeps_whole(engine) else _held_by_shards(engine)
    states = engine.optimizer.optimizer.state.values()
    for tensor in (*held, *(value for state in states for value in state.values())):
        if isinstance(tensor, torch.Tensor):
            yield tensor


def _held_by_shards(engine: DeepSpeedEngine) -> Iterator[torch.Tensor | None]:
    """The tensors that ZeRO-3 holds between two steps, besides its optimizer's states."""
    optimizer = engine.optimizer
    for parameter in engine.module.parameters():
        yield parameter.ds_tensor
        yield getattr(parameter, "ds_secondary_tensor", None)  # of zero_hpz_partition_size
    yield from (
        getattr(optimizer, "lp_param_buffer", None),
        getattr(optimizer, "grad_partitions_flat_buffer", None),
        *optimizer.fp16_partitioned_groups_flat,
        *optimizer.fp32_partitioned_groups_flat,
        *(masters.grad for masters in optimizer.fp32_partitioned_groups_flat),
        *(bucket.buffer for bucket in optimizer.ipg_buckets.values()),
        *(shard for shards in optimizer.averaged_gradients.values() for shard in shards or ()),
    )


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _free(device: str) -> int:
    return gpu_memory()[0] if device == "cuda" else 0


def _empty_cache(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
