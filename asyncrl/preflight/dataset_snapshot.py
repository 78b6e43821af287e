"""Datasets on the hub, resolved once per run to the folder of a commit on this node."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TypeVar

import yaml

from asyncrl.config import (
    HUB_CACHE,
    Config,
    ConfigError,
    OfflineConfig,
    RunSettings,
    Section,
    Source,
    sources_of,
)
from asyncrl.data.hub import download_dataset
from asyncrl.runtime.files.yaml_files import read_yaml

Data = str | tuple[Source, ...] | None
Kind = TypeVar("Kind", Config, OfflineConfig)
DATA = (("data", "train"), ("eval", "data"), ("warm_start", "data"))
"""Settings that may be datasets on the hub."""


def resolve_data(config: Kind) -> Kind:
    """The config with local folders instead of names of datasets on the hub.

    A resumed run keeps the commits of its first attempt.

    Raises:
        ConfigError: a dataset is neither on the hub nor in the cache, has no such split, or the
            config of the earlier attempt cannot be read.
    """
    commits = functools.cache(functools.partial(_commits_before, config))

    def located(data: Data, field: str) -> Data:
        if data is None or not any(source.on_hub for source in sources_of(data)):
            return data
        return tuple(_located(source, field, commits) for source in sources_of(data))

    updates: dict[str, Section] = {}
    for section, name in DATA:
        settings: Section | None = updates.get(section, getattr(config, section, None))
        if settings is None:
            continue
        found = {name: located(getattr(settings, name), f"{section}.{name}")}
        updates[section] = settings.model_copy(update=found)
    if isinstance(config, Config):
        sets = {
            name: chosen.model_copy(update={"data": located(chosen.data, f"eval.sets.{name}.data")})
            for name, chosen in config.eval.sets.items()
        }
        updates["eval"] = updates["eval"].model_copy(update={"sets": sets})
    return config.model_copy(update=updates)


def _located(source: Source, field: str, commits: Callable[[], Mapping[str, str]]) -> Source:
    if not source.on_hub:
        return source
    split = source.split or "train"
    revision = source.revision or commits().get(source.path)
    folder = download_dataset(source.path, split, source.subset, revision, field=field)
    return source.model_copy(update={"path": str(folder), "split": split, "revision": None})


def config_before(config: RunSettings) -> object:
    """The content of config.yaml if a run of this name is resumed; None for a new run.

    Raises:
        ConfigError: it cannot be read.
    """
    known = config.run_directory / "config.yaml"
    if config.resume == "never" or not known.exists():
        return None
    try:
        tree: object = read_yaml(known)
        return tree
    except (OSError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise ConfigError(
            f"{known} cannot be read ({why}), and it is the only record of the run's hub commits;"
            " restore it, or set revision"
        ) from None


def _commits_before(config: RunSettings) -> dict[str, str]:
    """Name → commit of the datasets of the earlier attempt, if the run is resumed."""
    commits: dict[str, str] = {}
    waiting = [config_before(config)]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict | list):
            waiting += item.values() if isinstance(item, dict) else item
        match = HUB_CACHE.fullmatch(item) if isinstance(item, str) else None
        if match is not None and match["kind"] == "datasets":
            commits[f"{match['owner']}/{match['name']}"] = match["commit"]
    return commits
