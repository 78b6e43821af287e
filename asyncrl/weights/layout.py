"""Layout of one version's parameters in buckets. Pure arithmetic, shared by the learner that fills
the buckets and the replica that maps them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import xxhash

from asyncrl.contracts.messages import TensorEntry

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one element."""

ALIGNMENT = 64
"""Every parameter starts at a multiple of this many bytes in its bucket, so it can be
viewed as any dtype without a copy."""


def bucket_checksum(content: memoryview) -> int:
    """The XXH3 hash of a bucket's bytes, 64 bits. It takes two thirds of the time of a copy of the
    bytes. zlib.crc32 takes almost three times that of a copy."""
    return xxhash.xxh3_64_intdigest(content)


def plan_buckets(
    shapes: Sequence[tuple[str, tuple[int, ...], str]], bucket_bytes: int
) -> tuple[tuple[TensorEntry, ...], tuple[int, ...]]:
    """Lay out parameters `(name, shape, dtype)` in the given order. Returns their entries and the
    bytes of each bucket.

    A parameter is in one bucket as a whole. A bucket has at most `bucket_bytes`, or the size of the
    largest parameter if that is larger.

    Raises:
        ValueError: a name occurs twice, a dtype is unknown, or the list is empty.
    """
    if not shapes:
        raise ValueError("a version needs at least one parameter")
    entries: list[TensorEntry] = []
    sizes: list[int] = [0]
    limit = max(bucket_bytes, *(_nbytes(name, shape, dtype) for name, shape, dtype in shapes))
    for name, shape, dtype in shapes:
        nbytes = _nbytes(name, shape, dtype)
        offset = -(-sizes[-1] // ALIGNMENT) * ALIGNMENT
        if offset + nbytes > limit:
            sizes.append(0)
            offset = 0
        entries.append(TensorEntry(name, tuple(shape), dtype, len(sizes) - 1, offset, nbytes))
        sizes[-1] = offset + nbytes
    names = [entry.name for entry in entries]
    if len(set(names)) != len(names):
        raise ValueError(
            f"parameter {next(n for n in names if names.count(n) > 1)!r} is listed twice; publish"
            " each once"
        )
    return tuple(entries), tuple(sizes)


def _nbytes(name: str, shape: tuple[int, ...], dtype: str) -> int:
    if dtype not in ITEM_BYTES:
        raise ValueError(
            f"parameter {name!r} has dtype {dtype!r}; publish it as one of {sorted(ITEM_BYTES)}"
        )
    return math.prod(shape) * ITEM_BYTES[dtype]
