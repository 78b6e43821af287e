"""Read a config from a YAML file and the command line, and explain settings that cannot be used."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from asyncrl.config.aliases import explain_unknown
from asyncrl.config.config import Config
from asyncrl.config.fields import alternatives, by_name, find, find_all, has_parts, known_names
from asyncrl.config.offline import OBJECTIVES, OfflineConfig
from asyncrl.config.overrides import with_overrides
from asyncrl.config.schema import ENTRY_NAME
from asyncrl.contracts.errors import ConfigError
from asyncrl.contracts.section import Section, key_of, kinds_of, name_of
from asyncrl.runtime.files.yaml_files import read_yaml
from asyncrl.runtime.functions import FUNCTION
from asyncrl.runtime.paths import meant

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

Kind = TypeVar("Kind", Config, OfflineConfig)
PATTERNS = {
    FUNCTION: "name a function as package.module:function",
    ENTRY_NAME: "its name is empty or has a '/'; choose another",
}
"""Pattern of a text setting → how to write a valid value."""
MOST_SHOWN = 200
"""Characters of a value in a message."""
MOST_MOVED = 5
"""Settings that have moved which a message names."""
OF_PATHS = ("is ", "has ", "begins ")
"""Beginnings of the messages of `runtime.paths`, which follow the setting and its value."""


def load_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read a YAML file and apply command-line overrides such as `["--rollout.temperature", "0.8"]`.

    Raises:
        ConfigError: the file cannot be read, has an offline objective, or a setting is unknown,
            missing or invalid.
    """
    tree = _read_tree(path)
    if "objective" in tree:
        raise ConfigError(
            f"config {str(path)!r} has objective = {_name(tree['objective'])!r}, which trains on a"
            " dataset without generators; use a config of a run with generators here"
        )
    return _validated(Config, tree, overrides)


def load_offline(
    path: str | Path, overrides: list[str] | None = None, objective: str | None = None
) -> OfflineConfig:
    """Read the YAML file of a run on a dataset, as `load_config` does.

    Args:
        objective: the objective of a file that names none.

    Raises:
        ConfigError: as in `load_config`, or the file or an override names another objective.
    """
    tree = _read_tree(path)
    given = tree.get("objective", objective)
    if isinstance(given, dict) and objective is not None:
        given = {"name": objective, **given}
    found = _name(given)
    if objective is not None and found != objective:
        other = f"run `asyncrl {found}`, or " if found in OBJECTIVES else ""
        raise ConfigError(
            f"config {str(path)!r} has objective = {found!r}; {other}set objective: {objective}"
        )
    config = _validated(OfflineConfig, {**tree, "objective": given}, overrides)
    name = config.objective.name
    if objective is not None and name != objective:
        raise ConfigError(
            f"--objective {name} is not what `asyncrl {objective}` trains; run `asyncrl {name}`, or"
            " leave the option out"
        )
    return config


def load_any(path: str | Path, overrides: list[str] | None = None) -> Config | OfflineConfig:
    """Read a YAML file of either kind. The setting `objective` tells them apart.

    Raises:
        ConfigError: as in `load_config`.
    """
    tree = _read_tree(path)
    options = [word.partition("=")[0].partition(".")[0] for word in overrides or ()]
    given = "--objective" in options
    if "objective" not in tree and not given:
        return _validated(Config, tree, overrides)
    if "objective" in tree and (name := _name(tree["objective"])) not in OBJECTIVES:
        setting = "objective.name" if isinstance(tree["objective"], dict) else "objective"
        raise ConfigError(
            f"{setting} = {_shown(name)}: use one of {', '.join(OBJECTIVES)}, or leave objective"
            " out for a run with generators"
        )
    return load_offline(path, overrides)


def _name(objective: Any) -> Any:
    """The name of an objective in a YAML file. A text is the name itself."""
    return objective.get("name") if isinstance(objective, dict) else objective


def _read_tree(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        ConfigError: the file cannot be read, or contains something else.
    """
    if Path(path).is_dir():
        raise ConfigError(
            f"config {str(path)!r} is a directory; give the path of a YAML file, such as"
            f" {str(Path(path) / 'config.yaml')!r}"
        )
    try:
        tree = read_yaml(Path(path))
    except OSError as error:
        raise ConfigError(
            f"config {str(path)!r} cannot be read ({error.strerror or error}); give the path of a"
            f" YAML file{meant(Path(path).absolute()) if not Path(path).exists() else ''}"
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(
            f"config {str(path)!r} cannot be used as YAML: {' '.join(str(error).split())}"
        ) from None
    if not isinstance(tree, dict):
        raise ConfigError(
            f"config {str(path)!r}"
            f" {'is empty' if tree is None else f'contains {type(tree).__name__}'}, not a mapping"
            " of settings; see jobs/quickstart/quickstart.yaml"
        )
    return tree


def _validated(kind: type[Kind], tree: dict[str, Any], overrides: list[str] | None) -> Kind:
    """The tree with the overrides, as a config of this kind."""
    try:
        return kind.model_validate(with_overrides(tree, overrides or [], kind))
    except ValidationError as error:
        raise ConfigError(explain(error, kind)) from None


def explain(error: ValidationError, kind: type[BaseModel] = Config) -> str:
    """One line that gives field, value and fix for each error of a config of this kind. Of many
    settings that have moved, the first ones are named."""
    lines = [line for item in error.errors() for line in _explain_one(item, kind)]
    moved = [line for line in dict.fromkeys(lines) if " has moved; " in line]
    more = moved[MOST_MOVED:]
    if more:
        lines = [line for line in lines if line not in more]
        lines.append(
            f"{len(more)} more settings have moved, so an earlier asyncrl wrote them; write only"
            " those that you need"
        )
    return "; ".join(dict.fromkeys(lines)).replace("\n", "\\n")


def _explain_one(item: ErrorDetails, kind: type[BaseModel]) -> list[str]:
    parts = [str(part)[:MOST_SHOWN] for part in item["loc"]]
    name = _setting(parts, kind)
    if item["type"] == "extra_forbidden":
        leaves = _leaves(name, item["input"])
        return [_explain_unknown(leaf, value, parts, kind) for leaf, value in leaves]
    return [_explain_value(item, parts, name, kind)]


def _explain_value(item: ErrorDetails, parts: list[str], name: str, kind: type[BaseModel]) -> str:
    if item["type"] == "missing":
        or_objective = f", or set objective: {' or '.join(OBJECTIVES)} for a run on a dataset"
        return f"{name} is missing; set it{or_objective if name == 'rollout' else ''}"
    if item["type"] == "invalid_key":
        return f"{name} is no name of a setting; leave it out"
    value, text = item["input"], _shown(item["input"])
    if (way := _way_to_write(item)) is not None:
        return f"{name.removesuffix('.[key]')} = {text}: {way}"
    message = item["msg"].removeprefix("Value error, ")
    if isinstance(value, dict | Section) and name and item["type"] == "value_error":
        # The rule of a section begins with a setting in it.
        if message.startswith("use one of ") and isinstance(value, dict):
            return f"{name}.name = {_shown(value.get('name'))}: {message}"
        return f"{name}: {message}" if message.startswith("give ") else f"{name}.{message}"
    if message.startswith(OF_PATHS):
        return f"{name} = {text} {message}"
    off = ", or leave it out" if value == "none" else _way_off(item, name, kind)
    return f"{name} = {text}: {message[0].lower()}{message[1:]}{off}" if name else message


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


def _way_off(item: ErrorDetails, name: str, kind: type[BaseModel]) -> str:
    """How to turn off a setting that may not be 0: without its section, if that is optional."""
    above = name.rpartition(".")[0]
    is_off = item["type"] in ("greater_than", "greater_than_equal") and item["input"] == 0
    needed = any(field.is_required() for field in find_all(kind, name))
    optional = any(section.default is None for section in find_all(kind, above))
    return f", or leave {above} out" if is_off and needed and optional else ""


def _setting(parts: list[str], kind: type[BaseModel]) -> str:
    """The dotted name of a setting. It leaves out the parts that name an alternative: of
    a choice, in parentheses, or of the types that a single value may have."""
    names = [part for part in parts if not part.startswith(("(", "literal[", "list["))]
    while (
        len(names) > 1
        and (above := find(kind, ".".join(names[:-1]))) is not None
        and not has_parts(above)
    ):
        names.pop()
    return ".".join(names)


def _explain_unknown(name: str, value: object, parts: list[str], kind: type[BaseModel]) -> str:
    """One line about a setting that does not exist, or not in this alternative of a choice."""
    for prefix, chosen, kinds in reversed(list(_choices(parts, kind))):
        rest = name.removeprefix(f"{prefix}.")
        others = [one for one in kinds if one is not chosen and find(one, rest) is not None]
        if others:
            if not by_name(kinds) and key_of(chosen):
                key = f"{prefix}.{key_of(chosen)}"
                return f"{name} has no effect with {key}; leave one of them out"
            choice = prefix.rpartition(".")[2]
            here, there = (alternatives(choice, some, kinds) for some in ([chosen], others))
            return f"{name} has no effect {here}; leave it out, or use it {there}"
        if "arguments" in chosen.model_fields and "." not in rest:
            return f"{name} is unknown; an argument of your own goes below {prefix}.arguments"
    return explain_unknown(name, known_names(kind, name), value)


def _choices(
    parts: list[str], kind: type[BaseModel]
) -> Iterator[tuple[str, type[Section], tuple[type[Section], ...]]]:
    """(Dotted name, chosen alternative, all alternatives) of each choice on the way to a setting.
    Parts in parentheses name the chosen ones."""
    fields = kind.model_fields
    kinds: tuple[type[Section], ...] = ()
    names: list[str] = []
    for part in parts:
        if not part.startswith("("):
            if part not in fields:
                return
            names.append(part)
            kinds = kinds_of(fields[part].annotation)
            fields = kinds[0].model_fields if len(kinds) == 1 else {}
            continue
        chosen = next((one for one in kinds if f"({name_of(one) or key_of(one)})" == part), None)
        if chosen is None:
            return
        yield ".".join(names), chosen, kinds
        fields = chosen.model_fields


def _way_to_write(item: ErrorDetails) -> str | None:
    """How to write a value of the right kind, instead of pydantic's message about types and
    patterns."""
    if item["type"] in ("model_type", "dict_type"):
        return "write its settings below it, each as `name: value`, or leave it out"
    if item["type"] == "list_type":
        return "write a list, in brackets"
    if item["type"] == "string_type" and isinstance(item["input"], int | float | date):  # True too
        return "put it in quotes, so that YAML reads it as text"
    return PATTERNS.get(item.get("ctx", {}).get("pattern", ""))


def _leaves(name: str, value: object) -> list[tuple[str, object]]:
    """The settings inside an unknown section, such as verl's `actor_rollout_ref`."""
    if not isinstance(value, dict) or not value:
        return [(name, value)]
    return [leaf for key, inner in value.items() for leaf in _leaves(f"{name}.{key}", inner)]
