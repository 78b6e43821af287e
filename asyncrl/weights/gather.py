"""One version's weights out of ZeRO-3 into bounded buckets. A collective: every rank calls it with the same arguments."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby

import numpy as np
import torch
import torch.distributed as dist

from asyncrl.control.protocols import TensorEntry
from asyncrl.weights.layout import ITEM_BYTES, plan_buckets

__all__ = ["TORCH_DTYPES", "gather_buckets", "weight_layout"]

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

PART_SHARE = 16
"""Rank 0 takes parameters in parts of at most a sixteenth of a bucket: a part and the copies that the exchange makes of it, beside the bucket being
filled, stay far below two buckets, however large a parameter is."""


def weight_layout(parameters: Iterable[tuple[str, torch.nn.Parameter]], dtype: str, bucket_bytes: int) -> tuple[tuple[TensorEntry, ...], tuple[int, ...]]:
    """Entries and bucket sizes of these (name, parameter), published as `dtype`. Under ZeRO-3 the shape is `ds_shape`; `shape` is [0]."""
    return plan_buckets([(name, tuple(getattr(p, "ds_shape", p.shape)), dtype) for name, p in parameters], bucket_bytes)


@torch.no_grad()
def gather_buckets(
    parameters: dict[str, torch.nn.Parameter],
    entries: tuple[TensorEntry, ...],
    sizes: tuple[int, ...],
    rank: int,
    sink: Callable[[int, np.ndarray], None],
) -> None:
    """Fill one bucket at a time; on rank 0 hand each to `sink(number, bytes [size] uint8)` before the next. The bucket's memory is used again.

    No parameter is gathered whole: rank 0 takes its shards in parts, straight into the bucket, whatever type the learner holds them in. All ranks
    go through the same parts in the same order; no other collective may run in between.
    """
    buffer = np.zeros(max(sizes) if rank == 0 else 0, dtype=np.uint8)
    for number, of_bucket in groupby(entries, key=lambda entry: entry.bucket):
        for entry in of_bucket:
            parts = _parts(parameters[entry.name], rank, max(sizes) // PART_SHARE)
            if rank == 0:
                target = torch.from_numpy(buffer[entry.offset : entry.offset + entry.nbytes]).view(TORCH_DTYPES[entry.dtype])
                for first, values in parts:
                    target[first : first + len(values)].copy_(values)
            else:
                deque(parts, maxlen=0)
        if rank == 0:
            sink(number, buffer[: sizes[number]])


def _parts(parameter: torch.nn.Parameter, rank: int, limit: int) -> Iterator[tuple[int, torch.Tensor]]:
    """On rank 0 the flat parameter in parts of any order, each with the place of its first element; the other ranks send theirs and get nothing.
    One exchange takes at most `limit` bytes from all ranks, or an element from each."""
    shard, ranks = parameter.ds_tensor, dist.get_world_size()
    each = shard.numel()  # the same on every rank: the last one's is filled up
    step = max(1, limit // (ranks * shard.element_size()))
    for at in range(0, each, step):
        own = shard[at : at + step].to(parameter.device)  # offloaded shards lie in host memory
        received = [own]
        if ranks > 1:
            received = [torch.empty_like(own) for _ in range(ranks)] if rank == 0 else []
            dist.gather(own, received or None, dst=0)
        for owner, values in enumerate(received):
            first = owner * each + at
            yield first, values[: max(0, parameter.ds_numel - first)]


assert set(TORCH_DTYPES) == set(ITEM_BYTES)
