"""One version's weights out of ZeRO-3 into bounded buckets. A collective: every rank calls it with
the same arguments."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open

from asyncrl.contracts.messages import TensorEntry
from asyncrl.weights.layout import ITEM_BYTES, plan_buckets
from asyncrl.weights.pieces import Piece
from asyncrl.weights.published import PublishedTensor, VersionTable

__all__ = ["TORCH_DTYPES", "fill_buckets", "gather_buckets", "weight_layout"]

TORCH_DTYPES = {name: getattr(torch, name) for name in ITEM_BYTES}

PART_SHARE = 16
"""Rank 0 takes parameters in parts of at most a sixteenth of a bucket: a part and the copies that
the exchange makes of it, beside the bucket being filled, stay far below two buckets, however large
a parameter is."""


def weight_layout(
    table: VersionTable, dtype: str, bucket_bytes: int
) -> tuple[tuple[TensorEntry, ...], tuple[int, ...]]:
    """Entries and bucket sizes of a version, its parameters published as `dtype`."""
    return plan_buckets(
        [(tensor.name, tensor.stored.shape, tensor.dtype(dtype)) for tensor in table.tensors],
        bucket_bytes,
    )


@torch.no_grad()
def gather_buckets(
    parameters: Mapping[str, torch.nn.Parameter],
    table: VersionTable,
    entries: tuple[TensorEntry, ...],
    sizes: tuple[int, ...],
    rank: int,
    sink: Callable[[int, np.ndarray], None],
) -> None:
    """Fill one bucket at a time; on rank 0 hand each to `sink(number, bytes [size] uint8)` before
    the next. The bucket's memory is used again.

    No parameter is gathered whole: rank 0 takes the elements of each tensor in parts from the
    shards that hold them, straight to their places in the bucket, whatever type the learner holds
    them in. All ranks go through the same parts in the same order; no other collective may run in
    between.
    """
    limit = max(sizes) // PART_SHARE
    if rank == 0:
        fill_buckets(
            table, entries, sizes, lambda tensor: _parts(parameters, tensor, rank, limit), sink
        )
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
    """Fill one bucket after the other and hand each to `sink`.

    Args:
        parts_of: the parts of a tensor, each with the flat elements of its parameter that it spans,
            from its first on.
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
                place = target.as_strided(
                    part.shape, part.to_strides, target.storage_offset() + part.to
                )
                place.copy_(values.as_strided(part.shape, part.strides, values.storage_offset()))
            if not tensor.pieces:
                _read(tensor, target)
        sink(number, buffer[: sizes[number]])


def _read(tensor: PublishedTensor, target: torch.Tensor) -> None:
    """A tensor that is not trained, from the checkpoint."""
    target.copy_(_opened(tensor.stored.file).get_tensor(tensor.name).reshape(-1))


@lru_cache(maxsize=16)
def _opened(file: Path) -> Any:
    """A mapped file of weights. Its header is read once, and what it held at the first version it
    holds at every later one."""
    return safe_open(file, framework="pt")


def _parts(
    parameters: Mapping[str, torch.nn.Parameter], tensor: PublishedTensor, rank: int, limit: int
) -> Iterator[tuple[Piece, torch.Tensor]]:
    """On rank 0 each part with the parameter's elements that it spans, from its first on; the other
    ranks send theirs and get nothing. A part spans at most `limit` bytes, or an element."""
    for piece in tensor.pieces:
        parameter: Any = parameters[piece.parameter]
        for part in piece.parts(limit // parameter.ds_tensor.element_size()):
            values = _spanned(parameter, part, rank)
            if values is not None:
                yield part, values


def _spanned(parameter: Any, part: Piece, rank: int) -> torch.Tensor | None:
    """On rank 0 the flat elements from `part.start`, `part.span` of them, wherever they lie.
    `parameter` is DeepSpeed's: it has a shard."""
    shard: torch.Tensor = parameter.ds_tensor
    each = shard.numel()  # the same on every rank: the last one's is filled up
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
                dist.send(own.to(parameter.device), dst=0)  # offloaded shards lie in host memory
            else:
                whole[low - first : high - first].copy_(own)
        elif whole is not None:
            dist.recv(whole[low - first : high - first], src=owner)
    return whole
