"""The names of settings, and the field of each."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from functools import cache
from itertools import pairwise
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from asyncrl.contracts.section import Section, key_of, kinds_of, name_of


class Setting(NamedTuple):
    """A setting of some kind of config."""

    name: str
    """Dotted."""
    field: FieldInfo
    choice: str
    """The alternatives of a choice that have it, as `with loss: ppo`; "" if all have it."""


def section_of(annotation: object) -> type[Section] | None:
    """The class of a section, which may be optional; None for a setting or a choice."""
    kinds = kinds_of(annotation)
    return kinds[0] if len(kinds) == 1 else None


@cache
def described(kind: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of a section, with the text below each in the source as its description. Only
    help and docs need it, and pydantic's own reading takes a quarter of the import."""
    texts: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        if issubclass(one, BaseModel):
            texts |= _texts_in(one.__module__).get(one.__name__, {})
    fields = {name: copy(field) for name, field in kind.model_fields.items()}
    for name, field in fields.items():
        field.description = texts.get(name)
    return fields


@cache
def _texts_in(module: str) -> dict[str, dict[str, str]]:
    """Class of a module → field → the text below it in the source."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return {node.name: dict(_texts_of(node)) for node in classes}


def _texts_of(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, text in pairwise(node.body):
        match field, text:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(written))),
            ):
                yield name, inspect.cleandoc(written)


def settings_of(kind: type[BaseModel], prefix: str = "") -> Iterator[Setting]:
    """Every setting, depth first. A section is none. A choice is one, before the settings of its
    alternatives. A name appears again where alternatives have different settings of that name."""
    for name, field in described(kind).items():
        dotted, kinds = f"{prefix}{name}", kinds_of(field.annotation)
        if len(kinds) != 1:
            yield Setting(dotted, field, "")
        found: list[tuple[Setting, list[type[Section]]]] = []
        for one in kinds:
            for setting in settings_of(one, f"{dotted}."):
                same = next((some for known, some in found if _equal(known, setting)), None)
                if same is not None:
                    same.append(one)
                elif not by_name(kinds) or setting.name != f"{dotted}.name":
                    found.append((setting, [one]))
        for setting, some in found:
            choice = "" if len(some) == len(kinds) else alternatives(name, some, kinds)
            yield setting._replace(choice=setting.choice or choice)


def _equal(one: Setting, other: Setting) -> bool:
    """Whether two alternatives have the same setting, with the same values and default."""
    shown = [
        (setting.name, field.annotation, field.get_default(), field.description, setting.choice)
        for setting in (one, other)
        for field in [setting.field]
    ]
    return shown[0] == shown[1]


def by_name(kinds: Sequence[type[Section]]) -> bool:
    """Whether these are the alternatives of a choice by name."""
    return len(kinds) > 1 and all("name" in kind.model_fields for kind in kinds)


def alternatives(name: str, some: Sequence[type[Section]], kinds: Sequence[type[Section]]) -> str:
    """How to choose one of some alternatives of a choice: `with loss: ppo or gspo`, `with attach`
    or `without attach`."""
    if by_name(kinds):
        return f"with {name}: {_either([name_of(kind) or 'your own' for kind in some])}"
    if all(key_of(kind) for kind in some):
        return f"with {_either([key_of(kind) for kind in some])}"
    return f"without {_either([key_of(kind) for kind in kinds if kind not in some])}"


def _either(names: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def field_names(kind: type[BaseModel], prefix: str = "") -> list[str]:
    """Dotted names of all settings and sections, depth first."""
    names: list[str] = []
    for name, field in kind.model_fields.items():
        names.append(prefix + name)
        for one in kinds_of(field.annotation):
            inner = field_names(one, f"{prefix}{name}.")
            names += [key for key in inner if key not in names]
    return names


def find(kind: type[BaseModel], name: str) -> FieldInfo | None:
    """The field of a dotted name; None if there is none. The first one where several alternatives
    of a choice have it."""
    return next(find_all(kind, name), None)


def find_all(kind: type[BaseModel], name: str) -> Iterator[FieldInfo]:
    """The fields of a dotted name: several where alternatives of a choice have it. In mappings with
    keys of the user, such as reward.functions, every key has one, and so has every number in a
    list."""
    first, _, rest = name.partition(".")
    field = kind.model_fields.get(first)
    if field is None:
        return
    if not rest:
        yield field
        return
    mapped = _entries_of(field.annotation)
    if mapped is not None:
        rest = rest.partition(".")[2]
    kinds = kinds_of(field.annotation if mapped is None else mapped)
    if mapped is not None and not (rest and kinds):
        yield FieldInfo(annotation=mapped)
        return
    for one in kinds:
        yield from find_all(one, rest)


def known_names(kind: type[BaseModel], name: str) -> list[str]:
    """The dotted names that an unknown one may mean: those of the entry of a mapping or list that
    it is in, or else of all settings."""
    known, prefix = field_names(kind), name.rpartition(".")[0]
    entry = find(kind, prefix) if prefix and prefix not in known else None
    for inner in () if entry is None else kinds_of(entry.annotation):
        known = field_names(inner, f"{prefix}.")
    return known


def has_parts(field: FieldInfo) -> bool:
    """Whether a setting has others below it."""
    return bool(kinds_of(field.annotation)) or _entries_of(field.annotation) is not None


def _entries_of(annotation: Any) -> Any:
    """What the values of a mapping or the items of a list are; None of a single value."""
    origin = get_origin(annotation)
    if origin in (Union, UnionType, Annotated):
        inner = (_entries_of(one) for one in get_args(annotation))
        return next((one for one in inner if one is not None), None)
    if origin in (dict, Mapping):
        return get_args(annotation)[1]
    return get_args(annotation)[0] if origin in (list, tuple) else None
