"""The model, resolved once per node: a directory as it is, or a commit of the Hugging Face hub,
fetched by one process while the others wait.

After that it is only opened, by its path. `asyncrl.preflight.placement` compares what every node
finds there before anything is allocated.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import filelock
import httpx2
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    HFValidationError,
    LocalEntryNotFoundError,
    RevisionResolutionError,
)

from asyncrl.config import Config, ConfigError, is_hub_name
from asyncrl.preflight.dataset_snapshot import config_before, resolve_data
from asyncrl.rundir.resume import MODEL_FILES
from asyncrl.weights.stored import CheckpointFilesError, stored_files

__all__ = [
    "Snapshot",
    "difference",
    "download",
    "in_cache",
    "look",
    "read_snapshot",
    "resolve_models",
]

FILES, NOT_FILES = (
    ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"],
    [
        "*/*",
        "consolidated*",
    ],
)
"""What is fetched of a model: no pickles, no code, and its weights once."""
SAMPLES, SAMPLE_BYTES = 16, 4096
"""What is read of each file of weights."""
COMMIT = re.compile(r"[0-9a-f]{40}")
IN_CACHE = re.compile(
    r"(?P<cache>.+)/models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})"
)
"""Where the hub's cache keeps a commit."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What must be the same wherever a model is read."""

    hash: str
    """SHA-256 of config and tokenizer, in hex."""
    weights: Mapping[str, tuple[int, str]]
    """Bytes of each safetensors file, and SHA-256 of samples over its length: what was trained
    differs there, if anywhere."""


def resolve_models(config: Config) -> Config:
    """The config with directories of this node in place of names of the hub, of datasets too. A run
    that goes on keeps the commits that it began with.

    Raises:
        ConfigError: a name cannot be fetched and is not in the cache.
    """
    model, algorithm = config.model, config.algorithm
    if is_hub_name(model.path):
        model = model.model_copy(
            update={
                "path": str(download(model.path, model.revision or _commit_before(config))),
                "revision": None,
            }
        )
    revision = config.model.revision if algorithm.ref_load == config.model.path else None
    if algorithm.ref_load is not None and is_hub_name(algorithm.ref_load):
        algorithm = algorithm.model_copy(
            update={
                "ref_load": str(download(algorithm.ref_load, revision, field="algorithm.ref_load"))
            }
        )
    return resolve_data(config.model_copy(update={"model": model, "algorithm": algorithm}))


def download(
    name: str, revision: str | None, cache: Path | None = None, field: str = "model.path"
) -> Path:
    """Directory of one commit of a model, complete. One process on a node fetches it; those that
    ask meanwhile wait for it and find it there.

    Args:
        name: `owner/name`.
        revision: branch, tag or commit; None = the main branch, as the hub has it now, or as it was
            last seen if the hub cannot be reached.
        cache: default: the variable HF_HUB_CACHE, else the one below HF_HOME.

    Raises:
        ConfigError: the hub does not give it, and the cache has not got it.
    """
    cache = cache or Path(constants.HF_HUB_CACHE)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if not os.access(cache, os.W_OK):  # others keep it: what is there may be used
            return _download(name, revision, cache, local_files_only=True)
        with filelock.FileLock(cache / f".asyncrl-{name.replace('/', '--')}.lock"):
            try:  # a commit that is there needs no network
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
            f"{field} = {name!r}: no such directory, and no model of the hub{at} that can be"
            f" fetched ({_first_line(error)}); correct it, or fetch it beforehand with `hf download"
            f" {name}`"
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


def _commit_before(config: Config) -> str | None:
    """The commit that the run of this name began with, if it goes on and was given the same name of
    the hub."""
    before = config_before(config)
    model = before.get("model") if isinstance(before, dict) else None
    path = model.get("path") if isinstance(model, dict) else None
    place = in_cache(path) if isinstance(path, str) else None
    return (
        place["commit"]
        if place is not None and f"{place['owner']}/{place['name']}" == config.model.path
        else None
    )


def read_snapshot(path: Path) -> Snapshot:
    """What a checkpoint directory holds, with every file opened.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for name in MODEL_FILES:
        if (path / name).exists():
            digest.update(f"{name} ".encode() + hashlib.sha256((path / name).read_bytes()).digest())
    weights = {}
    try:
        files = stored_files(path)
    except CheckpointFilesError as error:
        raise OSError(str(error)) from None
    for file in files:
        samples = hashlib.sha256()
        with file.open("rb") as opened:
            size = opened.seek(0, 2)
            for number in range(SAMPLES):
                opened.seek(max(0, size - SAMPLE_BYTES) * number // (SAMPLES - 1))
                samples.update(opened.read(SAMPLE_BYTES))
        weights[file.name] = size, samples.hexdigest()
    return Snapshot(digest.hexdigest(), weights)


def in_cache(path: str) -> re.Match[str] | None:
    """The hub's cache, owner, name and commit of a path in it; None for another path."""
    return IN_CACHE.fullmatch(path)


def look(path: str) -> Snapshot | str:
    """What another node finds at the path, or why it finds nothing."""
    try:
        if (place := in_cache(path)) is not None:
            download(f"{place['owner']}/{place['name']}", place["commit"], Path(place["cache"]))
        return read_snapshot(Path(path))
    except (OSError, ConfigError) as error:
        return f"cannot be read ({_first_line(error)})"


def difference(found: Snapshot | str, expected: Snapshot) -> str:
    """What is wrong with a node's answer, as the end of a sentence about the model."""
    if isinstance(found, str):
        return found
    if found.hash != expected.hash:
        return "has another config or tokenizer"
    sizes = [
        f"{len(one.weights)} files, {sum(size for size, _ in one.weights.values())} bytes"
        for one in (found, expected)
    ]
    return f"has other weights ({sizes[0]}; here {sizes[1]})"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
