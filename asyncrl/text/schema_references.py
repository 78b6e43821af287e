"""Schemas of tools without references.

Pydantic and many servers write the schema of a nested model once, and refer to it. Chat templates
write such a reference as it is, and parsers do not follow it. So references are resolved before.
Anybody may have sent a schema, so a library that reads any document does not serve: the work and
the result are bounded here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from asyncrl.text.schemas import ALL, types_of

MOST_PARTS, MOST_IN_ALL = 5_000, 50_000
"""Schemas that the schemas with references of one tool, and of all tools of a list, may stand for.
A few references can stand for very many."""
MOST_CHARACTERS = 1_000_000
"""Characters of JSON for which all tools of a list may stand, without the names of keywords."""
DEEPEST = 64
"""Levels of nested schemas."""
LONGEST_ADDRESS, MOST_ADDRESSES = 500, 1_000
"""Characters of an `$id` with those around it, and how many `$id` and `$anchor` a schema has."""
SCHEMAS = ("parameters", "input_schema", "return")
"""Where a tool has a schema."""
SMALLER = "without its references; make it smaller"
NAMED = ("properties", "patternProperties", "dependentSchemas", "dependencies")
LISTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SINGLE = (
    "items",
    "additionalItems",
    "additionalProperties",
    "unevaluatedItems",
    "unevaluatedProperties",
    "contains",
    "propertyNames",
    "contentSchema",
    "not",
    "if",
    "then",
    "else",
)
DEFINITIONS = ("$defs", "definitions")
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
INTERACTING = (
    ("properties", "patternProperties", "additionalProperties"),
    ("prefixItems", "items", "additionalItems"),
    ("contains", "minContains", "maxContains"),
    ("if", "then", "else"),
)
"""Keywords whose meaning depends on the others of the same schema."""
OPEN = ("properties", "patternProperties", "additionalProperties", "items", "additionalItems")
"""Those that say nothing if they are true or empty."""
UNEVALUATED = ("unevaluatedProperties", "unevaluatedItems")
"""Keywords whose meaning depends on all of the schema, with the parts of its `allOf`."""
NOTES = ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly")
"""Keywords that say nothing of the values."""


class SchemaError(ValueError):
    """The schema of a tool cannot be read. The message is one line and names the tool."""


class PartsLeft:
    """What the tools of a list may still stand for: schemas, and characters."""

    def __init__(self) -> None:
        self.schemas, self.characters = MOST_IN_ALL, MOST_CHARACTERS


def resolved_tool(tool: Mapping[str, Any], parts: PartsLeft | None = None) -> Mapping[str, Any]:
    """The tool with no reference in its schemas, and with `allOf` as one schema where that says the
    same. Where a schema contains itself, the inner one has only its type, title and description.

    Args:
        parts: shared by the tools of a list.

    Raises:
        SchemaError: a reference leads nowhere, or the schemas are too large or nested too deeply.
    """
    function = tool.get("function", tool)
    if not isinstance(function, Mapping):
        return tool
    parts = parts or PartsLeft()
    name, found = str(function.get("name")), {}
    for word in SCHEMAS:
        if isinstance(schema := function.get(word), Mapping):
            text = _text(schema, name)
            _refuse_deep(schema, name)
            if any(f'"{key}"' in text for key in (*REFERENCES, "allOf")):
                # A schema of Python may have the same object in several places.
                found[word] = _Resolution(name, json.loads(text), parts).schema()
    if not found:
        return tool
    function = {**function, **found}
    return {**tool, "function": function} if "function" in tool else function


def _text(schema: object, name: str) -> str:
    try:
        return json.dumps(schema, default=str, ensure_ascii=False)
    except (RecursionError, TypeError, ValueError) as error:
        raise SchemaError(f"the schema of the tool {name[:64]!r} cannot be read: {error}") from None


def _refuse_deep(schema: Any, name: str) -> None:
    """Raise SchemaError for too many levels: whoever reads a schema calls itself for each."""
    level, depth = [schema], 0
    while level := [inner for one in level if isinstance(one, Mapping) for inner in _inner(one)]:
        depth += 1
        if depth > DEEPEST:
            raise SchemaError(
                f"the schema of the tool {name[:64]!r} has more than {DEEPEST} levels; make it"
                " smaller"
            )


class _Resolution:
    """Resolves the references of one schema."""

    def __init__(self, tool: str, root: Mapping[str, Any], parts: PartsLeft) -> None:
        self._tool, self._root, self._left, self._parts = tool[:64], root, MOST_PARTS, parts
        self._addresses: dict[str, Any] = {"": root}
        """Schemas by `$id`, and by `$id#$anchor`."""
        self._joined: dict[tuple[str, Any], Any] = {}
        """The base around a schema and its `$id` → its own base."""
        self._bases: dict[int, str] = {}
        """Id of a schema → the `$id` to which its references are relative."""
        self._targets: dict[tuple[str, str], Any] = {}
        self._characters: dict[int, int] = {}
        self._kinds: dict[int, frozenset[str]] = {}

    def schema(self) -> Any:
        """The schema without references. Raises SchemaError."""
        self._index(self._root, "")
        return self._resolved(self._root, (id(self._root),), 0)

    def _index(self, schema: Any, base: str) -> None:
        """Find the addresses and anchors of a schema, and of those in it."""
        found = [(schema, base)]
        while found:
            schema, base = found.pop()
            if isinstance(schema, Mapping) and id(schema) not in self._bases:
                base = self._base(schema.get("$id"), base)
                self._bases[id(schema)] = base
                if base and schema.get("$id"):
                    self._addresses.setdefault(base, schema)
                if isinstance(anchor := schema.get("$anchor"), str):
                    self._addresses[f"{base}#{anchor}"] = schema
                if str(schema.get("$id")).startswith("#"):
                    self._addresses.setdefault(f"{base}{schema['$id']}", schema)
                if max(len(self._addresses), len(self._joined)) > MOST_ADDRESSES:
                    raise self._error(f"has more than {MOST_ADDRESSES} $id and $anchor; use fewer")
                found += [(inner, base) for inner in _inner(schema)]

    def _base(self, address: Any, base: str) -> str:
        """The base of a schema with this `$id`. One that begins with # is an old anchor."""
        if address is None or address == "" or str(address).startswith("#"):
            return base
        try:
            if (base, address) not in self._joined:
                self._joined[base, address] = urldefrag(urljoin(base, address)).url
            joined = self._joined[base, address]
        except (AttributeError, TypeError, ValueError):
            joined = None
        if not isinstance(joined, str) or len(joined) > LONGEST_ADDRESS:
            raise self._error(f"has $id = {str(address)[:80]!r}, which is no address")
        return joined

    def _resolved(self, schema: Any, within: tuple[int, ...], depth: int) -> Any:
        """Args: within: ids of the schemas that references led to, down to this one."""
        self._count(schema)
        if not isinstance(schema, Mapping):
            return schema
        if depth > DEEPEST:
            raise self._error(f"has more than {DEEPEST} levels {SMALLER}")
        if unknown := [name for name in REFERENCES[1:] if schema.get(name) is not None]:
            raise self._error(f"uses {unknown[0]}, which is not read; use $ref")
        own = {
            key: self._part(key, value, within, depth + 1)
            for key, value in schema.items()
            if key not in (*DEFINITIONS, "$ref")
        }
        parts = own.pop("allOf", None) or []
        if not isinstance(parts, list):
            raise self._error(f"has allOf = {str(parts)[:80]!r}; give a list of schemas")
        if (ref := schema.get("$ref")) is not None:
            target = self._target(ref, self._bases[id(schema)])
            parts = [self._followed(target, str(ref), within, depth), *parts]
        return _all_of(parts, own) if parts else own

    def _part(self, key: str, value: Any, within: tuple[int, ...], depth: int) -> Any:
        """The value of a keyword. Only those that are schemas are read: a default is data."""
        if key in NAMED and isinstance(value, Mapping):
            return {name: self._resolved(one, within, depth) for name, one in value.items()}
        if key in LISTED and isinstance(value, list):
            return [self._resolved(one, within, depth) for one in value]
        return self._resolved(value, within, depth) if key in SINGLE else value

    def _followed(self, target: Any, ref: str, within: tuple[int, ...], depth: int) -> Any:
        """What a reference stands for."""
        if id(target) not in within:
            return self._resolved(target, (*within, id(target)), depth + 1)
        self._count(target)
        if id(target) not in self._kinds:
            self._kinds[id(target)] = types_of(target)
        return _cut(target, ref.rpartition("/")[2].lstrip("#"), self._kinds[id(target)])

    def _target(self, ref: Any, base: str) -> Any:
        """The schema that a reference leads to."""
        try:
            if (base, ref) in self._targets:
                return self._targets[base, ref]
            target, base_there = self._found(ref, base)
        except (AttributeError, LookupError, TypeError, ValueError):
            raise self._error(
                f"refers to {str(ref)[:80]!r}, which it does not contain; write that schema"
                " instead of the reference"
            ) from None
        self._index(target, base_there)
        self._targets[base, ref] = target
        return target

    def _found(self, ref: str, base: str) -> tuple[Any, str]:
        """The schema, and the base around it. Raises LookupError, and ValueError: there is none."""
        uri, fragment = (base, ref[1:]) if ref.startswith("#") else urldefrag(urljoin(base, ref))
        if fragment and not fragment.startswith("/"):
            return self._addresses[f"{uri}#{fragment}"], uri
        found = self._addresses[uri]
        for step in unquote(fragment).split("/")[1:]:
            if isinstance(found, Mapping):
                found = found[step.replace("~1", "/").replace("~0", "~")]
            elif isinstance(found, list) and step.isdecimal():
                found = found[int(step)]
            else:
                raise LookupError(step)
            uri = self._bases.get(id(found), uri)
        if not isinstance(found, Mapping | bool):
            raise LookupError(ref)
        return found, uri

    def _count(self, schema: Any) -> None:
        """Count a schema, and what it says itself. Raises SchemaError if it is too much."""
        if id(schema) not in self._characters:
            self._characters[id(schema)] = len(_text(_said(schema), self._tool))
        if isinstance(schema, Mapping):
            self._left -= 1
            self._parts.schemas -= 1
        self._parts.characters -= self._characters[id(schema)]
        if self._left < 0:
            raise self._error(f"has more than {MOST_PARTS} parts {SMALLER}")
        for left, what in (
            (self._parts.schemas, f"{MOST_IN_ALL} parts"),
            (self._parts.characters, f"{MOST_CHARACTERS} characters"),
        ):
            if left < 0:
                raise self._error(
                    f"and those before it have more than {what} without their references; give"
                    " fewer tools, or smaller ones"
                )

    def _error(self, what: str) -> SchemaError:
        return SchemaError(f"the schema of the tool {self._tool!r} {what}")


def _inner(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas of which a schema consists, and its definitions."""
    for key, value in schema.items():
        if key in (*NAMED, *DEFINITIONS) and isinstance(value, Mapping):
            yield from value.values()
        elif key in LISTED and isinstance(value, list):
            yield from value
        elif key in SINGLE:
            yield value


def _said(schema: Any) -> Any:
    """What a schema says itself, without those of which it consists."""
    if not isinstance(schema, Mapping):
        return schema
    return [
        (key, [*value] if key in NAMED and isinstance(value, Mapping) else value)
        for key, value in schema.items()
        if key not in (*DEFINITIONS, *SINGLE) and not (key in LISTED and isinstance(value, list))
    ]


def _cut(schema: Mapping[str, Any], name: str, kinds: frozenset[str]) -> dict[str, Any]:
    """A schema within itself: its type, and what it is called."""
    kept = {key: schema[key] for key in ("type", "title", "description") if key in schema}
    if "type" not in kept and kinds != ALL:
        kept["type"] = next(iter(kinds)) if len(kinds) == 1 else sorted(kinds)
    return kept if "title" in kept or not name else {"title": name, **kept}


def _all_of(parts: Sequence[Any], own: Mapping[str, Any]) -> Any:
    """A schema for values that all of `parts` and `own` allow. Where no other keyword says it,
    `allOf` stays."""
    schemas = [part for part in parts if part is not True and part != {}]
    if not schemas:
        return own
    if len(schemas) == 1 and not own and isinstance(schemas[0], Mapping | bool):
        return schemas[0]
    merged = _merged(schemas, own)
    return {**own, "allOf": schemas} if merged is None else merged


def _merged(parts: Sequence[Any], own: Mapping[str, Any]) -> dict[str, Any] | None:
    """One schema for all of these schemas. None: there is no such schema without `allOf`."""
    if any(
        not isinstance(part, Mapping) or any(word in part for word in UNEVALUATED) for part in parts
    ):
        return None
    schemas = [*parts, own]
    if _interact(schemas):
        return None
    merged: dict[str, Any] = {}
    required: dict[str, None] = {}
    properties: dict[str, list[Any]] = {}
    for schema in schemas:
        for key, value in schema.items():
            match key, value:
                case "required", list() if _are_texts(value):
                    required |= dict.fromkeys(value)
                case "properties", Mapping():
                    for name, one in value.items():
                        properties.setdefault(name, []).append(one)
                case (("required" | "properties"), _):
                    return None
                case _ if key in merged and key not in NOTES and not _same(merged[key], value):
                    return None
            merged[key] = value
    if "properties" in merged:
        merged["properties"] = {name: _property(given) for name, given in properties.items()}
    return {**merged, "required": [*required]} if "required" in merged else merged


def _interact(schemas: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a keyword of one of the schemas would act on one of another in a single schema."""
    for words in INTERACTING:
        given = [{word for word in words if _says(schema, word)} for schema in schemas]
        if len([*filter(None, given)]) > 1 and len(set[str]().union(*given)) > 1:
            return True
    return False


def _says(schema: Mapping[str, Any], word: str) -> bool:
    """Whether a schema has this keyword, and it says something."""
    return word in schema and not (word in OPEN and (schema[word] is True or schema[word] == {}))


def _property(given: Sequence[Any]) -> Any:
    """The schema of a property for which several are given."""
    first, *others = given
    return first if all(_same(first, other) for other in others) else _all_of(given, {})


def _same(one: object, other: object) -> bool:
    """Whether two values are the same JSON. Python takes 1 for true."""
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)
