"""Sections of the settings, and choices: settings with alternatives that have settings of their
own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema


class Section(BaseModel):
    """A section of the settings. Unknown keys are refused, and values cannot be changed."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )


@dataclass(frozen=True)
class ByName:
    """Marks a choice by `name`: `Annotated[Ppo | Gspo | OwnLoss, ByName("ppo")]`. In YAML it is a
    mapping with `name` and the settings of that alternative, or only the name.

    Each alternative is a section with a field `name`. That of one for functions of the user has no
    default, and takes every name with a colon.
    """

    default: str
    """The name of a mapping without one; "" if it must have one."""
    own: str = "your own function as package.module:function"
    """What else a name may be, for messages, if an alternative has no name of its own."""

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        kinds = {name_of(kind): kind for kind in kinds_of(source)}
        names = [name for name in kinds if name]

        def with_name(value: object) -> object:
            if isinstance(value, Section):
                return value
            tree = value if isinstance(value, dict) else {"name": value}
            name = tree.get("name", self.default)
            if name not in names and not ("" in kinds and ":" in str(name)):
                own = f", or {self.own}" if "" in kinds else ""
                raise ValueError(f"use one of {', '.join(names)}{own}")
            return {**tree, "name": name}

        def name_in(value: Any) -> str:
            name = value.get("name") if isinstance(value, dict) else getattr(value, "name", "")
            return name if name in names else ""

        return _choice(kinds, name_in, with_name, handler)


@dataclass(frozen=True)
class Short:
    """Marks a section that a single value stands for: `Annotated[Truncation, Short("level")]`."""

    key: str | Callable[[object], str]
    """The field that has this value, or what says it of a value. The others have their defaults."""

    def whole(self, value: object) -> dict[str, object]:
        """The mapping that a single value stands for."""
        return {self.key if isinstance(self.key, str) else self.key(value): value}

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        def whole(value: object) -> object:
            return value if isinstance(value, dict | Section | None) else self.whole(value)

        return core_schema.no_info_before_validator_function(whole, handler(source))


@dataclass(frozen=True)
class ByKey:
    """Marks a choice by the key that only one alternative has: `Annotated[Attached | Own,
    ByKey()]`. Each alternative names that field in its `KEY`. One without is what is left. A key
    with the value null counts as left out."""

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        kinds = {key_of(kind): kind for kind in kinds_of(source)}

        def key_in(value: Any) -> str:
            given = value if isinstance(value, dict) else type(value).model_fields
            return next((key for key in kinds if key in given), "")

        def has_key(value: object) -> object:
            if not isinstance(value, dict):
                return value
            tree = {key: one for key, one in value.items() if key not in kinds or one is not None}
            given = [key for key in kinds if key in tree]
            if len(given) > 1:
                raise ValueError(f"give only one of {', '.join(given)}")
            if not given and "" not in kinds:
                raise ValueError(f"give one of {', '.join(kinds)}")
            return tree

        return _choice(kinds, key_in, has_key, handler)


def _choice(
    kinds: dict[str, type[Section]],
    tag_of: Callable[[Any], str],
    before: Callable[[object], object],
    handler: GetCoreSchemaHandler,
) -> CoreSchema:
    """The schema of a choice. Locations in errors name the alternative in parentheses."""

    def tag(value: object) -> str | None:
        known = isinstance(value, dict | Section)
        return f"({tag_of(value)})" if known else None

    union = core_schema.tagged_union_schema(
        {f"({name})": handler.generate_schema(kind) for name, kind in kinds.items()},
        tag,
        custom_error_type="dict_type",
    )
    return core_schema.no_info_before_validator_function(before, union)


def kinds_of(annotation: object) -> tuple[type[Section], ...]:
    """The sections that a setting may have: one of a section, several of a choice, none of a plain
    value."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return kinds_of(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return tuple(kind for item in get_args(annotation) for kind in kinds_of(item))
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return (annotation,)
    return ()


def name_of(kind: type[Section]) -> str:
    """The name of an alternative; "" if it has none, as that of functions of the user."""
    default = kind.model_fields["name"].default if "name" in kind.model_fields else None
    return default if isinstance(default, str) else ""


def key_of(kind: type[Section]) -> str:
    """The key that only this alternative has; "" if it has none."""
    return str(getattr(kind, "KEY", ""))


def _unset(value: object) -> object:
    return None if value == "auto" else value


Unset = BeforeValidator(_unset)
"""Turns `auto` into None. Then the value is derived from other settings (`asyncrl.config.config`).
"""
