"""One version's weights out of ZeRO-3 into bounded buckets. A collective: every rank calls it with the same arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby

import deepspeed
import numpy as np
import torch

from asyncrl.control.protocols import TensorEntry
from asyncrl.weights.layout import ITEM_BYTES, plan_buckets

__all__ = ["TORCH_DTYPES", "gather_buckets", "weight_layout"]

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

RUN_SHARE = 16
"""Parameters are gathered in runs of at most a sixteenth of a bucket (or one parameter): a run and its all-gather's buffer, beside the bucket
being filled, stay below two buckets."""


def weight_layout(parameters: Iterable[tuple[str, torch.nn.Parameter]], dtype: str, bucket_bytes: int) -> tuple[tuple[TensorEntry, ...], tuple[int, ...]]:
    """Entries and bucket sizes of these (name, parameter), published as `dtype`. Under ZeRO-3 the shape is `ds_shape`; `shape` is [0]."""
    return plan_buckets([(name, tuple(getattr(p, "ds_shape", p.shape)), dtype) for name, p in parameters], bucket_bytes)


def gather_buckets(
    parameters: dict[str, torch.nn.Parameter],
    entries: tuple[TensorEntry, ...],
    sizes: tuple[int, ...],
    rank: int,
    sink: Callable[[int, np.ndarray], None],
) -> None:
    """Fill one bucket at a time; on rank 0 hand each to `sink(number, bytes [size] uint8)` before the next. The bucket's memory is used again.

    All ranks gather the same parameters in the same order; no other collective may run in between.
    """
    buffer = np.zeros(max(sizes) if rank == 0 else 0, dtype=np.uint8)
    for number, of_bucket in groupby(entries, key=lambda entry: entry.bucket):
        for run in _runs(list(of_bucket), max(sizes) // RUN_SHARE):
            _gather_run(parameters, run, rank, buffer)
        if rank == 0:
            sink(number, buffer[: sizes[number]])


def _runs(entries: list[TensorEntry], limit: int) -> Iterator[list[TensorEntry]]:
    run: list[TensorEntry] = []
    for entry in entries:
        if run and sum(item.nbytes for item in run) + entry.nbytes > limit:
            yield run
            run = []
        run.append(entry)
    yield run


@torch.no_grad()
def _gather_run(parameters: dict[str, torch.nn.Parameter], run: list[TensorEntry], rank: int, buffer: np.ndarray) -> None:
    with deepspeed.zero.GatheredParameters([parameters[entry.name] for entry in run]):
        if rank != 0:
            return
        for entry in run:
            target = torch.from_numpy(buffer[entry.offset : entry.offset + entry.nbytes]).view(TORCH_DTYPES[entry.dtype])
            target.view(entry.shape).copy_(parameters[entry.name])


assert set(TORCH_DTYPES) == set(ITEM_BYTES)
