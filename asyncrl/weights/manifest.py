"""Checks of a manifest against the model that it is meant for. Pure: nothing is fetched and nothing applied."""

from __future__ import annotations

import json
import math
import zlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from asyncrl.control.protocols import Manifest, TensorEntry
from asyncrl.weights.layout import ITEM_BYTES

__all__ = ["ManifestError", "check_manifest", "expected_parameters", "fingerprint"]


class ManifestError(ValueError):
    """A version that must not be applied. Nothing has been changed."""


def expected_parameters(model_path: str | Path, dtype: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name → (shape, dtype) of every parameter that a version of this checkpoint has: the names in its safetensors files, in `dtype`.

    A tied output head is the embedding and has no entry of its own.

    Raises:
        ManifestError: the directory holds no safetensors file.
    """
    from safetensors import safe_open

    files = sorted(Path(model_path).glob("*.safetensors"))
    if not files:
        raise ManifestError(f"model.path = {str(model_path)!r} holds no *.safetensors file; save the checkpoint with safetensors")
    expected: dict[str, tuple[tuple[int, ...], str]] = {}
    for file in files:
        with safe_open(file, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - a safetensors file is no mapping
                expected[name] = (tuple(tensors.get_slice(name).get_shape()), dtype)
    if json.loads((Path(model_path) / "config.json").read_text()).get("tie_word_embeddings", False):
        expected.pop("lm_head.weight", None)
    return expected


def fingerprint(expected: Mapping[str, tuple[tuple[int, ...], str]]) -> int:
    """A checksum of `expected_parameters`: equal where versions of one model fit the other."""
    return zlib.crc32(repr(sorted(expected.items())).encode())


def check_manifest(manifest: Manifest, expected: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
    """Raise ManifestError unless the manifest has every expected parameter exactly once, of the right shape and dtype, inside its bucket."""
    title = f"version {manifest.version} of run {manifest.run_id!r}"
    if not len(manifest.buckets) == len(manifest.sizes) == len(manifest.checksums):
        raise ManifestError(f"{title} has {len(manifest.buckets)} buckets, {len(manifest.sizes)} sizes and {len(manifest.checksums)} checksums")
    counts = Counter(entry.name for entry in manifest.tensors)
    for names, what in (
        ([name for name in expected if name not in counts], "lacks"),
        ([name for name in counts if name not in expected], "has unknown"),
        ([name for name, count in counts.items() if count > 1], "repeats"),
    ):
        if names:
            raise ManifestError(f"{title} {what} {len(names)} parameters, first {sorted(names)[0]!r}; publish each parameter of the model once")
    for entry in manifest.tensors:
        _check_entry(entry, expected[entry.name], manifest.sizes, title)
    _check_overlap(manifest, title)


def _check_entry(entry: TensorEntry, expected: tuple[tuple[int, ...], str], sizes: tuple[int, ...], title: str) -> None:
    shape, dtype = expected
    if tuple(entry.shape) != shape:
        raise ManifestError(f"{title}: {entry.name!r} has shape {tuple(entry.shape)}, the model has {shape}")
    if entry.dtype != dtype:
        raise ManifestError(f"{title}: {entry.name!r} is {entry.dtype}, the generators hold {dtype}; publish in model.dtype")
    if entry.nbytes != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ManifestError(f"{title}: {entry.name!r} has {entry.nbytes} bytes, its shape needs {math.prod(shape) * ITEM_BYTES[dtype]}")
    if not 0 <= entry.bucket < len(sizes) or entry.offset < 0 or entry.offset + entry.nbytes > sizes[entry.bucket] or entry.offset % ITEM_BYTES[dtype]:
        raise ManifestError(f"{title}: {entry.name!r} lies outside bucket {entry.bucket}, at {entry.offset}")


def _check_overlap(manifest: Manifest, title: str) -> None:
    before: TensorEntry | None = None
    for entry in sorted(manifest.tensors, key=lambda e: (e.bucket, e.offset)):
        if before is not None and before.bucket == entry.bucket and before.offset + before.nbytes > entry.offset:
            raise ManifestError(f"{title}: {entry.name!r} overlaps {before.name!r} in bucket {entry.bucket}")
        before = entry
