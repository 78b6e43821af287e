"""Datasets of the Hugging Face hub: a commit's files of one split, fetched into the hub's cache.

`resolve_data` puts the cache's folders in place of names, so that everything after it reads files.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import filelock
import httpx2
import yaml
from huggingface_hub import (
    HfApi,
    constants,
    get_cached_repo_tree,
    hf_hub_download,
    snapshot_download,
)
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
)

from asyncrl.config import HUB_CACHE, Config, ConfigError, Source, sources_of
from asyncrl.data.splits import data_files
from asyncrl.runtime.yaml_files import read_yaml

__all__ = ["config_before", "fetch_dataset", "resolve_data"]

README = "README.md"
UNREACHABLE = (httpx2.TransportError, ConnectionError, LocalEntryNotFoundError)
"""What a hub that cannot be asked raises, HF_HUB_OFFLINE included."""
REFUSED = (OSError, HFValidationError, RevisionResolutionError, httpx2.HTTPError)

Data = str | tuple[Source, ...] | None


def resolve_data(config: Config) -> Config:
    """The config with folders of this node in place of datasets of the hub.

    A run that goes on keeps the commits that it began with.

    Raises:
        ConfigError: a dataset cannot be fetched and is not in the cache, or has no such split; or the config that the run began with cannot be read.
    """
    commits = functools.cache(functools.partial(_commits_before, config))

    def located(data: Data, field: str) -> Data:
        if data is None or not any(source.on_hub for source in sources_of(data)):
            return data
        return tuple(_located(source, field, commits) for source in sources_of(data))

    sets = {
        name: one.model_copy(update={"data": located(one.data, f"eval.sets.{name}.data")})
        for name, one in config.eval.sets.items()
    }
    evaluation = {"data": located(config.eval.data, "eval.data"), "sets": sets}
    train = {"train": located(config.data.train, "data.train")}
    warm = {"data": located(config.warm_start.data, "warm_start.data")}
    return config.model_copy(
        update={
            "data": config.data.model_copy(update=train),
            "eval": config.eval.model_copy(update=evaluation),
            "warm_start": config.warm_start.model_copy(update=warm),
        }
    )


def _located(source: Source, field: str, commits: Callable[[], Mapping[str, str]]) -> Source:
    if not source.on_hub:
        return source
    split = source.split or "train"
    revision = source.revision or commits().get(source.path)
    folder = fetch_dataset(source.path, split, source.subset, revision, field=field)
    return source.model_copy(update={"path": str(folder), "split": split, "revision": None})


def fetch_dataset(
    name: str,
    split: str,
    subset: str | None = None,
    revision: str | None = None,
    cache: Path | None = None,
    field: str = "data.train",
) -> Path:
    """Folder of one commit of a dataset, with the files of a split and its README.md.

    One process on a node fetches; those that ask meanwhile wait. A hub that cannot be reached is
    no error where the cache has what it last gave.

    Args:
        name: `owner/name`.
        revision: branch, tag or commit; None = the main branch.
        cache: default: the variable HF_HUB_CACHE, else the one below HF_HOME.

    Raises:
        ConfigError: neither the hub nor the cache has it, or it has no such split or subset.
    """
    cache = cache or Path(constants.HF_HUB_CACHE)
    at = f" at revision {revision!r}" if revision else ""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if not os.access(cache, os.W_OK):  # others keep it: what is there may be used
            return _from_cache(name, split, subset, revision, cache)
        with filelock.FileLock(cache / f".asyncrl-dataset-{name.replace('/', '--')}.lock"):
            try:
                return _from_hub(name, split, subset, revision, cache)
            except (RepositoryNotFoundError, RevisionNotFoundError):
                raise
            except UNREACHABLE:
                return _from_cache(name, split, subset, revision, cache)
    except ValueError as error:
        if isinstance(error, HFValidationError):
            raise _unfetched(name, at, field, error) from None
        raise ConfigError(f"{field} = {name!r}{at} {error}") from None
    except REFUSED as error:
        raise _unfetched(name, at, field, error) from None


def _from_hub(name: str, split: str, subset: str | None, revision: str | None, cache: Path) -> Path:
    where: dict[str, Any] = {"repo_type": "dataset", "cache_dir": cache}
    info = HfApi().dataset_info(name, revision=revision)
    names = [one.rfilename for one in info.siblings or []]
    text = None
    if README in names:
        readme = Path(hf_hub_download(name, README, revision=info.sha, **where))
        text = readme.read_text(errors="replace")
    files = data_files(names, text, split, subset)
    # A branch's name, not its commit, so that the cache knows what it stood for.
    wanted = {"allow_patterns": [README, *map(_literal, files)], "revision": revision}
    return Path(snapshot_download(name, **where, **wanted))


def _from_cache(
    name: str, split: str, subset: str | None, revision: str | None, cache: Path
) -> Path:
    where: dict[str, Any] = {"repo_type": "dataset", "revision": revision, "cache_dir": cache}
    local = functools.partial(snapshot_download, name, local_files_only=True, **where)
    folder = Path(local(allow_patterns=[README]))
    try:
        names = [entry.path for entry in get_cached_repo_tree(name, **where)]
    except CachedRepoTreeNotFoundError:  # fetched by an older version of huggingface_hub
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*")]
    readme = folder / README
    text = readme.read_text(errors="replace") if readme.is_file() else None
    local(allow_patterns=[*map(_literal, data_files(names, text, split, subset))])
    return folder


def _literal(name: str) -> str:
    """A file's name as a pattern that fits it alone."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def config_before(config: Config) -> Any:
    """What config.yaml of the run of this name holds, if that goes on; None: a new one begins.

    Raises:
        ConfigError: it cannot be read.
    """
    known = config.run_directory / "config.yaml"
    if config.resume == "never" or not known.exists():
        return None
    try:
        return read_yaml(known)
    except (OSError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise ConfigError(
            f"{known} cannot be read ({why}), and only it says which commits of the hub the run has; put it back, or set revision"
        ) from None


def _commits_before(config: Config) -> dict[str, str]:
    """Name → commit of the datasets that the run of this name began with, if it goes on."""
    commits: dict[str, str] = {}
    waiting: list[Any] = [config_before(config)]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict | list):
            waiting += item.values() if isinstance(item, dict) else item
        place = HUB_CACHE.fullmatch(item) if isinstance(item, str) else None
        if place is not None and place["kind"] == "datasets":
            commits[f"{place['owner']}/{place['name']}"] = place["commit"]
    return commits


def _unfetched(name: str, at: str, field: str, error: BaseException) -> ConfigError:
    why = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ConfigError(
        f"{field} = {name!r}: no such file or folder, and no dataset of the hub{at} that can be "
        f"fetched ({why}); correct it, or fetch it beforehand with "
        f"`hf download --repo-type dataset {name}`"
    )
