"""Paths in settings. They become absolute when the settings are read, because workers start in
other directories: relative ones begin in the directory of the call. `{runs_root}`, `~` and
environment variables in them are replaced."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator

from asyncrl.contracts.errors import ConfigError
from asyncrl.runtime.paths import written_path

HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
DATA_FILE = re.compile(r".*\.(parquet|pq|arrow|jsonl|ndjson|json|csv|txt)(\.\w+)?")

ROOT: ContextVar[str | None] = ContextVar("runs_root", default=None)
"""The setting `runs_root` of the settings that are being read."""


@contextmanager
def paths_below(runs_root: str | None) -> Iterator[None]:
    """Read settings whose `{runs_root}` is this."""
    token = ROOT.set(runs_root)
    try:
        yield
    finally:
        ROOT.reset(token)


def root_of_runs(configured: str | None) -> Path:
    """Absolute directory of all runs.

    Raises:
        ConfigError: the path has an unknown variable.
    """
    given = configured or os.environ.get("ASYNCRL_RUNS") or "runs"
    try:
        return Path(written_path(given)).resolve()
    except ValueError as error:
        setting = "runs_root" if configured else "the environment variable ASYNCRL_RUNS"
        raise ConfigError(f"{setting} = {given!r} {error}") from None


def is_hub_name(path: str) -> bool:
    """Whether this is `owner/name` of a model on the Hugging Face hub: it has that form, and no
    such path exists here."""
    return HUB_NAME.fullmatch(path) is not None and not Path(path).exists()


def is_hub_data(path: str) -> bool:
    """Whether this is `owner/name` of a dataset on the hub: it passes `is_hub_name` and is not a
    file name."""
    return is_hub_name(path) and not DATA_FILE.fullmatch(path.lower())


def _with_root(path: str) -> str:
    if not path.strip():  # it would become the current directory
        raise ValueError("is an empty path; give one, or leave it out")
    if "{runs_root}" not in path:
        return path
    root = str(root_of_runs(ROOT.get()))
    return path.replace("${runs_root}", "{runs_root}").replace("{runs_root}", root)


def _local(path: str) -> str:
    return str(Path(written_path(_with_root(path))).absolute())


def _model(path: str) -> str:
    given = _with_root(path)
    return given if is_hub_name(given) else _local(given)


def _data(path: str) -> str:
    given = _with_root(path)
    return given if is_hub_data(given) else _local(given)


def _arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a function of the user, which may be paths below the runs root."""
    return {
        name: _local(value)
        if isinstance(value, str) and value.startswith(("{runs_root}/", "${runs_root}/"))
        else value
        for name, value in given.items()
    }


LocalPath: TypeAlias = Annotated[str, AfterValidator(_local)]
ModelPath: TypeAlias = Annotated[str, AfterValidator(_model)]
"""It may name a model on the hub instead."""
DataPath: TypeAlias = Annotated[str, AfterValidator(_data)]
"""It may name a dataset on the hub instead."""
Arguments: TypeAlias = Annotated[dict[str, Any], AfterValidator(_arguments)]
"""Keyword arguments. A text that begins with `{runs_root}/` is a path."""
