"""What `--help` shows of the settings: the sections, one section, or one setting."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from asyncrl.config.load import section_of
from asyncrl.contracts.errors import ConfigError

__all__ = ["sections_help", "settings_help"]

ALL = "all"
"""Shows every setting."""


def sections_help(kind: type[BaseModel], width: int) -> str:
    """The top-level settings of a config of this kind, and its sections in a line each.

    Args:
        width: characters of a line.
    """
    sections = {
        name: section
        for name, field in kind.model_fields.items()
        if (section := section_of(field.annotation)) is not None
    }
    top = [one for name, field in _fields(kind) if "." not in name for one in _entry(name, field)]
    return "\n".join(
        [
            "settings, for the YAML file, or after CONFIG as --NAME VALUE:",
            *_wrapped(top, width),
            "",
            "sections (show one with --help SECTION, everything with --help all):",
            *(_summary(name, section, width) for name, section in sections.items()),
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
            (name, field)
            for name, field in _fields(kind)
            if asked in (ALL, name) or name.startswith(f"{asked}.")
        ]
        if found:
            return "\n".join(_wrapped([line for one in found for line in _entry(*one)], width))
    names = [name for name, _ in _fields(kinds[0])]
    sections = {name.rpartition(".")[0] for name in names if "." in name}
    near = difflib.get_close_matches(asked, [*names, *sections], n=1) or [
        name for name in names if name.rpartition(".")[2] == asked
    ]
    raise ConfigError(
        f"--help {asked}: no setting or section has this name; "
        + (f"did you mean {near[0]}?" if near else f"use one of {', '.join(sorted(sections))}")
    )


def _fields(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Dotted name and field of each setting, depth first. A section is none."""
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if inner is None:
            yield prefix + name, field
        else:
            yield from _fields(inner, f"{prefix}{name}.")


def _summary(name: str, section: type[BaseModel], width: int) -> str:
    """A section and its first settings, as many as fit in a line."""
    names = textwrap.shorten(", ".join(section.model_fields), max(width - 16, 40), placeholder=" …")
    return f"  {name:14}{names}"


def _entry(name: str, field: FieldInfo) -> Iterator[str]:
    """The option with its values and default, and then its meaning, which is indented."""
    default = "required" if field.is_required() else _default(field)
    yield f"  --{name} {_values(field.annotation)}" + (f"   ({default})" if default else "")
    yield "      " + " ".join((field.description or "").split())


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, bool):
        value = str(value).lower()
    return "" if value is None else f"default: {value if value != '' else '(empty)'}"


def _values(annotation: Any) -> str:
    """What can be written as the value: choices, or the kind of value."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _values(get_args(annotation)[0])
    if origin is Literal:
        return "{" + ",".join(str(choice) for choice in get_args(annotation)) + "}"
    if origin in (Union, UnionType):
        inner = [_values(kind) for kind in get_args(annotation) if kind is not NoneType]
        return "|".join(dict.fromkeys(inner))
    names = {bool: "{true,false}", int: "INTEGER", float: "NUMBER", str: "TEXT"}
    return names.get(annotation, "JSON")


def _wrapped(lines: list[str], width: int) -> list[str]:
    """The lines, each wrapped with its own indentation."""
    found = []
    for line in lines:
        indent = line[: len(line) - len(line.lstrip())]
        found += textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False)
    return found
