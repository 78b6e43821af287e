"""The model, resolved once per node: a directory, or a commit on the Hugging Face hub. One process
downloads a commit while the others wait.

After that, the model is only opened by its path. `asyncrl.run.cluster.placement` compares it
between nodes before anything is allocated.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import filelock
import httpx2
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    HFValidationError,
    LocalEntryNotFoundError,
    RevisionResolutionError,
)

from asyncrl.config import (
    AlgorithmConfig,
    Config,
    ConfigError,
    DpoConfig,
    OfflineConfig,
    RunSettings,
    Section,
    is_hub_name,
)
from asyncrl.config.distillation import TeacherModel
from asyncrl.preflight.dataset_snapshot import config_before, resolve_data
from asyncrl.preflight.resources.adapter import with_loaded_adapter
from asyncrl.rundir.resume import MODEL_FILES
from asyncrl.runtime.paths import meant
from asyncrl.weights.stored import CheckpointFilesError, sampled_weights

Kind = TypeVar("Kind", Config, OfflineConfig)
Part = TypeVar("Part", bound=Section)
FILES, NOT_FILES = (
    ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"],
    ["*/*", "consolidated*"],
)
"""Files of a model to download: no pickles, no code, and each weight once."""
COMMIT = re.compile(r"[0-9a-f]{40}")
IN_CACHE = re.compile(
    r"(?P<cache>.+)/models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})"
)
"""Path of a commit in the hub's cache."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What must be the same on every node that reads a model."""

    hash: str
    """SHA-256 of config and tokenizer, in hex."""
    weights: Mapping[str, tuple[int, str]]
    """See `asyncrl.weights.stored.sampled_weights`."""


def resolve_models(config: Kind) -> Kind:
    """The config with local directories instead of names of models and datasets on the hub, and
    with the settings of a loaded adapter. A resumed run keeps its commits.

    Raises:
        ConfigError: a model or dataset is neither on the hub nor in the cache, or the adapter
            cannot be used.
    """
    updates: dict[str, object] = {}
    if config.model.on_hub:
        revision = config.model.revision or _commit_before(config)
        local = {"path": str(download(config.model.path, revision)), "revision": None}
        updates["model"] = config.model.model_copy(update=local)
    if isinstance(config, OfflineConfig) and isinstance(config.objective, DpoConfig):
        setting = "objective.ref_load"
        updates["objective"] = _downloaded(config, config.objective, "ref_load", setting)
    elif isinstance(config, Config):
        updates["algorithm"] = _with_downloaded_policy(config)
    return resolve_data(with_loaded_adapter(config.model_copy(update=updates)))


def _with_downloaded_policy(config: Config) -> AlgorithmConfig:
    """The algorithm's settings with a local directory instead of the name of a reference policy or
    teacher on the hub."""
    algorithm, setting = config.algorithm, config.reference_setting
    distillation = algorithm.distillation
    if distillation is not None and isinstance(distillation.teacher, TeacherModel):
        teacher = _downloaded(config, distillation.teacher, "path", setting)
        changed = distillation.model_copy(update={"teacher": teacher})
        return algorithm.model_copy(update={"distillation": changed})
    if algorithm.reference is None:
        return algorithm
    reference = _downloaded(config, algorithm.reference, "ref_load", setting)
    return algorithm.model_copy(update={"reference": reference})


def _downloaded(config: RunSettings, section: Part, name: str, setting: str) -> Part:
    """The section with a local directory instead of a name on the hub in one of its fields."""
    path = getattr(section, name)
    if path is None or not is_hub_name(path):
        return section
    revision = config.model.revision if path == config.model.path else None
    return section.model_copy(update={name: str(download(path, revision, field=setting))})


def download(
    name: str, revision: str | None, cache: Path | None = None, field: str = "model.path"
) -> Path:
    """Directory of a complete commit of a model. One process per node downloads it; others wait and
    then use it.

    Args:
        name: `owner/name`.
        revision: branch, tag or commit. None = the main branch on the hub, or its last known commit
            if the hub cannot be reached.
        cache: default: the environment variable HF_HUB_CACHE, else the cache in HF_HOME.
        field: setting that names the model, for messages.

    Raises:
        ConfigError: the model is neither on the hub nor in the cache.
    """
    cache = cache or Path(constants.HF_HUB_CACHE)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if not os.access(cache, os.W_OK):  # a read-only cache of others may be used as it is
            return _download(name, revision, cache, local_files_only=True)
        with filelock.FileLock(cache / f".asyncrl-{name.replace('/', '--')}.lock"):
            try:  # a cached commit needs no network
                return _download(
                    name,
                    revision,
                    cache,
                    local_files_only=bool(revision and COMMIT.fullmatch(revision)),
                )
            except LocalEntryNotFoundError:
                return _download(name, revision, cache)
    except (OSError, HFValidationError, RevisionResolutionError, httpx2.HTTPError) as error:
        at = f" at revision {revision!r}" if revision else ""
        raise ConfigError(
            f"{field} = {name!r}: no such directory, and no model on the hub{at} that can be"
            f" downloaded ({_first_line(error)}); correct it, or first run `hf download {name}`"
            f"{meant(Path(name).absolute())}"
        ) from None


def _download(name: str, revision: str | None, cache: Path, local_files_only: bool = False) -> Path:
    folder = snapshot_download(
        name,
        revision=revision,
        cache_dir=cache,
        local_files_only=local_files_only,
        allow_patterns=FILES,
        ignore_patterns=NOT_FILES,
    )
    return Path(folder)


def _commit_before(config: RunSettings) -> str | None:
    """The commit of the earlier attempt, if the run is resumed with the same hub name."""
    before = config_before(config)
    model = before.get("model") if isinstance(before, dict) else None
    path = model.get("path") if isinstance(model, dict) else None
    match = in_cache(path) if isinstance(path, str) else None
    return (
        match["commit"]
        if match is not None and f"{match['owner']}/{match['name']}" == config.model.path
        else None
    )


def read_snapshot(path: Path) -> Snapshot:
    """The snapshot of a checkpoint directory. Opens every file.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for name in MODEL_FILES:
        if (path / name).exists():
            digest.update(f"{name} ".encode() + hashlib.sha256((path / name).read_bytes()).digest())
    try:
        weights = sampled_weights(path)
    except CheckpointFilesError as error:
        raise OSError(str(error)) from None
    return Snapshot(digest.hexdigest(), weights)


def in_cache(path: str) -> re.Match[str] | None:
    """Hub cache, owner, name and commit of a path in the cache; None for another path."""
    return IN_CACHE.fullmatch(path)


def look(path: str) -> Snapshot | str:
    """The snapshot on this node (another one than the driver's), or why there is none."""
    try:
        if (match := in_cache(path)) is not None:
            download(f"{match['owner']}/{match['name']}", match["commit"], Path(match["cache"]))
        return read_snapshot(Path(path))
    except (OSError, ConfigError) as error:
        return f"cannot be read ({_first_line(error)})"


def difference(found: Snapshot | str, expected: Snapshot) -> str:
    """What is wrong with a node's answer, as the end of a sentence about the model."""
    if isinstance(found, str):
        return found
    if found.hash != expected.hash:
        return "has a different config or tokenizer"
    sizes = [
        f"{len(snapshot.weights)} files, {sum(size for size, _ in snapshot.weights.values())} bytes"
        for snapshot in (found, expected)
    ]
    return f"has different weights ({sizes[0]}; here {sizes[1]})"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
