"""Datasets of the hub, resolved once per run: a commit of each, in a folder of this node."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from asyncrl.config import HUB_CACHE, Config, ConfigError, Source, sources_of
from asyncrl.data.hub import download_dataset
from asyncrl.runtime.yaml_files import read_yaml

__all__ = ["config_before", "resolve_data"]
Data = str | tuple[Source, ...] | None


def resolve_data(config: Config) -> Config:
    """The config with folders of this node in place of datasets of the hub.

    A run that goes on keeps the commits that it began with.

    Raises:
        ConfigError: a dataset cannot be fetched and is not in the cache, or has no such split; or
            the config that the run began with cannot be read.
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
    folder = download_dataset(source.path, split, source.subset, revision, field=field)
    return source.model_copy(update={"path": str(folder), "split": split, "revision": None})


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
            f"{known} cannot be read ({why}), and only it says which commits of the hub the run"
            " has; put it back, or set revision"
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
