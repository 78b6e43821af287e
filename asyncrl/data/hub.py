"""Datasets on the Hugging Face hub: the files of one split of a commit, downloaded into the hub's
cache.

`resolve_data` replaces names by the cache's folders, so everything after it reads files.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import filelock
import httpx2
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

from asyncrl.config import ConfigError
from asyncrl.data.splits import data_files
from asyncrl.runtime.paths import meant

README = "README.md"
UNREACHABLE = (httpx2.TransportError, ConnectionError, LocalEntryNotFoundError)
"""Errors when the hub cannot be reached, HF_HUB_OFFLINE included."""
REFUSED = (OSError, HFValidationError, RevisionResolutionError, httpx2.HTTPError)


def download_dataset(
    name: str,
    split: str,
    subset: str | None = None,
    revision: str | None = None,
    cache: Path | None = None,
    field: str = "data.train",
) -> Path:
    """Folder of one commit of a dataset, with its README.md and the files of one split.

    One process per node downloads while others wait. If the hub cannot be reached, the last state
    in the cache is used.

    Args:
        name: `owner/name`.
        split: name of the split.
        subset: configuration; None = the default one.
        revision: branch, tag or commit; None = the main branch.
        cache: default: the environment variable HF_HUB_CACHE, else the cache in HF_HOME.
        field: setting that names the dataset, for messages.

    Raises:
        ConfigError: the dataset is neither on the hub nor in the cache, or has no such split or
            subset.
    """
    cache = cache or Path(constants.HF_HUB_CACHE)
    at = f" at revision {revision!r}" if revision else ""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if not os.access(cache, os.W_OK):  # a read-only cache of others may be used as it is
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
            raise _not_downloaded(name, at, field, error) from None
        raise ConfigError(f"{field} = {name!r}{at} {error}") from None
    except REFUSED as error:
        raise _not_downloaded(name, at, field, error) from None


def _from_hub(name: str, split: str, subset: str | None, revision: str | None, cache: Path) -> Path:
    info = HfApi().dataset_info(name, revision=revision)
    names = [file.rfilename for file in info.siblings or []]
    text = None
    if README in names:
        readme = hf_hub_download(
            name, README, revision=info.sha, repo_type="dataset", cache_dir=cache
        )
        text = Path(readme).read_text(errors="replace")
    files = data_files(names, text, split, subset)
    # The name of a branch, not its commit, so that the cache records which commit it was.
    folder = snapshot_download(
        name,
        repo_type="dataset",
        revision=revision,
        cache_dir=cache,
        allow_patterns=[README, *map(_literal, files)],
    )
    return Path(folder)


def _from_cache(
    name: str, split: str, subset: str | None, revision: str | None, cache: Path
) -> Path:
    local = functools.partial(
        snapshot_download,
        name,
        repo_type="dataset",
        revision=revision,
        cache_dir=cache,
        local_files_only=True,
    )
    folder = Path(local(allow_patterns=[README]))
    try:
        tree = get_cached_repo_tree(name, repo_type="dataset", revision=revision, cache_dir=cache)
        names = [entry.path for entry in tree]
    except CachedRepoTreeNotFoundError:  # fetched by an older version of huggingface_hub
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*")]
    readme = folder / README
    text = readme.read_text(errors="replace") if readme.is_file() else None
    local(allow_patterns=[*map(_literal, data_files(names, text, split, subset))])
    return folder


def _literal(name: str) -> str:
    """A pattern that matches exactly this file name."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _not_downloaded(name: str, at: str, field: str, error: BaseException) -> ConfigError:
    why = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ConfigError(
        f"{field} = {name!r}: no such file or folder, and no dataset on the hub{at} that can be"
        f" downloaded ({why}); correct it, or first run `hf download --repo-type dataset {name}`"
        f"{meant(Path(name).absolute())}"
    )
