"""Which files of a directory belong to the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from asyncrl.weights.stored import (
    INDEX,
    CheckpointFilesError,
    StoredTensor,
    stored_files,
    stored_tensors,
)


def save(path: Path, **tensors: torch.Tensor) -> None:
    save_file(tensors, path)


def index(directory: Path, **weight_map: str) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_the_index_lists_the_checkpoints_files(tmp_path: Path) -> None:
    save(tmp_path / "model-00001-of-00002.safetensors", a=torch.ones(2, 3))
    save(
        tmp_path / "model-00002-of-00002.safetensors",
        b=torch.ones(4, dtype=torch.bfloat16),
        c=torch.tensor(True),
    )
    save(tmp_path / "consolidated.safetensors", layers=torch.ones(7))
    index(
        tmp_path,
        a="model-00001-of-00002.safetensors",
        b="model-00002-of-00002.safetensors",
        c="model-00002-of-00002.safetensors",
    )
    first, second = stored_files(tmp_path)
    assert stored_tensors(tmp_path) == {
        "a": StoredTensor(first, (2, 3), "float32"),
        "b": StoredTensor(second, (4,), "bfloat16"),
        "c": StoredTensor(second, (), "bool"),
    }


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", a=torch.ones(2))
    assert stored_files(tmp_path) == [tmp_path / "model.safetensors"]
    index(tmp_path, a="model.safetensors")
    assert stored_files(tmp_path) == [tmp_path / "model.safetensors"]


def test_the_error_names_the_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointFilesError,
        match=r"has no model.safetensors and no model.safetensors.index.json",
    ):
        stored_files(tmp_path)
    save(tmp_path / "model.safetensors", a=torch.ones(2))
    save(tmp_path / "consolidated.safetensors", b=torch.ones(2))
    with pytest.raises(
        CheckpointFilesError, match=r"model.safetensors and consolidated.safetensors, but no"
    ):
        stored_files(tmp_path)
    for weight_map, words in (
        ({"a": "gone.safetensors"}, "and an .* that names other files"),
        ({}, "names no files"),
        ({"a": 1}, "names no files"),
    ):
        index(tmp_path, **weight_map)  # type: ignore[arg-type]
        with pytest.raises(CheckpointFilesError, match=words):
            stored_files(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "part.safetensors")
    for weight_map, words in (
        ({"a": "gone.safetensors"}, "'gone.safetensors', which is missing"),
        ({"a": "../part.safetensors"}, "not a file of that directory"),
    ):
        index(tmp_path, **weight_map)
        with pytest.raises(CheckpointFilesError, match=words):
            stored_files(tmp_path)
    (tmp_path / INDEX).write_text("[]")
    with pytest.raises(CheckpointFilesError, match="not JSON with a weight_map"):
        stored_files(tmp_path)
    index(tmp_path, a="part.safetensors", b="consolidated.safetensors")
    (tmp_path / "part.safetensors").write_bytes(b"\x08" + bytes(15))
    with pytest.raises(CheckpointFilesError, match=r"part.safetensors cannot be read"):
        stored_tensors(tmp_path)
    save(tmp_path / "part.safetensors", b=torch.ones(2))
    with pytest.raises(CheckpointFilesError, match="both have 'b'"):
        stored_tensors(tmp_path)
