"""What `--help` shows of the settings: the sections, one section, or one setting."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterator, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from asyncrl.config.fields import Setting, described, settings_of
from asyncrl.contracts.errors import ConfigError
from asyncrl.contracts.section import Section, key_of, kinds_of, name_of

ALL = "all"
"""Shows every setting."""


def sections_help(kind: type[BaseModel], width: int) -> str:
    """The top-level settings of a config of this kind, and its sections in a line each.

    Args:
        width: characters of a line.
    """
    fields = described(kind)
    sections = {
        name: kinds for name, field in fields.items() if (kinds := kinds_of(field.annotation))
    }
    plain = [Setting(name, field, "") for name, field in fields.items() if name not in sections]
    top = [line for one in plain for line in _entry(one)]
    return "\n".join(
        [
            "settings, for the YAML file, or after CONFIG as --NAME VALUE:",
            *_wrapped(top, width),
            "",
            "sections (show one with --help SECTION, everything with --help all):",
            *(_summary(name, kinds, width) for name, kinds in sections.items()),
        ]
    )


def settings_help(kinds: tuple[type[BaseModel], ...], asked: str, width: int) -> str:
    """The settings of a section, a setting, or all, from the first kind of config that has them.

    Args:
        asked: a dotted name, or `all`.

    Raises:
        ConfigError: no kind has it.
    """
    asked = asked.removeprefix("--")
    for kind in kinds:
        found = [
            one
            for one in settings_of(kind)
            if asked in (ALL, one.name) or one.name.startswith(f"{asked}.")
        ]
        if found:
            return "\n".join(_wrapped([line for one in found for line in _entry(one)], width))
    names = [one.name for one in settings_of(kinds[0])]
    sections = {name.rpartition(".")[0] for name in names if "." in name}
    near = difflib.get_close_matches(asked, [*names, *sections], n=1) or [
        name for name in names if name.rpartition(".")[2] == asked
    ]
    raise ConfigError(
        f"--help {asked}: no setting or section has this name; "
        + (f"did you mean {near[0]}?" if near else f"use one of {', '.join(sorted(sections))}")
    )


def _summary(name: str, kinds: Sequence[type[Section]], width: int) -> str:
    """A section and its first settings, as many as fit in a line. Of a choice: the keys that choose
    an alternative, and those of all of them."""
    keys = filter(None, map(key_of, kinds))
    fields = dict.fromkeys([*keys, *(field for kind in kinds for field in kind.model_fields)])
    names = textwrap.shorten(", ".join(fields), max(width - 16, 40), placeholder=" …")
    return f"  {name:14}{names}"


def _entry(setting: Setting) -> Iterator[str]:
    """The option with its values and default, and then its meaning, which is indented."""
    name, field, choice = setting
    default = "required" if field.is_required() else _default(field)
    notes = ", ".join(filter(None, [default, choice]))
    yield f"  --{name} {_values(field.annotation)}" + (f"   ({notes})" if notes else "")
    yield "      " + " ".join((field.description or "").split())
    for kind in kinds_of(field.annotation):
        if meaning := " ".join((kind.__doc__ or "").split()):
            yield f"      {name_of(kind) or key_of(kind) or 'otherwise'}: {meaning}"


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Section):
        value = getattr(value, "name", None)
    if isinstance(value, bool):
        value = str(value).lower()
    return "" if value is None else f"default: {value if value != '' else '(empty)'}"


def _values(annotation: Any) -> str:
    """What can be written as the value: choices, or the kind of value."""
    kinds = kinds_of(annotation)
    if kinds:
        choices = [name_of(kind) for kind in kinds if name_of(kind)]
        return "{" + ",".join(choices) + "}" if choices else "YAML"
    origin = get_origin(annotation)
    if origin is Annotated:
        return _values(get_args(annotation)[0])
    if origin is Literal:
        return "{" + ",".join(str(choice) for choice in get_args(annotation)) + "}"
    if origin in (Union, UnionType):
        inner = [_values(kind) for kind in get_args(annotation) if kind is not NoneType]
        return "|".join(dict.fromkeys(inner))
    names = {bool: "{true,false}", int: "INTEGER", float: "NUMBER", str: "TEXT"}
    return names.get(annotation, "YAML")


def _wrapped(lines: list[str], width: int) -> list[str]:
    """The lines, each wrapped with its own indentation."""
    found = []
    for line in lines:
        indent = line[: len(line) - len(line.lstrip())]
        found += textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False)
    return found
