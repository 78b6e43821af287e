"""YAML files and the command line, and the messages about settings that cannot be used."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import yaml
from pydantic import (
    BaseModel,
    ValidationError,
)

from asyncrl.config.aliases import explain_unknown
from asyncrl.config.config import Config
from asyncrl.config.schema import ENTRY_NAME, EvalSet, RewardFunction, Section, Source
from asyncrl.contracts.errors import ConfigError
from asyncrl.runtime.functions import FUNCTION
from asyncrl.runtime.yaml_files import parse_yaml, read_yaml

__all__ = [
    "load_config",
]

ENTRIES: dict[str, type[BaseModel]] = {"reward.functions.": RewardFunction, "eval.sets.": EvalSet}
"""Settings whose keys are the user's own → what each key holds."""
MAPPINGS = (*ENTRIES, "data.chat_template_kwargs.")
"""Settings whose keys are the user's own."""
PATTERNS = {
    FUNCTION: "name a function as package.module:function",
    ENTRY_NAME: "its name is empty or has a '/'; choose another",
}
"""Patterns of texts → how one is written."""


def load_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read a YAML file and apply command-line overrides such as `["--rollout.temperature", "0.8"]`.

    Raises:
        ConfigError: the file cannot be read, or a field is unknown, missing or has a value that
            cannot be used.
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
            " YAML file"
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(
            f"config {str(path)!r} cannot be used as YAML: {' '.join(str(error).split())}"
        ) from None
    if not isinstance(tree, dict):
        raise ConfigError(
            f"config {str(path)!r} holds {type(tree).__name__}, not a mapping of settings; see"
            " jobs/quickstart/quickstart.yaml"
        )
    try:
        if not overrides:
            return Config.model_validate(tree)
        of_mappings, others = _overrides_of_mappings(overrides)
        for name, value in of_mappings:
            tree = _with_value(tree, name, value)
        _refuse_unknown_overrides(others)
        return command_line(others, tree) if others else Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(explain(error)) from None


def command_line(arguments: list[str], tree: dict[str, Any], exit_on_error: bool = False) -> Config:
    """The config from a YAML tree and command-line arguments, which win. `--help` among them prints
    every setting and exits.

    Raises:
        ConfigError: the arguments cannot be parsed.
        ValidationError: the result is no valid config.
    """
    from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict, SettingsError

    class CommandLine(BaseSettings, Config):
        """Settings of one run; each may also stand in the YAML file."""

        model_config = SettingsConfigDict(
            cli_prog_name="asyncrl train CONFIG.yaml",
            cli_avoid_json=True,
            cli_hide_none_type=True,
            cli_parse_none_str="null",
        )

        @classmethod
        def settings_customise_sources(
            cls, settings_cls: Any, init_settings: Any, *environment: Any, **files: Any
        ) -> tuple[Any, ...]:
            return (init_settings,)

    try:
        settings = CliApp.run(
            CommandLine, cli_args=arguments, cli_exit_on_error=exit_on_error, **tree
        )
    except SettingsError as error:
        raise ConfigError(
            f"command line: {' '.join(str(error).split())}; options look like"
            " --rollout.temperature 0.8"
        ) from None
    return Config.model_validate(settings.model_dump())


def explain(error: ValidationError) -> str:
    """One line for each thing wrong: field, value, fix."""
    return "; ".join(_explain_one(dict(item)) for item in error.errors())


def field_names(section: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Dotted names of all settings, depth first."""
    names: list[str] = []
    for name, field in section.model_fields.items():
        names.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            names += field_names(field.annotation, f"{prefix}{name}.")
    return names


def _explain_one(item: dict[str, Any]) -> str:
    name = ".".join(str(part) for part in item["loc"] if part not in ("(sources)", "(path)"))
    if item["type"] == "extra_forbidden":
        section = name.rpartition(".")[0]
        entry = (
            Source
            if "(sources)" in item["loc"]
            else next(
                (kind for mapping, kind in ENTRIES.items() if section.startswith(mapping)), None
            )
        )
        known = field_names(entry, f"{section}.") if entry else field_names()
        return "; ".join(explain_unknown(one, known) for one in _leaves(name, item["input"]))
    if item["type"] == "missing":
        return f"{name} is missing; set it"
    if (way := _way_to_write(item)) is not None:
        return f"{name.removesuffix('.[key]')} = {item['input']!r}: {way}"
    message = item["msg"].removeprefix("Value error, ")
    return f"{name} = {item['input']!r}: {message[0].lower()}{message[1:]}" if name else message


def _way_to_write(item: dict[str, Any]) -> str | None:
    """How a value of another kind is written, where pydantic would speak of types and patterns."""
    if item["type"] in ("model_type", "dict_type"):
        return "write its settings below it, each as `name: value`, or leave it out"
    if item["type"] == "list_type":
        return "write a list, in brackets"
    if item["type"] == "string_type" and isinstance(item["input"], int | float | date):  # True too
        return "put it in quotes, so that YAML takes it for a text"
    return PATTERNS.get(item.get("ctx", {}).get("pattern", ""))


def _leaves(name: str, value: Any) -> list[str]:
    """The settings inside a section that nobody here has, such as verl's `actor_rollout_ref`."""
    if not isinstance(value, dict) or not value:
        return [name]
    return [leaf for key, inner in value.items() for leaf in _leaves(f"{name}.{key}", inner)]


def _overrides_of_mappings(overrides: list[str]) -> tuple[list[tuple[str, Any]], list[str]]:
    """(Name, value) of overrides inside mappings whose keys are the user's, such as
    `--reward.functions.exact.weight 2`; and the other words. A value is read as YAML is.

    Raises:
        ConfigError: one has no value, or its value is no YAML.
    """
    found: list[tuple[str, Any]] = []
    others: list[str] = []
    words = iter(overrides)
    for word in words:
        name, equals, text = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not f"{name}.".startswith(MAPPINGS):
            others.append(word)
            continue
        given = text if equals else next(words, None)
        if given is None or (not equals and given.startswith("--")):
            raise ConfigError(f"--{name} has no value; write --{name} VALUE")
        try:
            found.append((name, parse_yaml(given)))
        except yaml.YAMLError as error:
            raise ConfigError(
                f"--{name} = {given!r} cannot be used as YAML: {' '.join(str(error).split())}"
            ) from None
    return found, others


def _with_value(tree: Any, name: str, value: Any, above: str = "") -> dict[str, Any]:
    """The tree with one setting replaced.

    Raises:
        ConfigError: what it would be in is no mapping.
    """
    key, _, rest = name.partition(".")
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{above} = {tree!r} is no mapping, so it has no {key!r}; write {above} out as one"
        )
    here = f"{above}.{key}" if above else key
    return {**tree, key: _with_value(tree.get(key, {}), rest, value, here) if rest else value}


def _refuse_unknown_overrides(overrides: list[str]) -> None:
    known = set(field_names())
    for word in overrides:
        name = word.removeprefix("--").split("=", 1)[0]
        if word.startswith("--") and name not in known:
            raise ConfigError(explain_unknown(name, field_names()))
