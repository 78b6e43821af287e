"""Staged versions with random values, without a learner and without Ray, and requests to run
meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from asyncrl.contracts import GenerateRequest
from asyncrl.weights import Staged, expected_tensors, plan_buckets

PREFIX = "base_model.model."
"""How PEFT begins the name of each tensor of an adapter."""
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
"""Layers of an attention."""


def staged_weights(model: Path, dtype: str, path: Path) -> Staged:
    """A version of all tensors of a checkpoint, written to `path`."""
    tensors = expected_tensors(model, dtype)
    return _staged({name: tensor.shape for name, tensor in tensors.items()}, dtype, path)


def staged_adapter(model: Path, dtype: str, path: Path, rank: int) -> Staged:
    """A version that is an adapter of every attention of a checkpoint, written to `path`."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in expected_tensors(model, dtype).items():
        layer = name.removesuffix(".weight")
        if layer.endswith(PROJECTIONS):
            rows, columns = tensor.shape
            shapes[f"{PREFIX}{layer}.lora_A.weight"] = (rank, columns)
            shapes[f"{PREFIX}{layer}.lora_B.weight"] = (rows, rank)
    return _staged(shapes, dtype, path)


def adapter_settings(rank: int) -> dict[str, object]:
    """PEFT's settings of `staged_adapter`."""
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "bias": "none",
        "target_modules": list(PROJECTIONS),
    }


def any_request(seed: int, tokens: int) -> GenerateRequest:
    """A request for one completion of exactly `tokens` tokens."""
    return GenerateRequest((5 + seed % 7, 6), 1, tokens, 1.0, seed=seed, ignore_eos=True)


def _staged(shapes: Mapping[str, tuple[int, ...]], dtype: str, path: Path) -> Staged:
    entries, (size,) = plan_buckets(
        [(name, shape, dtype) for name, shape in shapes.items()], 1 << 40
    )
    # Small numbers in both types that models have.
    values = np.random.default_rng(0).standard_normal(size // 4 + 1, dtype=np.float32) * 0.02
    path.write_bytes(values.tobytes()[:size])
    tensors = tuple((e.name, tuple(e.shape), e.dtype, e.offset) for e in entries)
    return Staged(path, size, tensors, 0.0)
