"""A run with a refreshed reference policy resumes with the version that it had."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config, ConfigError
from asyncrl.learning.frozen.reference_files import CURRENT, read_kept
from asyncrl.rundir.directory import RunDirectory
from asyncrl.runtime.files.opening import replace_text
from asyncrl.runtime.files.shared import size_and_checksum


class Learner:
    async def save(self, directory: Path) -> dict[str, tuple[int, int]]:
        (directory / "weights").write_text("1")
        return {"weights": size_and_checksum(directory / "weights")}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("model", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(name.encode() * 4000)
    return tmp_path


def config(root: Path, every: int | None = 4, **changes: Any) -> Config:
    tree: dict[str, Any] = {
        "name": "run",
        "runs_root": str(root / "runs"),
        "max_steps": 30,
        "model": {"path": str(root / "model")},
        "data": {"train": "rows.parquet", "max_prompt_length": 20},
        "rollout": {"max_completion_length": 8},
        "reward": {"functions": {"exact": {"function": "package.module:function"}}},
        "algorithm": {"reference": {"kl_loss_coef": 0.1, "update_interval": every}},
    }
    return Config.model_validate(tree | changes)


def take(place: Path, version: int) -> None:
    """What a refresh leaves in a place."""
    folder = place / f"version_{version:06d}"
    folder.mkdir()
    (folder / "model.safetensors").write_text(f"weights of {version}")
    (folder / "config.json").write_text("{}")
    files = {
        f"{folder.name}/{file.name}": size_and_checksum(file) for file in sorted(folder.iterdir())
    }
    replace_text(place / CURRENT, json.dumps({"version": version, "files": files}))
    for other in place.glob("version_*"):
        if other != folder:
            shutil.rmtree(other)


def save(directory: RunDirectory, version: int) -> Path:
    learner: Any = Learner()
    state = replace(directory.state, version=version)
    return asyncio.run(directory.checkpoints.write(state, (), learner, None))


def reference_of(directory: RunDirectory) -> tuple[int, str | None]:
    """Version and weights with which the attempt's reference policy starts."""
    assert directory.reference is not None
    kept = read_kept(directory.reference)
    kept.verify()
    if kept.directory is None:
        return kept.version, None
    return kept.version, (kept.directory / "model.safetensors").read_text()


def test_each_checkpoint_has_the_reference_of_its_time(root: Path) -> None:
    """Also after the run went back to an older one, and made the same versions again."""
    with RunDirectory(config(root, checkpoint={"keep": 9})) as directory:
        assert directory.reference == directory.path / "reference" / "attempt_0"
        assert reference_of(directory) == (0, None)
        save(directory, 3)
        take(directory.path / "reference" / "attempt_0", 4)
        save(directory, 4)
        take(directory.path / "reference" / "attempt_0", 8)
        save(directory, 9)
        take(directory.path / "reference" / "attempt_0", 12)  # killed before its next checkpoint
    for step, expected in (
        (None, (8, "weights of 8")),
        (4, (4, "weights of 4")),
        (3, (0, None)),
        (9, (8, "weights of 8")),
    ):
        checkpoint = {"keep": 9, "ckpt_step": step}
        with RunDirectory(config(root, resume="must", checkpoint=checkpoint)) as directory:
            assert reference_of(directory) == expected
            places = list((directory.path / "reference").iterdir())
            assert places == [directory.reference]


def test_a_version_is_on_the_disk_once(root: Path) -> None:
    with RunDirectory(config(root)) as directory:
        assert directory.reference is not None
        take(directory.reference, 4)
        first, second = save(directory, 4), save(directory, 5)
        name = "version_000004/model.safetensors"
        places = (directory.reference, first / "reference", second / "reference")
        assert len({(place / name).stat().st_ino for place in places}) == 1
        manifest = json.loads((second / "MANIFEST").read_text())
        assert {name for name in manifest if name.startswith("reference/")} == {
            "reference/CURRENT",
            "reference/version_000004/config.json",
            "reference/version_000004/model.safetensors",
        }


def test_a_damaged_reference_costs_its_checkpoint(root: Path) -> None:
    """The files of two versions differ, so the checkpoint before stays whole."""
    with RunDirectory(config(root)) as directory:
        assert directory.reference is not None
        take(directory.reference, 4)
        save(directory, 5)
        take(directory.reference, 8)
        path = save(directory, 9)
    (path / "reference" / "version_000008" / "model.safetensors").write_text("weights of 9")
    with RunDirectory(config(root, resume="must")) as directory:
        assert directory.state.version == 5 and reference_of(directory) == (4, "weights of 4")
        assert "damaged: reference/version_000008/model.safetensors" in "".join(directory.notes)


def test_a_checkpoint_without_its_reference_is_refused(root: Path) -> None:
    with RunDirectory(config(root)) as directory:
        directory.checkpoints.reference = None
        save(directory, 4)
    with pytest.raises(ConfigError, match=r"is lost: CURRENT cannot be read .*ckpt_step"):
        RunDirectory(config(root, resume="must"))


def test_a_reference_from_the_future_is_refused(root: Path) -> None:
    with RunDirectory(config(root)) as directory:
        assert directory.reference is not None
        take(directory.reference, 8)
        save(directory, 4)
    with pytest.raises(ConfigError, match="has version 4, but its reference policy has 8"):
        RunDirectory(config(root, resume="must"))


@pytest.mark.parametrize(("before", "after"), [(4, None), (4, 8), (None, 4)])
def test_the_interval_is_fixed_within_a_run(
    root: Path, before: int | None, after: int | None
) -> None:
    with RunDirectory(config(root, before)) as directory:
        save(directory, 3)
    with pytest.raises(
        ConfigError, match=r"algorithm\.reference\.update_interval = .*, but .* of those"
    ):
        RunDirectory(config(root, after, resume="must"))


@pytest.mark.parametrize(
    ("before", "after", "ref_load", "expected"),
    [
        (4, 4, "model", (4, "weights of 4")),
        (4, 3, "model", (4, "weights of 4")),
        (4, 4, "other", (0, None)),
        (None, 4, "model", (0, None)),
        (4, None, "model", None),
    ],
)
def test_another_run_goes_on_with_the_reference_if_it_begins_with_the_same(
    root: Path,
    before: int | None,
    after: int | None,
    ref_load: str,
    expected: tuple[int, str | None] | None,
) -> None:
    with RunDirectory(config(root, before)) as directory:
        if directory.reference is not None:
            take(directory.reference, 4)
        save(directory, 5)
    load = {"load": str(root / "runs" / "run")}
    reference = {"kl_loss_coef": 0.1, "update_interval": after, "ref_load": str(root / ref_load)}
    with RunDirectory(
        config(root, name="next", checkpoint=load, algorithm={"reference": reference})
    ) as directory:
        assert directory.state.version == 5
        if expected is None:
            assert directory.reference is None
        else:
            assert reference_of(directory) == expected


def test_a_frozen_reference_has_no_place(root: Path) -> None:
    with RunDirectory(config(root, None)) as directory:
        path = save(directory, 4)
        assert directory.reference is None and not (directory.path / "reference").exists()
        assert not (path / "reference").exists()
