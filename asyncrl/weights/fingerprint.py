"""Fingerprints of tensors: two numbers that show which tensor differs between the published
weights and a replica's weights (F1).

The rows of a matrix are multiplied by a fixed vector of ones and minus ones, in float64. This gives
one product for each row. The fingerprint is the sum of the products, again with such signs, and the
sum of their absolute values. An engine can compute these products even where a kernel has only a
packed form of the matrix. The products of a fused matrix (q, k and v) are those of its parts, one
after the other. A matrix that an engine splits between its workers has the same products: those of
its rows one after the other, part by part, or the sum of those of its columns.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from asyncrl.contracts.messages import Manifest, TensorEntry

Fingerprint = Sequence[float]
"""Sum of the rows' products with signs, and sum of their absolute values."""

ROUNDING = {"float32": 1e-4, "bfloat16": 2e-2}
"""Tolerance for rounding in the engine's kernels, as a share of the absolute sum."""
CHUNK_ELEMENTS = 1 << 22
"""Elements converted to float64 at a time."""


class Block(NamedTuple):
    """Rows of a worker's shard that belong to one part of a fused matrix."""

    rows: int
    copies: int = 1
    """Consecutive workers that hold the same rows."""


class Shard(NamedTuple):
    """The products of what one worker of an engine holds of a tensor."""

    products: bytes
    """Float64, one for each row."""
    split: Literal["none", "rows", "columns"] = "none"
    """How the tensor is split between the workers."""
    blocks: Sequence[Block] = ()
    """The parts of the shard's rows, in order (split: rows)."""


def joined_fingerprints(
    workers: Sequence[Mapping[str, Shard]], tensor_parallel_size: int
) -> dict[str, Fingerprint]:
    """Name → fingerprint of every tensor of an engine, without those that cannot be joined. NaN for
    a tensor of which parts of the engine's layers hold different values.

    Args:
        workers: the shards of each worker (`asyncrl.weights.engine_fingerprints`), in the order of
            their ranks.
        tensor_parallel_size: consecutive workers that share each layer.
    """
    found: dict[str, Fingerprint] = {}
    for start in range(0, len(workers), tensor_parallel_size):
        part = _of_layers(workers[start : start + tensor_parallel_size])
        differing = [name for name in part if found.get(name, part[name]) != part[name]]
        found |= part | dict.fromkeys(differing, (math.nan, math.nan))
    return found


def _of_layers(workers: Sequence[Mapping[str, Shard]]) -> dict[str, Fingerprint]:
    """`joined_fingerprints` of the workers that share the same layers."""
    shards: defaultdict[str, list[Shard]] = defaultdict(list)
    for worker in workers:
        for name, shard in worker.items():
            shards[name].append(Shard(*shard))  # vLLM's transport turns it into a list
    products = {name: _joined(found) for name, found in shards.items()}
    return {name: fingerprint(whole) for name, whole in products.items() if whole is not None}


def _joined(shards: Sequence[Shard]) -> np.ndarray | None:
    """Products [R] of the whole tensor from those of all workers, in the order of their ranks. None
    if the workers hold different values of a tensor that is not known to be split."""
    products = [np.frombuffer(shard.products) for shard in shards]
    first = shards[0]
    if first.split == "rows":
        blocks = [Block(*block) for block in first.blocks]
        ends = np.cumsum([block.rows for block in blocks])[:-1]
        parts = zip(*(np.split(worker, ends) for worker in products), strict=True)
        rows: np.ndarray = np.concatenate(
            [
                own
                for block, of_workers in zip(blocks, parts, strict=True)
                for own in of_workers[:: block.copies]
            ]
        )
        return rows
    if first.split == "columns":
        whole: np.ndarray = np.sum(products, axis=0)
        return whole
    same = all(np.array_equal(other, products[0], equal_nan=True) for other in products)
    return products[0] if same else None


def signs(count: int, start: int = 0) -> np.ndarray:
    """`count` ones and minus ones of a fixed sequence, from its index `start` on."""
    indices = np.arange(start, start + count, dtype=np.int64)
    return 1.0 - 2.0 * ((indices * 2654435761 >> 16) & 1)


def row_products(tensor: np.ndarray, start: int = 0) -> np.ndarray:
    """Products [R] float64 of each row of a tensor [R, …] with `signs`. A vector is unchanged.

    Args:
        start: the column of the whole tensor at which this one begins.
    """
    if tensor.ndim < 2:
        return tensor.reshape(-1).astype(np.float64)
    matrix = tensor.reshape(tensor.shape[0], -1)
    step = max(1, CHUNK_ELEMENTS // max(1, matrix.shape[1]))
    by = signs(matrix.shape[1], start)
    return np.concatenate(
        [
            matrix[start : start + step].astype(np.float64) @ by
            for start in range(0, len(matrix), step)
        ]
    )


def fingerprint(products: np.ndarray) -> Fingerprint:
    """Fingerprint of a tensor from the products [R] of its rows. Zero rows at the end, such as
    padding, do not change it."""
    return float(products @ signs(len(products))), float(np.abs(products).sum())


def published_fingerprints(
    manifest: Manifest, buckets: Sequence[np.ndarray]
) -> dict[str, Fingerprint]:
    """Name → fingerprint of every tensor of a version. `buckets` are the contents [bytes] uint8 of
    `manifest.buckets`."""
    return {
        entry.name: fingerprint(row_products(_tensor(entry, buckets[entry.bucket])))
        for entry in manifest.tensors
    }


def difference_text(
    published: Mapping[str, Fingerprint], held: Mapping[str, Mapping[str, Fingerprint]], dtype: str
) -> str:
    """A clause that names the published tensor that differs most from a replica's tensor.

    Args:
        held: replica → tensor → fingerprint. Tensors without a published tensor of the same name
            are skipped. A tied head is compared with the embedding.
    """
    apart = {}
    for replica, tensors in held.items():
        for name, theirs in tensors.items():
            source = _published_name(name, published)
            if source is not None:
                apart[replica, name] = _apart(published[source], theirs), published[source], theirs
    if not apart:
        return "no tensor could be compared by name"
    different = [key for key, (share, *_) in apart.items() if not share <= ROUNDING[dtype]]
    compared = len({name for _, name in apart})
    if not different:
        return (
            f"all {compared} tensors that could be compared by name are the same on both sides"
            f" ({len(published)} were published)"
        )
    worst = max(different, key=lambda key: np.nan_to_num(apart[key][0], nan=np.inf))
    _, ours, theirs = apart[worst]
    return (
        f"of {compared} tensors compared {len({name for _, name in different})} differ, most of all"
        f" {worst[1]!r} on replica {worst[0]}: published sum {ours[0]:.6g} and absolute sum"
        f" {ours[1]:.6g}, the replica has {theirs[0]:.6g} and {theirs[1]:.6g}"
    )


def _apart(ours: Fingerprint, theirs: Fingerprint) -> float:
    """Largest difference, as a share of the absolute sum."""
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / max(ours[1], 1e-30)


def _published_name(name: str, published: Mapping[str, Fingerprint]) -> str | None:
    if name in published:
        return name
    return (
        next((other for other in published if other.endswith("embed_tokens.weight")), None)
        if name.endswith("lm_head.weight")
        else None
    )


def _tensor(entry: TensorEntry, bucket: np.ndarray) -> np.ndarray:
    stored = bucket.data.cast("B")[entry.offset : entry.offset + entry.nbytes]
    if entry.dtype == "bfloat16":
        # NumPy has no bfloat16, which is the upper half of a float32.
        return (
            (np.frombuffer(stored, dtype=np.uint16).astype(np.uint32) << 16)
            .view(np.float32)
            .reshape(entry.shape)
        )
    return np.frombuffer(stored, dtype=entry.dtype).reshape(entry.shape)
