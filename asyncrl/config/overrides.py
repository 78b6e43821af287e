"""Settings on the command line: `--rollout.temperature 0.8`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from asyncrl.config.aliases import explain_unknown
from asyncrl.config.fields import find, find_all, has_parts, known_names
from asyncrl.contracts.errors import ConfigError
from asyncrl.contracts.section import ByName, Short, key_of, kinds_of, name_of
from asyncrl.runtime.files.yaml_files import parse_yaml


def with_overrides(
    tree: Mapping[str, Any], overrides: list[str], kind: type[BaseModel]
) -> dict[str, Any]:
    """The settings with these on top, sections before the settings in them. The last value of a
    name counts. A key or a name that chooses another alternative of a section leaves out the
    settings that this one does not have, or has with another default.

    Raises:
        ConfigError: an option is unknown, has no value, or its value is not YAML.
    """
    found, values = dict(tree), []
    for name, texts in _options(overrides):
        field = find(kind, name)
        if field is None:
            raise ConfigError(_unknown(name, texts, kind).replace("\n", "\\n"))
        value, choice = _read(name, texts, field), name.removesuffix(".name")
        if choice != name and isinstance(_short(find(kind, choice)), ByName):
            name = choice  # `--algorithm.loss.name gspo` is `--algorithm.loss gspo`
        values.append((name, value))
    for name, value in values:
        parts = name.split(".") if value is not None else []
        for end in range(1, len(parts) + 1):
            found = _of_alternative(found, ".".join(parts[:end]), kind)
    for name, value in sorted(values, key=lambda one: one[0].count(".")):
        whole = _with_the_others(value, _at(found, name), find(kind, name))
        found = _with_value(found, name, whole, kind, "")
    return found


def _of_alternative(tree: dict[str, Any], name: str, kind: type[BaseModel]) -> dict[str, Any]:
    """The tree without the settings of other alternatives than the one whose key this is, and
    without those that had another default."""
    above, _, key = name.rpartition(".")
    section = _at(tree, above)
    if isinstance(section, str):
        section = _whole(section, find(kind, above))
    kinds = [one for field in find_all(kind, above) for one in kinds_of(field.annotation)]
    chosen = next((one for one in kinds if key_of(one) == key), None)
    if chosen is None or not isinstance(section, dict):
        return tree
    field = find(kind, above)
    before = (field and _alternative(section, field)) or chosen
    known = {name for one in kinds for name in one.model_fields} - {key}
    kept = {
        name: value
        for name, value in section.items()
        if name not in known or _stays(name, before, chosen)
    }
    return _with_value(tree, above, kept, kind, "")


def _with_the_others(value: object, now: object, field: FieldInfo | None) -> object:
    """A single value of a choice or section, with the settings beside it that the chosen
    alternative has, too, with the same default. Those of a function of the user's own go."""
    whole = value if field is None or isinstance(value, dict) else _whole(value, field)
    if field is None or not isinstance(whole, dict) or not isinstance(now, dict):
        return value
    fitting = []
    before = _alternative(now, field)
    for one in kinds_of(field.annotation):
        kept = {name: old for name, old in now.items() if _stays(name, before or one, one)}
        if "name" in one.model_fields and not name_of(one):
            kept = {}
        with contextlib.suppress(ValidationError, ConfigError):
            one.model_validate({**kept, **whole})
            fitting.append({**kept, **whole})
    return max(fitting, key=len, default=value)


def _alternative(value: object, field: FieldInfo) -> type[BaseModel] | None:
    """The alternative of a choice that a value is; None of an invalid value."""
    with contextlib.suppress(ValidationError, ConfigError):
        return type(_taken(value, field))
    return None


def _stays(name: str, before: type[BaseModel], after: type[BaseModel]) -> bool:
    """Whether a setting of one alternative stays with another, which has it with that default."""
    old, new = before.model_fields.get(name), after.model_fields.get(name)
    return new is not None and (old is None or old.get_default() == new.get_default())


def _at(tree: object, name: str) -> object:
    for key in name.split("."):
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _unknown(name: str, texts: list[str], kind: type[BaseModel]) -> str:
    above = name.rpartition(".")[0]
    parent = find(kind, above)
    if parent is not None and not has_parts(parent):
        return f"{name} is unknown: {above} is a single value; write --{above} VALUE"
    value: object = texts
    with contextlib.suppress(yaml.YAMLError):
        value = parse_yaml(" ".join(texts))
    return explain_unknown(name, known_names(kind, name), value)


def _options(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    """(name, values) of each option.

    Raises:
        ConfigError: a word belongs to no option, or an option has no value.
    """
    options: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            name, equals, text = word[2:].partition("=")
            options.append((name, [text] if equals else []))
        elif options:
            options[-1][1].append(word)
        else:
            raise ConfigError(
                f"command line: {word!r} belongs to no option; options look like"
                " --learner.learning_rate 1e-6"
            )
    for name, texts in options:
        if not texts:
            raise ConfigError(f"--{name} has no value; write --{name} VALUE")
        yield name, texts


def _read(name: str, texts: list[str], field: FieldInfo) -> object:
    """The value of an option: what the setting takes, as YAML or as text. A setting that takes text
    only has it as it is. Several words, or words with commas between them, are a list where the
    setting takes one.

    Raises:
        ConfigError: it is not YAML.
    """
    if len(texts) > 1:
        return [_read(name, [text], FieldInfo(annotation=Any)) for text in texts]
    text = texts[0]
    if text == "null":  # also where a setting takes text: it resets the setting
        return None
    if _is_text(field.annotation):
        return text
    candidates: list[object] = [text]
    is_yaml = text.strip()[:1] in ("[", "{") and not text.strip().startswith("{runs_root}")
    try:
        candidates.insert(0, parse_yaml(text))
    except yaml.YAMLError as error:
        if is_yaml:
            raise ConfigError(
                f"--{name} = {text!r} cannot be used as YAML: {' '.join(str(error).split())}"
            ) from None
    if "," in text and not is_yaml and _takes_list(field.annotation):
        candidates.insert(0, text.split(","))
    for candidate in candidates:
        with contextlib.suppress(ValidationError, ConfigError):
            _taken(candidate, field)
            return candidate
    return candidates[0]


def _taken(value: object, field: FieldInfo) -> Any:
    """What a setting makes of a value. Raises ValidationError, and ConfigError."""
    marks = field.metadata
    whole: Any = Annotated[(field.annotation, *marks)] if marks else field.annotation
    return TypeAdapter(whole).validate_python(value)


def _is_text(annotation: Any) -> bool:
    """Whether a setting takes text only."""
    if get_origin(annotation) is Annotated:
        return _is_text(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return all(kind is NoneType or _is_text(kind) for kind in get_args(annotation))
    return annotation is str


def _takes_list(annotation: Any) -> bool:
    return get_origin(annotation) in (list, tuple) or any(map(_takes_list, get_args(annotation)))


def _with_value(
    tree: object, name: str, value: object, kind: type[BaseModel], above: str
) -> dict[str, Any]:
    """The tree with one setting replaced.

    Raises:
        ConfigError: its parent is not a mapping.
    """
    key, _, rest = name.partition(".")
    if isinstance(tree, str | int | float) and above:
        tree = _whole(tree, find(kind, above))
    if isinstance(tree, list):
        raise ConfigError(f"{above} is a list, and an option sets all of it; write --{above} '[…]'")
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{above} = {tree!r} is not a mapping, so it has no {key!r}; write {above} as a mapping"
        )
    here = f"{above}.{key}" if above else key
    inner = tree.get(key)
    if rest:
        value = _with_value({} if inner is None else inner, rest, value, kind, here)
    return {**tree, key: value}


def _whole(value: object, field: FieldInfo | None) -> object:
    """The mapping that a single value of a choice or section stands for."""
    mark = _short(field)
    if isinstance(mark, Short):
        return mark.whole(value)
    return value if mark is None else {"name": value}


def _short(field: FieldInfo | None) -> ByName | Short | None:
    """How a single value stands for a section; None if it does not."""
    marks = [] if field is None else [*field.metadata, *_metadata(field.annotation)]
    return next((mark for mark in marks if isinstance(mark, ByName | Short)), None)


def _metadata(annotation: Any) -> list[object]:
    inner = [one for part in get_args(annotation) for one in _metadata(part)]
    return [*getattr(annotation, "__metadata__", ()), *inner]
