"""Read a config from a YAML file and the command line, and explain settings that cannot be used."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from asyncrl.config.aliases import explain_unknown
from asyncrl.config.config import Config
from asyncrl.config.offline import OBJECTIVES, OfflineConfig
from asyncrl.config.run_settings import RunSettings, root_of_runs
from asyncrl.config.schema import ENTRY_NAME, EvalSet, RewardFunction, Section, Source
from asyncrl.contracts.errors import ConfigError
from asyncrl.runtime.functions import FUNCTION
from asyncrl.runtime.paths import meant
from asyncrl.runtime.yaml_files import parse_yaml, read_yaml

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails
    from pydantic_settings import PydanticBaseSettingsSource

__all__ = ["load_any", "load_config", "load_offline", "section_of"]

ENTRIES: dict[str, type[BaseModel]] = {"reward.functions.": RewardFunction, "eval.sets.": EvalSet}
"""Settings whose keys the user chooses → the section of each entry."""
MAPPINGS = (*ENTRIES, "data.chat_template_kwargs.")
"""Settings whose keys the user chooses."""
Kind = TypeVar("Kind", Config, OfflineConfig)
PATTERNS = {
    FUNCTION: "name a function as package.module:function",
    ENTRY_NAME: "its name is empty or has a '/'; choose another",
}
"""Pattern of a text setting → how to write a valid value."""


def load_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read a YAML file and apply command-line overrides such as `["--rollout.temperature", "0.8"]`.

    Raises:
        ConfigError: the file cannot be read, has an offline objective, or a setting is unknown,
            missing or invalid.
    """
    tree = _read_tree(path)
    if "objective" in tree:
        raise ConfigError(
            f"config {str(path)!r} has objective: {tree['objective']}, which trains on a dataset"
            " without generators; use a config of a run with generators here"
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
    found = tree.get("objective", objective)
    if objective is not None and found != objective:
        raise ConfigError(
            f"config {str(path)!r} has objective: {found}; run `asyncrl {found}`, or set objective:"
            f" {objective}"
        )
    config = _validated(OfflineConfig, {**tree, "objective": found}, overrides)
    if objective is not None and config.objective != objective:
        raise ConfigError(
            f"--objective {config.objective} is not what `asyncrl {objective}` trains; run `asyncrl"
            f" {config.objective}`, or leave the option out"
        )
    return config


def load_any(path: str | Path, overrides: list[str] | None = None) -> Config | OfflineConfig:
    """Read a YAML file of either kind. The setting `objective` tells them apart.

    Raises:
        ConfigError: as in `load_config`.
    """
    tree = _read_tree(path)
    given = any(word.partition("=")[0] == "--objective" for word in overrides or ())
    if "objective" not in tree and not given:
        return load_config(path, overrides)
    if "objective" in tree and tree["objective"] not in OBJECTIVES:
        raise ConfigError(
            f"objective = {tree['objective']!r}: use one of {', '.join(OBJECTIVES)}, or leave it"
            " out for a run with generators"
        )
    return load_offline(path, overrides)


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
        if not overrides:
            return kind.model_validate(tree)
        in_mappings, others = _overrides_of_mappings(_without_braces(overrides, tree))
        unset, remaining = _overrides_with_null(others)
        for name, value in in_mappings:
            tree = _with_value(tree, name, value)
        for name in unset:
            tree = _with_value(tree, name, None)
        _refuse_unknown_overrides(remaining, kind)
        if not remaining:
            return kind.model_validate(tree)
        return _command_line(remaining, tree, kind)
    except ValidationError as error:
        raise ConfigError(explain(error, kind)) from None


def _command_line(arguments: list[str], tree: Mapping[str, Any], kind: type[Kind]) -> Kind:
    """Merge a YAML tree with command-line arguments, which take precedence.

    Raises:
        ConfigError: the arguments cannot be parsed.
        ValidationError: the result is not a valid config.
    """
    from pydantic_settings import CliApp, SettingsError

    try:
        settings = CliApp.run(
            _command_line_class(kind), cli_args=arguments, cli_exit_on_error=False, **tree
        )
    except SettingsError as error:
        raise ConfigError(
            f"command line: {' '.join(str(error).split())}; options look like"
            " --learner.learning_rate 1e-6"
        ) from None
    return kind.model_validate(settings.model_dump())


def _command_line_class(kind: type[RunSettings]) -> type[BaseModel]:
    """The class that reads a config of this kind from the command line."""
    from pydantic_settings import BaseSettings, SettingsConfigDict

    class OnlyArguments:
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return (init_settings,)

    options = SettingsConfigDict(
        cli_avoid_json=True,
        cli_hide_none_type=True,
        cli_parse_none_str="null",
    )

    class Training(OnlyArguments, BaseSettings, Config):
        """Settings of one run. The YAML file can contain each of them too."""

        model_config = SettingsConfigDict(**options)

    class OnDataset(OnlyArguments, BaseSettings, OfflineConfig):
        """Settings of one run on a dataset. The YAML file can contain each of them too."""

        model_config = SettingsConfigDict(**options)

    return Training if kind is Config else OnDataset


def explain(error: ValidationError, kind: type[BaseModel] = Config) -> str:
    """One line that gives field, value and fix for each error of a config of this kind."""
    return "; ".join(_explain_one(item, kind) for item in error.errors())


def field_names(section: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Dotted names of all settings, depth first."""
    names: list[str] = []
    for name, field in section.model_fields.items():
        names.append(prefix + name)
        if (inner := section_of(field.annotation)) is not None:
            names += field_names(inner, f"{prefix}{name}.")
    return names


def section_of(annotation: object) -> type[Section] | None:
    """The class of a section, which may be optional; None for the annotation of a setting."""
    kinds = get_args(annotation) if get_origin(annotation) is UnionType else (annotation,)
    return next(
        (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None
    )


def _explain_one(item: ErrorDetails, kind: type[BaseModel]) -> str:
    name = ".".join(str(part) for part in item["loc"] if part not in ("(sources)", "(path)"))
    if item["type"] == "extra_forbidden":
        section = name.rpartition(".")[0]
        entry = (
            Source
            if "(sources)" in item["loc"]
            else next(
                (fields for mapping, fields in ENTRIES.items() if section.startswith(mapping)),
                None,
            )
        )
        known = field_names(entry, f"{section}.") if entry else field_names(kind)
        return "; ".join(explain_unknown(leaf, known) for leaf in _leaves(name, item["input"]))
    if item["type"] == "missing":
        or_objective = f", or set objective: {' or '.join(OBJECTIVES)} for a run on a dataset"
        return f"{name} is missing; set it{or_objective if name == 'rollout' else ''}"
    if (way := _way_to_write(item)) is not None:
        return f"{name.removesuffix('.[key]')} = {item['input']!r}: {way}"
    message = item["msg"].removeprefix("Value error, ")
    return f"{name} = {item['input']!r}: {message[0].lower()}{message[1:]}" if name else message


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


def _leaves(name: str, value: object) -> list[str]:
    """The settings inside an unknown section, such as verl's `actor_rollout_ref`."""
    if not isinstance(value, dict) or not value:
        return [name]
    return [leaf for key, inner in value.items() for leaf in _leaves(f"{name}.{key}", inner)]


def _without_braces(overrides: list[str], tree: Mapping[str, Any]) -> list[str]:
    """The overrides with `{runs_root}` replaced. The command line's parser would read a brace in a
    setting that takes a list as the start of JSON."""
    given = dict(pairwise(overrides)).get("--runs_root")
    joined = [word.removeprefix("--runs_root=") for word in overrides if "runs_root=" in word]
    root = root_of_runs(given or next(iter(joined), None) or tree.get("runs_root"))
    plain = (word.replace("${runs_root}", "{runs_root}") for word in overrides)
    return [word.replace("{runs_root}", str(root)) for word in plain]


def _overrides_of_mappings(overrides: list[str]) -> tuple[list[tuple[str, object]], list[str]]:
    """Split off the overrides inside mappings whose keys the user chooses, such as
    `--reward.functions.exact.weight 2`.

    Returns:
        (name, value) of each, with the value read as YAML; and the remaining arguments.

    Raises:
        ConfigError: an override has no value, or its value is not YAML.
    """
    found: list[tuple[str, object]] = []
    remaining: list[str] = []
    words = iter(overrides)
    for word in words:
        name, equals, text = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not f"{name}.".startswith(MAPPINGS):
            remaining.append(word)
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
    return found, remaining


def _overrides_with_null(overrides: list[str]) -> tuple[list[str], list[str]]:
    """Split off the overrides that unset a setting, such as `--eval.data null`. The command line's
    parser would take null as an item of a setting that may be a list.

    Returns:
        The name of each, and the remaining arguments. The last value of a name counts.
    """
    options: list[list[str]] = []
    for word in overrides:
        if word.startswith("--") or not options:
            options.append([word])
        else:
            options[-1].append(word)
    unset: set[str] = set()
    remaining: list[tuple[str, list[str]]] = []
    for words in options:
        name = words[0].removeprefix("--").partition("=")[0]
        unset.discard(name)
        if words in ([f"--{name}", "null"], [f"--{name}=null"]):
            unset.add(name)
            remaining = [option for option in remaining if option[0] != name]
        else:
            remaining.append((name, words))
    return sorted(unset), [word for _, words in remaining for word in words]


def _with_value(tree: object, name: str, value: object, above: str = "") -> dict[str, object]:
    """The tree with one setting replaced.

    Raises:
        ConfigError: its parent is not a mapping.
    """
    key, _, rest = name.partition(".")
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{above} = {tree!r} is not a mapping, so it has no {key!r}; write {above} as a mapping"
        )
    here = f"{above}.{key}" if above else key
    return {**tree, key: _with_value(tree.get(key, {}), rest, value, here) if rest else value}


def _refuse_unknown_overrides(overrides: list[str], kind: type[BaseModel]) -> None:
    known = set(field_names(kind))
    for word in overrides:
        name = word.removeprefix("--").split("=", 1)[0]
        if word.startswith("--") and name not in known:
            raise ConfigError(explain_unknown(name, field_names(kind)))
