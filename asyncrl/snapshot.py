"""The model, resolved once per node: a directory as it is, or a commit of the Hugging Face hub, fetched by one process while the others wait.

After that it is only opened, by its path. `asyncrl.placement` compares what every node finds there before anything is allocated.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import filelock
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RevisionResolutionError

from asyncrl.config import Config, ConfigError, is_hub_name

__all__ = ["Snapshot", "difference", "fetch", "in_cache", "look", "read_snapshot", "resolve_models"]

FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""What is fetched of a model: no pickles, no code."""
HASHED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "chat_template.jinja",
)
IN_CACHE = re.compile(r"(?P<cache>.+)/models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})")
"""Where the hub's cache keeps a commit."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What must be the same wherever a model is read."""

    hash: str
    """SHA-256 of config and tokenizer, in hex."""
    weights: Mapping[str, int]
    """Bytes of each safetensors file."""


def resolve_models(config: Config) -> Config:
    """The config with directories of this node in place of names of the hub.

    Raises:
        ConfigError: a name cannot be fetched and is not in the cache.
    """
    model, algorithm = config.model, config.algorithm
    if is_hub_name(model.path):
        model = model.model_copy(update={"path": str(fetch(model.path, model.revision)), "revision": None})
    if algorithm.ref_load is not None and is_hub_name(algorithm.ref_load):
        algorithm = algorithm.model_copy(update={"ref_load": str(fetch(algorithm.ref_load, None, field="algorithm.ref_load"))})
    return config.model_copy(update={"model": model, "algorithm": algorithm})


def fetch(name: str, revision: str | None, cache: Path | None = None, field: str = "model.path") -> Path:
    """Directory of one commit of a model, complete. One process on a node fetches it; those that ask meanwhile wait for it and find it there.

    Args:
        name: `owner/name`.
        revision: branch, tag or commit; None = the main branch, as the hub has it now, or as it was last seen if the hub cannot be reached.
        cache: default: the variable HF_HUB_CACHE, else the one below HF_HOME.

    Raises:
        ConfigError: the hub does not give it, and the cache has not got it.
    """
    cache = cache or Path(constants.HF_HUB_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(cache / f".asyncrl-{name.replace('/', '--')}.lock"):
        try:
            return Path(snapshot_download(name, revision=revision, cache_dir=cache, allow_patterns=list(FILES)))
        except (HfHubHTTPError, LocalEntryNotFoundError, RevisionResolutionError, OSError) as error:
            at = f" at revision {revision!r}" if revision else ""
            raise ConfigError(
                f"{field} = {name!r}: no such directory, and no model of the hub{at} that can be fetched ({_first_line(error)}); correct it, or fetch it "
                f"beforehand with `hf download {name}`"
            ) from None


def read_snapshot(path: Path) -> Snapshot:
    """What a checkpoint directory holds, with every file opened.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for name in HASHED:
        if (path / name).exists():
            digest.update(f"{name} ".encode() + hashlib.sha256((path / name).read_bytes()).digest())
    weights = {}
    for file in sorted(path.glob("*.safetensors")):
        with file.open("rb") as opened:
            weights[file.name] = opened.seek(0, 2)
    return Snapshot(digest.hexdigest(), weights)


def in_cache(path: str) -> re.Match[str] | None:
    """The hub's cache, owner, name and commit of a path in it; None for another path."""
    return IN_CACHE.fullmatch(path)


def look(path: str) -> Snapshot | str:
    """What another node finds at the path, or why it finds nothing."""
    try:
        if (place := in_cache(path)) is not None:
            fetch(f"{place['owner']}/{place['name']}", place["commit"], Path(place["cache"]))
        return read_snapshot(Path(path))
    except (OSError, ConfigError) as error:
        return f"cannot be read ({_first_line(error)})"


def difference(found: Snapshot | str, expected: Snapshot) -> str:
    """What is wrong with a node's answer, as the end of a sentence about the model."""
    if isinstance(found, str):
        return found
    if not found.weights:
        return "holds no model"
    if found.hash != expected.hash:
        return "has another config or tokenizer"
    sizes = [f"{len(one.weights)} files, {sum(one.weights.values())} bytes" for one in (found, expected)]
    return f"has other weights ({sizes[0]}; here {sizes[1]})"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
