"""The refreshed reference policy: the real actor, and its weights on the disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from asyncrl.config import Config
from asyncrl.contracts.errors import ReferenceLostError
from asyncrl.contracts.messages import Manifest
from asyncrl.contracts.rows import ReferenceLogprobs
from asyncrl.learning.frozen.reference import RayReference, Reference, start_reference
from asyncrl.learning.frozen.reference_files import (
    CURRENT,
    ReferenceFiles,
    begin_kept,
    copy_kept,
    keep_version,
    read_kept,
    wait_for,
)
from asyncrl.preflight.specs import reference_spec
from asyncrl.runtime.files.opening import replace_text
from asyncrl.weights.layout import bucket_checksum, plan_buckets
from asyncrl.weights.manifest import ManifestError, expected_tensors
from asyncrl.weights.staging import StagingError

ROWS = [([1, 5, 9], [4, 4, 7, 2]), ([3, 2], []), ([8], [11, 3])]
Publish = Callable[..., Manifest]


def config(model: Path, every: int | None = 4) -> Config:
    return Config.model_validate(
        {
            "name": "run",
            "max_steps": 3,
            "model": {"path": str(model), "dtype": "float32"},
            "data": {"train": "train.parquet", "max_prompt_length": 8},
            "rollout": {"max_completion_length": 8},
            "reward": {"functions": {"exact": {"function": "package.module:function"}}},
            "algorithm": {"reference": {"kl_loss_coef": 0.1, "update_interval": every}},
        }
    )


def weights(model: Path, seed: int) -> dict[str, torch.Tensor]:
    """The model's tensors, changed by noise."""
    noise = torch.Generator().manual_seed(seed)
    stored = load_file(model / "model.safetensors")
    return {
        name: tensor + 0.1 * torch.randn(tensor.shape, generator=noise) if seed else tensor
        for name, tensor in sorted(stored.items())
    }


def logprobs_of_transformers(
    model: Path, tensors: dict[str, torch.Tensor], there: Path
) -> list[np.ndarray]:
    there.mkdir()
    (there / "config.json").write_bytes((model / "config.json").read_bytes())
    save_file(tensors, there / "model.safetensors", metadata={"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(there, dtype=torch.float32).eval()
    found = []
    for first, second in ROWS:
        ids = torch.tensor([[*first, *second]])
        with torch.no_grad():
            every = loaded(ids).logits[0, len(first) - 1 : -1].log_softmax(-1)
        found.append(every.gather(1, torch.tensor(second, dtype=torch.long)[:, None])[:, 0].numpy())
    return found


def assert_scores(answer: ReferenceLogprobs, version: int, expected: list[np.ndarray]) -> None:
    assert answer.version == version
    for found, wanted in zip(answer.logprobs, expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Publish:
    """`publish` of tests/conftest.py without Ray: the manifest itself has the buckets."""
    monkeypatch.setattr("asyncrl.weights.staging.ray.get", lambda bucket, timeout: bucket)

    def published(tensors: dict[str, torch.Tensor], version: int) -> Manifest:
        shapes = [(name, tuple(tensor.shape), "float32") for name, tensor in tensors.items()]
        entries, sizes = plan_buckets(shapes, 32 << 10)
        buckets = [np.zeros(size, np.uint8) for size in sizes]
        for entry in entries:
            content = tensors[entry.name].numpy().reshape(-1).view(np.uint8)
            buckets[entry.bucket][entry.offset : entry.offset + entry.nbytes] = content
        checksums = tuple(bucket_checksum(bucket.data) for bucket in buckets)
        held: Any = tuple(buckets)
        return Manifest("run", 0, version, entries, held, sizes, checksums)

    return published


@pytest.fixture
def kept(tmp_path: Path, tiny_model: Path, put: Publish) -> ReferenceFiles:
    """A folder with version 8 of a changed model."""
    folder = tmp_path / "folder"
    begin_kept(folder, None)
    manifest = put(weights(tiny_model, 1), version=8)
    return keep_version(folder, manifest, tiny_model, expected_tensors(tiny_model, "float32"), 30.0)


@pytest.fixture(scope="module")
def expected(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The log-probs of the model, and of the changed one."""
    folder = tmp_path_factory.mktemp("plain")
    before, after = (
        logprobs_of_transformers(tiny_model, weights(tiny_model, seed), folder / str(seed))
        for seed in (0, 1)
    )
    assert max(np.abs(a - b).max() for a, b in zip(before, after, strict=True) if len(a)) > 0.01
    return before, after


def test_a_reference_that_starts_again_scores_with_the_version_that_it_took(
    tiny_model: Path, put: Publish, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.learning.frozen.reference.claim_caches", lambda name: None)
    before, after = expected
    begin_kept(tmp_path / "folder", None)
    spec = reference_spec(config(tiny_model), tmp_path / "folder")
    first = Reference(spec)
    assert_scores(first.versioned_logprobs(ROWS), 0, before)
    manifest = put(weights(tiny_model, 1), version=4)
    first.refresh(manifest)
    assert_scores(first.versioned_logprobs(ROWS), 4, after)
    second = Reference(spec)
    assert_scores(second.versioned_logprobs(ROWS), 4, after)
    second.refresh(manifest)  # again, as Ray repeats a call after a death
    assert_scores(second.versioned_logprobs(ROWS), 4, after)


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_restarted_process_scores_with_the_version_that_it_took(
    ray_cluster: Any, tiny_model: Path, publish: Publish, expected: Any, tmp_path: Path
) -> None:
    before, after = expected
    folder = tmp_path / "attempt_0"
    begin_kept(folder, None)
    spec = reference_spec(config(tiny_model), folder)
    assert spec.refresh is not None
    actor = start_reference(spec)

    def scores() -> Any:
        return ray.get(actor.versioned_logprobs.remote(ROWS))

    try:
        assert_scores(scores(), 0, before)
        manifest = publish(weights(tiny_model, 1), version=4)
        metrics = await RayReference(actor, spec.refresh).refresh(manifest)
        assert metrics["reference/refresh_s"] > 0
        assert_scores(scores(), 4, after)
        ray.kill(actor, no_restart=False)
        assert_scores(scores(), 4, after)
    finally:
        ray.kill(actor)


def test_a_version_on_the_disk_has_the_published_tensors(
    kept: ReferenceFiles, tiny_model: Path
) -> None:
    assert read_kept(kept.folder) == kept and kept.version == 8
    kept.verify()
    assert kept.directory == kept.folder / "version_000008"
    found = load_file(kept.directory / "model.safetensors")
    expected = weights(tiny_model, 1)
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_new_version_replaces_the_one_before(
    kept: ReferenceFiles, tiny_model: Path, put: Publish
) -> None:
    (kept.folder / ".version_000009").mkdir()  # of a process that was killed while it wrote
    (kept.folder / "version_000012").mkdir()  # and of one that was killed before CURRENT
    manifest = put(weights(tiny_model, 2), version=12)
    expected = expected_tensors(tiny_model, "float32")
    keep_version(kept.folder, manifest, tiny_model, expected, 30.0).verify()
    assert read_kept(kept.folder).version == 12
    assert sorted(path.name for path in kept.folder.iterdir()) == [CURRENT, "version_000012"]


@pytest.mark.parametrize("failure", ["checksum", "lost", "shape", "killed", "full"])
def test_a_failed_write_leaves_the_version_before(
    kept: ReferenceFiles,
    tiny_model: Path,
    put: Publish,
    monkeypatch: pytest.MonkeyPatch,
    full_disk: Callable[[int], Any],
    failure: str,
) -> None:
    tensors = weights(tiny_model, 2)
    manifest = put(tensors, version=12)
    expected, error, limit = expected_tensors(tiny_model, "float32"), StagingError, 1 << 40
    if failure == "checksum":
        manifest = replace(manifest, checksums=(*manifest.checksums[:-1], 1))
    elif failure == "lost":
        manifest = replace(manifest, sizes=(*manifest.sizes[:-1], manifest.sizes[-1] + 1))
    elif failure == "shape":
        name = next(iter(tensors))
        manifest, error = put({**tensors, name: torch.zeros(3)}, version=12), ManifestError
    elif failure == "full":
        error, limit = OSError, 8 << 10
    else:

        def killed(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("asyncrl.learning.frozen.reference_files.replace_text", killed)
        error = KeyboardInterrupt
    with full_disk(limit), pytest.raises(error):
        keep_version(kept.folder, manifest, tiny_model, expected, 30.0)
    assert read_kept(kept.folder) == kept
    kept.verify()


@pytest.mark.parametrize("links", [True, False], ids=["links", "copies"])
def test_a_copy_outlives_the_original(
    kept: ReferenceFiles,
    tiny_model: Path,
    put: Publish,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    links: bool,
) -> None:
    if not links:

        def refused(*_: object, **__: object) -> None:
            raise OSError(errno.EXDEV, "another file system")

        monkeypatch.setattr(os, "link", refused)
    target = tmp_path / "checkpoint" / "reference"
    assert copy_kept(kept.folder, target) == dict(kept.files)
    expected = expected_tensors(tiny_model, "float32")
    keep_version(kept.folder, put(weights(tiny_model, 2), version=12), tiny_model, expected, 30)
    copied = read_kept(target)
    assert (copied.version, dict(copied.files)) == (8, dict(kept.files))
    copied.verify()
    again = tmp_path / "attempt_1"
    begin_kept(again, target)
    assert read_kept(again).version == 8


def test_a_copy_of_the_version_at_the_start_has_no_files(tmp_path: Path) -> None:
    begin_kept(tmp_path / "a", None)
    assert copy_kept(tmp_path / "a", tmp_path / "b") == {}
    assert read_kept(tmp_path / "b") == ReferenceFiles(tmp_path / "b", 0, {})
    assert read_kept(tmp_path / "b").directory is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "No such file"),
        ("{", "cannot be read"),
        ('{"version": 4}', "'files'"),
        ('{"version": 4, "files": {"../../other": [1, 2]}}', "other files than a version's"),
    ],
)
def test_a_place_without_a_version_is_refused(tmp_path: Path, text: str | None, why: str) -> None:
    if text is not None:
        replace_text(tmp_path / CURRENT, text)
    with pytest.raises(ReferenceLostError, match=why) as caught:
        read_kept(tmp_path)
    assert "\n" not in str(caught.value) and "resume from another checkpoint" in str(caught.value)


def test_damage_is_found_before_the_weights_are_used(kept: ReferenceFiles) -> None:
    file = kept.folder / "version_000008" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ReferenceLostError, match=r"model\.safetensors does not match its checksum"):
        kept.verify()
    file.unlink()
    with pytest.raises(ReferenceLostError, match=r"model\.safetensors cannot be read"):
        kept.verify()
    with pytest.raises(ReferenceLostError, match=r"model\.safetensors is missing"):
        copy_kept(kept.folder, kept.folder.with_name("copy"))


@pytest.mark.parametrize("lost", ["damaged", "missing", "elsewhere"])
def test_a_process_does_not_start_without_its_version(
    kept: ReferenceFiles, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """It would score with the weights of the start."""
    monkeypatch.setattr("asyncrl.learning.frozen.reference.claim_caches", lambda name: None)
    spec = reference_spec(config(tiny_model), kept.folder)
    file = kept.folder / "version_000008" / "model.safetensors"
    if lost == "damaged":
        file.write_bytes(b"")
    elif lost == "missing":
        file.unlink()
    else:
        spec = reference_spec(config(tiny_model), kept.folder / "on another disk")
    with pytest.raises(ReferenceLostError, match=r"the refreshed reference policy in .* is lost"):
        Reference(spec)


def test_a_version_that_another_node_wrote_must_be_seen_here(kept: ReferenceFiles) -> None:
    wait_for(kept.folder, 8, within_s=0)
    with pytest.raises(ReferenceLostError, match="every node shares"):
        wait_for(kept.folder, 12, within_s=0)


def test_only_a_run_that_refreshes_its_reference_gives_it_a_place(
    tiny_model: Path, tmp_path: Path
) -> None:
    assert reference_spec(config(tiny_model, None), tmp_path).refresh is None
    assert reference_spec(config(tiny_model)).refresh is None
