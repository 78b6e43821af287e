"""Checks a manifest against the model that it is meant for. Pure functions: they fetch and apply
nothing."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from asyncrl.contracts.adapters import PREFIX
from asyncrl.contracts.messages import Manifest, TensorEntry
from asyncrl.weights.layout import ITEM_BYTES
from asyncrl.weights.stored import stored_tensors

ADAPTER_SIDES = "A.weight", "B.weight"
"""Ends of the names of an adapter's tensors: prefix, layer, `.lora_`, side."""


class ManifestError(ValueError):
    """The version does not fit the model and was not applied."""


class Expected(NamedTuple):
    """The shape and the allowed dtypes of a tensor in a manifest."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]


def expected_tensors(model_path: str | Path, dtype: str) -> dict[str, Expected]:
    """Name → shape and dtypes of every tensor in a version of this checkpoint. The names are those
    in its files. Parameters have `dtype`; a tensor that is not trained may keep the file's type.

    Raises:
        CheckpointFilesError: the files cannot be read.
    """
    return {
        name: Expected(stored.shape, (dtype, stored.dtype))
        for name, stored in stored_tensors(model_path).items()
    }


def layout_hash(expected: Mapping[str, Expected]) -> int:
    """Checksum of `expected_tensors`. Two models with the same checksum accept the same
    versions."""
    return zlib.crc32(
        repr(
            sorted((name, tensor.shape, tensor.dtypes[0]) for name, tensor in expected.items())
        ).encode()
    )


def tensors_of(
    manifest: Manifest, model: Mapping[str, Expected], max_rank: int | None
) -> Mapping[str, Expected]:
    """The tensors that a version must have: all of the model's, or two matrices for each layer of
    an adapter.

    Args:
        max_rank: largest rank of an adapter; None = the generators take whole weights.

    Raises:
        ManifestError: the generators do not take such a version, or the adapter is another
            model's.
    """
    title = f"version {manifest.version} of run {manifest.run_id!r}"
    if manifest.adapter is None:
        if max_rank is not None:
            raise ManifestError(
                f"{title} has whole weights, and these generators take adapters; train with lora,"
                " or start generators without max_lora_rank"
            )
        return model
    rank = manifest.adapter.get("r")
    if max_rank is None or not isinstance(rank, int) or not 0 < rank <= max_rank:
        limit = "none" if max_rank is None else f"rank {max_rank} or less"
        raise ManifestError(
            f"{title} is an adapter of rank {rank}, and these generators take {limit}; start them"
            " with max_lora_rank"
        )
    found: dict[str, Expected] = {}
    names = {entry.name for entry in manifest.tensors}
    for entry in manifest.tensors:
        layer, _, side = entry.name.removeprefix(PREFIX).rpartition(".lora_")
        weight = model.get(f"{layer}.weight")
        if (
            not entry.name.startswith(PREFIX)
            or side not in ADAPTER_SIDES
            or weight is None
            or len(weight.shape) != 2
        ):
            raise ManifestError(
                f"{title} has the adapter of another model: {entry.name!r} belongs to no linear"
                " layer here; give the generators the adapter's base model"
            )
        rows, columns = weight.shape
        shape = (rank, columns) if side == ADAPTER_SIDES[0] else (rows, rank)
        found[entry.name] = Expected(shape, (weight.dtypes[0], "float32"))
        other = ADAPTER_SIDES[side == ADAPTER_SIDES[0]]
        if f"{PREFIX}{layer}.lora_{other}" not in names:
            raise ManifestError(f"{title} lacks lora_{other} of layer {layer!r}")
    if not found:
        raise ManifestError(f"{title} is an adapter without matrices; publish those of its layers")
    return found


def check_manifest(manifest: Manifest, expected: Mapping[str, Expected]) -> None:
    """Check that the manifest lists every expected tensor exactly once, or as left out, with the
    right shape and dtype, inside its bucket.

    Raises:
        ManifestError: with the first problem found.
    """
    title = f"version {manifest.version} of run {manifest.run_id!r}"
    if not len(manifest.buckets) == len(manifest.sizes) == len(manifest.checksums):
        raise ManifestError(
            f"{title} has {len(manifest.buckets)} buckets, {len(manifest.sizes)} sizes and"
            f" {len(manifest.checksums)} checksums"
        )
    counts = Counter(entry.name for entry in manifest.tensors)
    counts.update(manifest.left_out)
    for names, what in (
        ([name for name in expected if name not in counts], "lacks"),
        ([name for name in counts if name not in expected], "has unknown"),
        ([name for name, count in counts.items() if count > 1], "repeats"),
    ):
        if names:
            raise ManifestError(
                f"{title} {what} {len(names)} tensors, first {sorted(names)[0]!r}; publish each"
                " tensor of the model once"
            )
    for entry in manifest.tensors:
        _check_entry(entry, expected[entry.name], manifest.sizes, title)
    _check_overlap(manifest, title)


def _check_entry(
    entry: TensorEntry, expected: Expected, sizes: tuple[int, ...], title: str
) -> None:
    shape, dtypes = expected
    if tuple(entry.shape) != shape:
        raise ManifestError(
            f"{title}: {entry.name!r} has shape {tuple(entry.shape)}, but the model has {shape}"
        )
    if entry.dtype not in dtypes or entry.dtype not in ITEM_BYTES:
        raise ManifestError(
            f"{title}: {entry.name!r} is {entry.dtype}, but the generators use {dtypes[0]}; publish"
            " in model.dtype"
        )
    item = ITEM_BYTES[entry.dtype]
    if entry.nbytes != math.prod(shape) * item:
        raise ManifestError(
            f"{title}: {entry.name!r} has {entry.nbytes} bytes, but its shape needs"
            f" {math.prod(shape) * item}"
        )
    if (
        not 0 <= entry.bucket < len(sizes)
        or entry.offset < 0
        or entry.offset + entry.nbytes > sizes[entry.bucket]
        or entry.offset % item
    ):
        raise ManifestError(
            f"{title}: {entry.name!r} at offset {entry.offset} is outside bucket {entry.bucket}"
        )


def _check_overlap(manifest: Manifest, title: str) -> None:
    before: TensorEntry | None = None
    for entry in sorted(manifest.tensors, key=lambda e: (e.bucket, e.offset)):
        if (
            before is not None
            and before.bucket == entry.bucket
            and before.offset + before.nbytes > entry.offset
        ):
            raise ManifestError(
                f"{title}: {entry.name!r} overlaps {before.name!r} in bucket {entry.bucket}"
            )
        before = entry
