"""Building a standing application: `serve status` shows why it cannot be built, in one line."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import ray
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from ray.serve.exceptions import RayServeException

from asyncrl.config import ConfigError, Section, field_names
from asyncrl.config.schema import AttachedGenerators
from asyncrl.generation.settings import GeneratorApp
from asyncrl.serving.proxies import nodes, refuse_closed_proxies
from asyncrl.serving.reward_settings import RewardModelApp

Kind = TypeVar("Kind", GeneratorApp, RewardModelApp)


def checked_settings(
    kind: type[Kind], args: Mapping[str, object] | Kind, check: Callable[[Kind], Kind]
) -> Kind:
    """The settings that `args` of a YAML file give, as `check` returns them. `check` reads the
    model's files, so it is not called where they may be on another node.

    Raises:
        RayServeException: one line for all errors of `args`, or for the ConfigError of `check`; or
            nobody could reach the routes.
    """
    try:
        app = kind.model_validate(args)
    except ValidationError as error:
        lines = "; ".join(_explained(item, kind) for item in error.errors())
        raise RayServeException(f"args: {lines}") from None
    if app.http:
        refuse_closed_proxies()
    if not _visible(app.model):
        return app
    try:
        return check(app)
    except ConfigError as error:
        raise RayServeException(" ".join(str(error).split())) from None


def _visible(model: str) -> bool:
    """Whether the builder can judge the files of this model. It may run on a node that lacks the
    model; the replica checks them again on its own node."""
    return Path(model).exists() or (ray.is_initialized() and nodes() == 1)


def _explained(item: ErrorDetails, kind: type[Section]) -> str:
    name = ".".join(map(str, item["loc"]))
    if item["type"] == "extra_forbidden":
        if name.removeprefix("generator.") in AttachedGenerators.model_fields:
            return (
                f"{name} = {item['input']!r} is a training job's setting, for generators that"
                " already run; leave it out here"
            )
        near = difflib.get_close_matches(name, field_names(kind), 1, cutoff=0.5)
        return f"{name} is unknown; " + (f"did you mean {near[0]}?" if near else "leave it out")
    if item["type"] == "missing":
        return f"{name} is missing; set it"
    message = item["msg"].removeprefix("Value error, ")
    return f"{name} = {item['input']!r}: {message}" if name else message
