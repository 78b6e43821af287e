"""Manifests and staging files: the checks before a version is applied, and the cleanup after a
failure."""

from __future__ import annotations

import mmap
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.contracts.messages import Manifest
from asyncrl.weights.apply import StagedUpdate, map_tensors
from asyncrl.weights.manifest import Expected, ManifestError, check_manifest, expected_tensors
from asyncrl.weights.staging import StagingError, fetch_version, sweep
from asyncrl.weights.stored import CheckpointFilesError

Parameters = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def parameters() -> Parameters:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (3, 5), "b": (17,), "c": (64, 8), "d": (1,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def expected(parameters: Parameters) -> dict[str, Expected]:
    return {name: Expected(tuple(p.shape), ("float32",)) for name, p in parameters.items()}


@pytest.fixture(scope="module")
def manifest(publish: Any, parameters: Parameters) -> Manifest:
    made: Manifest = publish(parameters, bucket_bytes=256)
    assert len(made.buckets) > 1
    return made


def test_the_worker_maps_the_fetched_tensors(
    manifest: Manifest, parameters: Parameters, expected: Any, tmp_path: Path
) -> None:
    staged = fetch_version(manifest, expected, 60, tmp_path)
    assert staged.path.name == f"asyncrl-test-1-1-{os.getpid()}.weights"
    mapped = dict(map_tensors(StagedUpdate(**staged.update_info())))
    staged.remove()
    assert list(mapped) == list(parameters)
    assert all(torch.equal(mapped[name], parameters[name]) for name in parameters)
    assert list(tmp_path.iterdir()) == []


def test_a_short_file_is_not_mapped(manifest: Manifest, expected: Any, tmp_path: Path) -> None:
    staged = fetch_version(manifest, expected, 60, tmp_path)
    os.truncate(staged.path, staged.nbytes - 1)
    with pytest.raises(ValueError, match="its layout needs"):
        map_tensors(StagedUpdate(**staged.update_info()))


def test_a_corrupt_bucket_is_refused_and_leaves_no_file(
    manifest: Manifest, expected: Any, tmp_path: Path
) -> None:
    flipped = (manifest.checksums[0], manifest.checksums[1] ^ 1, *manifest.checksums[2:])
    with pytest.raises(StagingError, match="bucket 1 of version 1 has checksum"):
        fetch_version(replace(manifest, checksums=flipped), expected, 60, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_full_shared_memory_is_named_and_leaves_no_file(
    manifest: Manifest, expected: Any, tmp_path: Path, full_disk: Any
) -> None:
    with (
        full_disk(1000),
        pytest.raises(
            StagingError,
            match=r"File too large, and this version needs .* MiB there; enlarge shared memory",
        ),
    ):
        fetch_version(manifest, expected, 60, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_bucket_of_the_wrong_size_is_refused(
    manifest: Manifest, expected: Any, tmp_path: Path
) -> None:
    sizes = (manifest.sizes[0] + 64, *manifest.sizes[1:])
    with pytest.raises(StagingError, match="bucket 0 of version 1 has"):
        fetch_version(replace(manifest, sizes=sizes), expected, 60, tmp_path)


def test_a_manifest_must_list_every_parameter_once_and_correctly(
    manifest: Manifest, expected: Any
) -> None:
    check_manifest(manifest, expected)
    entries = {entry.name: entry for entry in manifest.tensors}

    def with_entries(*tensors: Any) -> Manifest:
        return replace(manifest, tensors=tensors)

    for name in entries:
        with pytest.raises(ManifestError, match=f"lacks 1 tensors, first '{name}'"):
            check_manifest(with_entries(*(e for e in manifest.tensors if e.name != name)), expected)
    c = entries["c"]
    others = [e for e in manifest.tensors if e.name != "c"]
    for changed, words in (
        (replace(c, name="x"), "lacks 1"),
        (replace(c, shape=(8, 64)), "has shape"),
        (replace(c, dtype="bfloat16"), "is bfloat16"),
        (replace(c, nbytes=c.nbytes - 4), "its shape needs"),
        (replace(c, offset=c.offset + manifest.sizes[c.bucket]), "outside bucket"),
        (replace(c, bucket=99), "outside bucket"),
    ):
        with pytest.raises(ManifestError, match=words):
            check_manifest(with_entries(*others, changed), expected)
    with pytest.raises(ManifestError, match="repeats 1"):
        check_manifest(with_entries(*manifest.tensors, c), expected)
    check_manifest(replace(with_entries(*others), left_out=("c",)), expected)
    with pytest.raises(ManifestError, match="repeats 1"):
        check_manifest(replace(manifest, left_out=("c",)), expected)
    with pytest.raises(ManifestError, match="unknown 1 tensors, first 'x'"):
        check_manifest(replace(manifest, left_out=("x",)), expected)
    check_manifest(manifest, {**expected, "c": Expected((64, 8), ("bfloat16", "float32"))})
    with pytest.raises(ManifestError, match="unknown 1 tensors, first 'c'"):
        check_manifest(manifest, {name: e for name, e in expected.items() if name != "c"})
    a, b = entries["a"], entries["b"]
    with pytest.raises(ManifestError, match="overlaps"):
        check_manifest(
            with_entries(
                a, replace(b, bucket=a.bucket, offset=a.offset), entries["c"], entries["d"]
            ),
            expected,
        )


def test_expected_tensors_are_those_of_transformers(tiny_model: Path, untied_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    for path in (tiny_model, untied_model):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        assert expected_tensors(path, "bfloat16") == {
            name: (tuple(p.shape), ("bfloat16", "float32")) for name, p in model.named_parameters()
        }
    assert "lm_head.weight" not in expected_tensors(tiny_model, "float32")
    with pytest.raises(CheckpointFilesError, match=r"has no model\.safetensors"):
        expected_tensors(tiny_model / "nowhere", "float32")


def test_sweep_deletes_the_files_of_dead_processes(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    dead, alive = (
        tmp_path / f"asyncrl-r-1-3-{ended.pid}.weights",
        tmp_path / f"asyncrl-r-1-3-{os.getpid()}.weights",
    )
    other = tmp_path / "asyncrl-notes.weights"
    queue = tmp_path / f"asyncrl-0a1b2c3d-{ended.pid}.queue"
    for path in (dead, alive, other, queue):
        path.touch()
    assert sweep(tmp_path) == [queue, dead]
    assert alive.exists()
    assert other.exists()


def test_sweep_deletes_memory_of_killed_workers_that_nobody_maps(tmp_path: Path) -> None:
    new, old, mapped = (tmp_path / f"vllm_dist_{name}-tp:0-[0-1]-cpushm_0" for name in "abc")
    for path in (new, old, mapped):
        path.write_bytes(bytes(mmap.PAGESIZE))
    with mapped.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        for path in (old, mapped):
            os.utime(path, (0, 0))
        assert sweep(tmp_path) == [old]
    assert new.exists() and mapped.exists()
    assert sweep(tmp_path) == [mapped]
