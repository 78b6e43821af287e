"""Gathers one version's weights from the learner's shards into buckets of bounded size."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open

from asyncrl.contracts.messages import TensorEntry
from asyncrl.weights.layout import ITEM_BYTES, plan_buckets
from asyncrl.weights.pieces import Piece
from asyncrl.weights.published import PublishedTensor, VersionTable

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}

PART_SHARE = 16
"""Rank 0 receives parameters in parts of at most 1/16 of a bucket. Bucket, part and the exchange's
copies of the part then need far less than two buckets, for parameters of any size."""


Change = Callable[[str, int, torch.Tensor], torch.Tensor]
"""(Name of a parameter, index of the first element, flat elements) → flat elements."""


class ShardedParameter(Protocol):
    """The attributes that DeepSpeed's ZeRO-3 adds to a parameter."""

    @property
    def ds_tensor(self) -> torch.Tensor:
        """This rank's shard, flat. All ranks' shards have the same size; the last one is
        padded. A parameter that every rank has whole is one shard."""

    @property
    def ds_numel(self) -> int:
        """Number of elements of the whole parameter."""

    @property
    def ds_shape(self) -> torch.Size:
        """Shape of the whole parameter."""

    @property
    def device(self) -> torch.device:
        """Where the parameter is."""


def weight_layout(
    table: VersionTable, dtype: str, bucket_bytes: int
) -> tuple[tuple[TensorEntry, ...], tuple[int, ...]]:
    """Entries and bucket sizes of a version whose parameters are published as `dtype`."""
    return plan_buckets(
        [(tensor.name, tensor.stored.shape, tensor.dtype(dtype)) for tensor in table.tensors],
        bucket_bytes,
    )


@torch.no_grad()
def gather_buckets(
    parameters: Mapping[str, ShardedParameter],
    table: VersionTable,
    entries: tuple[TensorEntry, ...],
    sizes: tuple[int, ...],
    rank: int,
    sink: Callable[[int, np.ndarray], None],
    change: Change | None = None,
) -> None:
    """Fill one bucket at a time (a collective). On rank 0, pass each to
    `sink(number, content [size] uint8)`. The next bucket overwrites that memory.

    No parameter is gathered whole. Rank 0 receives each tensor in parts from the ranks that own
    them. It converts each part to the published type and writes it into the bucket.
    All ranks process the same parts in the same order. No other collective may run in between.

    Args:
        change: returns what is published instead of some elements of a parameter, on rank 0.
    """
    limit = max(sizes) // PART_SHARE
    if rank == 0:

        def parts_of(tensor: PublishedTensor) -> Iterator[tuple[Piece, torch.Tensor]]:
            for part, values in _parts(parameters, tensor, rank, limit):
                yield part, change(part.parameter, part.start, values) if change else values

        fill_buckets(table, entries, sizes, parts_of, sink)
        return
    tensors = {tensor.name: tensor for tensor in table.tensors}
    for entry in entries:
        deque(_parts(parameters, tensors[entry.name], rank, limit), maxlen=0)


def fill_buckets(
    table: VersionTable,
    entries: tuple[TensorEntry, ...],
    sizes: tuple[int, ...],
    parts_of: Callable[[PublishedTensor], Iterable[tuple[Piece, torch.Tensor]]],
    sink: Callable[[int, np.ndarray], None],
) -> None:
    """Fill one bucket at a time and pass each to `sink`, as `gather_buckets` does.

    Args:
        parts_of: returns the parts of a tensor. Each comes with the flat elements of its parameter
            that it spans, which begin with the part's first element.
    """
    buffer = np.zeros(max(sizes), dtype=np.uint8)
    tensors = {tensor.name: tensor for tensor in table.tensors}
    for number, of_bucket in groupby(entries, key=lambda entry: entry.bucket):
        for entry in of_bucket:
            tensor = tensors[entry.name]
            target = torch.from_numpy(buffer[entry.offset : entry.offset + entry.nbytes]).view(
                TORCH_DTYPES[entry.dtype]
            )
            for part, values in parts_of(tensor):
                view = target.as_strided(
                    part.shape, part.to_strides, target.storage_offset() + part.to
                )
                view.copy_(values.as_strided(part.shape, part.strides, values.storage_offset()))
            if not tensor.pieces:
                _read(tensor, target)
        sink(number, buffer[: sizes[number]])


def _read(tensor: PublishedTensor, target: torch.Tensor) -> None:
    """Read a tensor that is not trained from the checkpoint."""
    target.copy_(_opened(tensor.stored.file).get_tensor(tensor.name).reshape(-1))


@lru_cache(maxsize=16)
def _opened(file: Path) -> safe_open:
    """A weights file, mapped. The cache reads its header once, and every version gets the contents
    that the file had at the first version."""
    return safe_open(file, framework="pt")


def _parts(
    parameters: Mapping[str, ShardedParameter], tensor: PublishedTensor, rank: int, limit: int
) -> Iterator[tuple[Piece, torch.Tensor]]:
    """Yield each part with the parameter's elements that it spans, on rank 0. The other ranks send
    their elements and yield nothing. A part spans at most `limit` bytes, or one element."""
    for piece in tensor.pieces:
        parameter = parameters[piece.parameter]
        for part in piece.parts(limit // parameter.ds_tensor.element_size()):
            values = _spanned(parameter, part, rank)
            if values is not None:
                yield part, values


def _spanned(parameter: ShardedParameter, part: Piece, rank: int) -> torch.Tensor | None:
    """The `part.span` flat elements from `part.start` on, on rank 0; None on the other ranks. Ranks
    that own some of the elements send them."""
    shard = parameter.ds_tensor
    each = shard.numel()  # the same on every rank: the last shard is padded
    first, end = part.start, part.start + part.span
    if rank == 0 and end <= each:
        return shard[first:end]
    whole = (
        torch.empty(part.span, dtype=shard.dtype, device=parameter.device) if rank == 0 else None
    )
    for owner in range(first // each, -(-end // each)):
        low, high = max(first, owner * each), min(end, (owner + 1) * each)
        if owner == rank:
            own = shard[low - owner * each : high - owner * each]
            if whole is None:
                dist.send(own.to(parameter.device), dst=0)  # offloaded shards are in host memory
            else:
                whole[low - first : high - first].copy_(own)
        elif whole is not None:
            dist.recv(whole[low - first : high - first], src=owner)
    return whole
