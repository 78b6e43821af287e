"""Two numbers for each published tensor, made where it was published and where it is held: which
tensor is it, if the two sides differ? (F1)

A matrix is multiplied by a fixed vector of ones and minus ones, in float64: one product for each
row. Its fingerprint is the sum of the products, with such signs again, and the sum of their
absolute values. An engine that holds a matrix only in a kernel's own packed form can be asked for
the same products, and those of matrices that it keeps as one (q, k and v) are a part each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from asyncrl.contracts.messages import Manifest, TensorEntry

__all__ = [
    "Fingerprint",
    "difference_text",
    "fingerprint",
    "published_fingerprints",
    "row_products",
    "signs",
]

Fingerprint = Sequence[float]
"""Sum of the rows' products with signs, sum of their absolute values."""

ROUNDING = {"float32": 1e-4, "bfloat16": 2e-2}
"""What rounding in the engine's kernels may change, as a share of the absolute sum."""
CHUNK_ELEMENTS = 1 << 22
"""Elements that are in float64 at once."""


def signs(count: int) -> np.ndarray:
    """`count` ones and minus ones, the same everywhere, and the same first ones for every count."""
    return 1.0 - 2.0 * ((np.arange(count, dtype=np.int64) * 2654435761 >> 16) & 1)


def row_products(tensor: np.ndarray) -> np.ndarray:
    """[R] float64: each row of a tensor [R, …] times signs; a vector as it is."""
    if tensor.ndim < 2:
        return tensor.reshape(-1).astype(np.float64)
    matrix = tensor.reshape(tensor.shape[0], -1)
    step = max(1, CHUNK_ELEMENTS // max(1, matrix.shape[1]))
    by = signs(matrix.shape[1])
    return np.concatenate(
        [
            matrix[start : start + step].astype(np.float64) @ by
            for start in range(0, len(matrix), step)
        ]
    )


def fingerprint(products: np.ndarray) -> Fingerprint:
    """Of the products [R] of a tensor's rows. Rows of zeros at the end, as padding adds them,
    change nothing."""
    return float(products @ signs(len(products))), float(np.abs(products).sum())


def published_fingerprints(manifest: Manifest, buckets: Sequence[Any]) -> dict[str, Fingerprint]:
    """Name → fingerprint of every tensor of a version; `buckets` are the bytes that
    manifest.buckets refer to."""
    return {
        entry.name: fingerprint(row_products(_tensor(entry, buckets[entry.bucket])))
        for entry in manifest.tensors
    }


def difference_text(
    published: Mapping[str, Fingerprint], held: Mapping[str, Mapping[str, Fingerprint]], dtype: str
) -> str:
    """Which published tensor differs most from what a replica holds, in half a sentence.

    Args:
        held: replica → tensor → fingerprint. Tensors without a published one of the same name are
            passed over; a tied head is its embedding.
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
        f" {worst[1]!r} on replica {worst[0]}: sum {ours[0]:.6g} and absolute sum {ours[1]:.6g} as"
        f" published, {theirs[0]:.6g} and {theirs[1]:.6g} as held"
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


def _tensor(entry: TensorEntry, bucket: Any) -> np.ndarray:
    stored = memoryview(bucket).cast("B")[entry.offset : entry.offset + entry.nbytes]
    if entry.dtype == "bfloat16":
        # The upper half of a float32.
        return (
            (np.frombuffer(stored, dtype=np.uint16).astype(np.uint32) << 16)
            .view(np.float32)
            .reshape(entry.shape)
        )
    return np.frombuffer(stored, dtype=entry.dtype).reshape(entry.shape)
