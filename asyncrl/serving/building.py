"""Building a standing application: `serve status` shows why it cannot be built, in one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import ray
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from ray.serve.exceptions import RayServeException

from asyncrl.config import ConfigError, Section, field_names
from asyncrl.serving.proxies import nodes

__all__ = ["refusals", "settings_of", "visible"]

Kind = TypeVar("Kind", bound=Section)


def settings_of(kind: type[Kind], args: Mapping[str, object] | Kind) -> Kind:
    """The settings that `args` of a YAML file give.

    Raises:
        RayServeException: one line for all of their errors.
    """
    try:
        return kind.model_validate(args)
    except ValidationError as error:
        lines = "; ".join(_explained(item, kind) for item in error.errors())
        raise RayServeException(f"args: {lines}") from None


@contextmanager
def refusals() -> Iterator[None]:
    """Raise a ConfigError in this block as the error that Serve shows without a traceback."""
    try:
        yield
    except ConfigError as error:
        raise RayServeException(" ".join(str(error).split())) from None


def visible(model: str) -> bool:
    """Whether the builder can judge the files of this model. It may run on a node that lacks the
    model; the replica checks them again on its own node."""
    return Path(model).exists() or (ray.is_initialized() and nodes() == 1)


def _explained(item: ErrorDetails, kind: type[Section]) -> str:
    name = ".".join(map(str, item["loc"]))
    if item["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, field_names(kind), 1, cutoff=0.5)
        return f"{name} is unknown; " + (f"did you mean {near[0]}?" if near else "leave it out")
    if item["type"] == "missing":
        return f"{name} is missing; set it"
    message = item["msg"].removeprefix("Value error, ")
    return f"{name} = {item['input']!r}: {message}" if name else message
