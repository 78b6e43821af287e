"""Gathers the adapter of a learner's ranks, and writes it in PEFT's format. The functions that
gather are collectives."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from asyncrl.config import LoraConfig
from asyncrl.contracts.messages import TensorEntry
from asyncrl.learning.engine.hf_directory import write_stops
from asyncrl.learning.engine.state import LearnerState
from asyncrl.models.adapters import LowRank, adapter_settings, add_squares, layer_of
from asyncrl.runtime.files.opening import make_directory, replace_text
from asyncrl.text.stops import Stops
from asyncrl.weights.gather import TORCH_DTYPES, gather_buckets, weight_layout
from asyncrl.weights.published import VersionTable, whole_table
from asyncrl.weights.stored import save_tensors

DIRECTORY = "adapter"
"""Folder of the adapter in an exported model's directory."""


def adapter_table(state: LearnerState) -> VersionTable:
    """The table of a version that is an adapter."""
    shapes = {name: tuple(matrix.ds_shape) for name, matrix in state.adapter.items()}
    return whole_table(shapes, state.spec.model.dtype)


def gather_matrices(state: LearnerState) -> dict[str, Tensor]:
    """Published name → matrix in model.dtype, on rank 0; empty on the others. An adapter is
    small."""
    if not state.adapter:
        return {}
    table, dtype = adapter_table(state), state.spec.model.dtype
    entries, sizes = weight_layout(table, dtype, state.spec.bucket_bytes)
    buckets: list[np.ndarray] = []
    gather_buckets(
        state.adapter,
        table,
        entries,
        sizes,
        state.rank,
        lambda number, content: buckets.append(content.copy()),
    )
    return {entry.name: _matrix(entry, buckets) for entry in entries} if buckets else {}


def row_squares(state: LearnerState, adapters: Mapping[str, LowRank]) -> dict[str, Tensor]:
    """Base weight → the squared lengths [out] of its rows with the adapter's product added, on rank
    0 (a collective).

    Args:
        adapters: of the base weights, on rank 0; empty on the others.
    """
    names = {f"{layer_of(name)}.weight" for name in state.adapter}
    shapes = {name: tuple(state.parameters[name].ds_shape) for name in sorted(names)}
    # Each element once: a published tensor may consist of interleaved parts of its parameters.
    table, dtype = whole_table(shapes, state.spec.model.dtype), state.spec.model.dtype
    entries, sizes = weight_layout(table, dtype, state.spec.bucket_bytes)
    squares: dict[str, Tensor] = {}
    gather_buckets(
        state.parameters,
        table,
        entries,
        sizes,
        state.rank,
        lambda number, content: None,
        partial(add_squares, adapters, squares),
    )
    return squares


def write_adapter(
    directory: Path, lora: LoraConfig, matrices: dict[str, Tensor], model_path: str, stops: Stops
) -> None:
    """Write PEFT's two files and the run's stops into `directory`, which is made."""
    make_directory(directory)
    save_tensors(directory / "adapter_model.safetensors", matrices)
    settings = adapter_settings(lora, matrices, model_path)
    replace_text(directory / "adapter_config.json", json.dumps(settings, indent=2) + "\n")
    write_stops(directory, model_path, stops)


def _matrix(entry: TensorEntry, buckets: list[np.ndarray]) -> Tensor:
    flat = torch.from_numpy(buckets[entry.bucket])[entry.offset : entry.offset + entry.nbytes]
    return flat.view(TORCH_DTYPES[entry.dtype]).view(entry.shape)
