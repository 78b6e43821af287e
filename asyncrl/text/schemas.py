"""JSON schemas of tools: without references, and the values that they allow.

Pydantic and many servers write the schema of a nested model once, and refer to it. Chat templates
write such a reference as it is, and parsers do not follow it. So references are resolved before.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from asyncrl.text.call_texts import Raw, json_text, python_text

MOST_PARTS, MOST_IN_ALL = 5_000, 50_000
"""What the schemas with references of one tool, and of all tools of a list, may stand for. A few
references can stand for very many parts."""
MOST_CHARACTERS = 1_000_000
"""What all tools of a list may be as JSON without references, besides the names of keywords. It is
more than the context of a model has."""
DEEPEST = 64
"""Levels of nested schemas. A reference may have two steps for each."""
SCHEMAS = ("parameters", "input_schema", "return")
"""Where a tool has a schema."""
NAMED = ("properties", "patternProperties", "dependentSchemas")
LISTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SINGLE = (
    "items",
    "additionalItems",
    "additionalProperties",
    "unevaluatedItems",
    "unevaluatedProperties",
    "contains",
    "propertyNames",
    "not",
    "if",
    "then",
    "else",
)
DEFINITIONS = ("$defs", "definitions")
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
INTERACTING = (
    ("properties", "patternProperties", "additionalProperties", "unevaluatedProperties"),
    ("prefixItems", "items", "additionalItems", "unevaluatedItems"),
    ("contains", "minContains", "maxContains", "unevaluatedItems"),
    ("if", "then", "else"),
)
"""Keywords whose meaning depends on the others of the same schema."""
NOTES = ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly")
"""Keywords that say nothing of the values."""
ALL: Final = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
KINDS: Final[Mapping[str, frozenset[str]]] = {
    **{name: frozenset({name}) for name in ALL},
    "number": frozenset({"number", "integer"}),
    # Names of Python's types, which many schemas have.
    "str": frozenset({"string"}),
    "int": frozenset({"integer"}),
    "float": frozenset({"number", "integer"}),
    "bool": frozenset({"boolean"}),
    "dict": frozenset({"object"}),
    "list": frozenset({"array"}),
    "tuple": frozenset({"array"}),
}
HINTS: Final[Mapping[str, Sequence[str]]] = {
    "object": ("properties", "additionalProperties", "patternProperties", "required"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "string": ("pattern", "format", "minLength", "maxLength"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
"""Type → keywords that say it where a schema has no `type`."""


class SchemaError(ValueError):
    """The schema of a tool cannot be read. The message is one line and names the tool."""


class PartsLeft:
    """What the tools of a list may still have without references: schemas, and characters."""

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
            if any(f'"{key}"' in text for key in (*REFERENCES, "allOf")):
                found[word] = _Resolution(name, schema, text, parts).schema()
    if not found:
        return tool
    function = {**function, **found}
    return {**tool, "function": function} if "function" in tool else function


def _text(schema: object, name: str) -> str:
    try:
        return json.dumps(schema, default=str)
    except (RecursionError, ValueError) as error:
        raise SchemaError(f"the schema of the tool {name!r} cannot be read: {error}") from None


class _Resolution:
    """Resolves the references of one schema."""

    def __init__(self, tool: str, root: Mapping[str, Any], text: str, parts: PartsLeft) -> None:
        # Imported here because most tools have no references.
        from referencing import Registry
        from referencing.jsonschema import DRAFT202012

        self._tool, self._root, self._left, self._parts = tool, root, MOST_PARTS, parts
        self._resource = DRAFT202012.create_resource
        self._targets: dict[tuple[int, str], Any] = {}
        self._characters: dict[int, int] = {}
        registry: Any = Registry()
        try:
            self._resolver = registry.resolver_with_root(self._resource(root))
            if '"$anchor"' in text or '"$id"' in text:
                address = self._resource(root).id() or ""
                registry = registry.with_resource(address, self._resource(root)).crawl()
                self._resolver = registry.resolver(address)
        except (AttributeError, TypeError, ValueError):
            raise self._error("has an $id or $anchor that cannot be read; remove it") from None

    def schema(self) -> Any:
        """The schema without references. Raises SchemaError."""
        return self._resolved(self._root, self._resolver, (id(self._root),), 0)

    def _resolved(self, schema: Any, resolver: Any, within: tuple[int, ...], depth: int) -> Any:
        """Args: within: ids of the schemas that references led to, down to this one."""
        self._count(schema)
        if not isinstance(schema, Mapping):
            return schema
        if depth > DEEPEST:
            raise self._error(
                f"has more than {DEEPEST} levels without its references; make it smaller"
            )
        if unknown := [name for name in REFERENCES[1:] if schema.get(name) is not None]:
            raise self._error(f"uses {unknown[0]}, which is not read; use $ref")
        own = {
            key: self._part(key, value, resolver, within, depth + 1)
            for key, value in schema.items()
            if key not in (*DEFINITIONS, "$ref")
        }
        parts = own.pop("allOf", None) or []
        if not isinstance(parts, list):
            raise self._error(f"has allOf = {str(parts)[:80]}; give a list of schemas")
        if schema.get("$ref") is not None:
            parts = [self._target(schema["$ref"], resolver, within, depth), *parts]
        return _all_of(parts, own) if parts else own

    def _part(
        self, key: str, value: Any, resolver: Any, within: tuple[int, ...], depth: int
    ) -> Any:
        """The value of a keyword. Only those that are schemas are read: a default is data."""
        if key in NAMED and isinstance(value, Mapping):
            return {name: self._inner(one, resolver, within, depth) for name, one in value.items()}
        if key in LISTED and isinstance(value, list | tuple):
            return [self._inner(one, resolver, within, depth) for one in value]
        return self._inner(value, resolver, within, depth) if key in SINGLE else value

    def _inner(self, schema: Any, resolver: Any, within: tuple[int, ...], depth: int) -> Any:
        """A schema where it is written. References are relative to the nearest `$id`."""
        if isinstance(schema, Mapping) and "$id" in schema:
            resolver = resolver.in_subresource(self._resource(schema))
        return self._resolved(schema, resolver, within, depth)

    def _target(self, ref: Any, resolver: Any, within: tuple[int, ...], depth: int) -> Any:
        """The schema that a reference leads to."""
        found = self._found(ref, resolver)
        if id(found.contents) in within:
            self._count(found.contents)
            return _cut(found.contents, ref)
        return self._resolved(
            found.contents, found.resolver, (*within, id(found.contents)), depth + 1
        )

    def _found(self, ref: Any, resolver: Any) -> Any:
        """What a reference leads to, and the resolver there."""
        try:
            key = (id(resolver.lookup("#").contents), ref)
            if key not in self._targets:
                steps = ref.count("/") + ref.count("%")
                self._take(steps)
                if steps > 2 * DEEPEST:
                    raise ValueError(ref)
                self._targets[key] = resolver.lookup(ref)
            if isinstance(self._targets[key].contents, Mapping | bool):
                return self._targets[key]
            raise ValueError(ref)
        except SchemaError:
            raise
        except Exception as error:  # another scheme, a bad pointer, no text: any of many classes
            raise self._error(
                f"refers to {str(ref)[:80]!r}, which it does not contain; write that schema"
                " instead of the reference"
            ) from error

    def _count(self, schema: Any) -> None:
        """Count a schema, and what it says itself. Raises SchemaError if it is too much."""
        self._take(1)
        if id(schema) not in self._characters:
            self._characters[id(schema)] = len(_text(_said(schema), self._tool))
        self._parts.characters -= self._characters[id(schema)]
        if self._parts.characters < 0:
            raise self._error(
                f"and those before it have more than {MOST_CHARACTERS} characters without their"
                " references; give fewer tools, or smaller ones"
            )

    def _take(self, parts: int) -> None:
        self._left -= parts
        if self._left < 0:
            raise self._error(
                f"has more than {MOST_PARTS} parts without its references; make it smaller"
            )
        self._parts.schemas -= parts
        if self._parts.schemas < 0:
            raise self._error(
                f"and those before it have more than {MOST_IN_ALL} parts without their references;"
                " give fewer tools, or smaller ones"
            )

    def _error(self, what: str) -> SchemaError:
        return SchemaError(f"the schema of the tool {self._tool!r} {what}")


def _said(schema: Any) -> Any:
    """What a schema says itself, without those that it consists of."""
    if not isinstance(schema, Mapping):
        return schema
    return [
        (key, [*value] if key in NAMED and isinstance(value, Mapping) else value)
        for key, value in schema.items()
        if key not in (*DEFINITIONS, *SINGLE)
        and not (key in LISTED and isinstance(value, list | tuple))
    ]


def _cut(schema: Mapping[str, Any], ref: str) -> dict[str, Any]:
    """A schema within itself: its type, and what it is called."""
    kept = {key: schema[key] for key in ("type", "title", "description") if key in schema}
    kinds = types_of(schema)
    if "type" not in kept and kinds != ALL:
        kept["type"] = next(iter(kinds)) if len(kinds) == 1 else sorted(kinds)
    name = ref.rpartition("/")[2].lstrip("#")
    return kept if "title" in kept or not name else {"title": name, **kept}


def _all_of(parts: Sequence[Any], own: Mapping[str, Any]) -> Any:
    """A schema for values that all of `parts` and `own` allow. Where no other keyword says it,
    `allOf` stays."""
    schemas = [part for part in parts if part is not True]
    merged = _merged([*schemas, own])
    return {**own, "allOf": schemas} if merged is None else merged


def _merged(schemas: Sequence[Any]) -> dict[str, Any] | None:
    """One schema for all of these schemas. None: there is no such schema without `allOf`."""
    if not all(isinstance(schema, Mapping) for schema in schemas) or _interact(schemas):
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
                case _ if key in merged and key not in NOTES and merged[key] != value:
                    return None
            merged[key] = value
    if "properties" in merged:
        joined = {name: _property(given) for name, given in properties.items()}
        if None in joined.values():
            return None
        merged["properties"] = joined
    return {**merged, "required": [*required]} if "required" in merged else merged


def _property(given: Sequence[Any]) -> Any:
    """The schema of a property for which several are given. None: there is none without `allOf`."""
    schemas = [schema for schema in given if schema is not True] or [True]
    if all(schema == schemas[0] for schema in schemas):
        return schemas[0]
    return _merged(schemas)


def _interact(schemas: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a keyword of one of the schemas would act on one of another in a single schema."""
    for words in INTERACTING:
        given = [found for schema in schemas if (found := {*words} & {*schema})]
        if len(given) > 1 and len(set.union(*given)) > 1:
            return True
    return False


def _items(value: object) -> Sequence[Any]:
    """The items of a keyword that is a list. Another value says nothing."""
    return value if isinstance(value, list | tuple) else ()


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def types_of(schema: object) -> frozenset[str]:
    """The JSON types of the values that a schema allows. All of them if it does not say."""
    if not isinstance(schema, Mapping):
        return ALL
    kinds = _declared(schema.get("type"))
    for name in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(name), list | tuple) and options:
            kinds &= frozenset[str]().union(*map(types_of, options))
    for part in _items(schema.get("allOf")):
        kinds &= types_of(part)
    given = [*_items(schema.get("enum")), *([schema["const"]] if "const" in schema else ())]
    if given:
        kinds &= frozenset[str]().union(*map(kinds_of, given))
    if kinds == ALL:
        hinted = [KINDS[kind] for kind, words in HINTS.items() if set(words) & set(schema)]
        kinds = frozenset[str]().union(*hinted) if hinted else kinds
    return (kinds or ALL) | (frozenset({"null"}) if schema.get("nullable") is True else frozenset())


def _declared(given: object) -> frozenset[str]:
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list | tuple) or not names:
        return ALL
    return frozenset[str]().union(*(KINDS.get(str(name).lower(), ALL) for name in names))


def kinds_of(value: object) -> frozenset[str]:
    """The JSON type of a value. A whole number is both types of numbers."""
    match value:
        case None:
            return frozenset({"null"})
        case bool():
            return frozenset({"boolean"})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"number"})
        case str():
            return frozenset({"string"})
        case Mapping():
            return frozenset({"object"})
    return frozenset({"array"})


def property_schema(parameters: object, name: str) -> object:
    """The schema of an argument. True: any value."""
    found = list(_properties(parameters, name))
    if found:
        return found[0] if len(found) == 1 else {"anyOf": found}
    more = parameters.get("additionalProperties") if isinstance(parameters, Mapping) else None
    return more if isinstance(more, Mapping) else True


def _properties(schema: object, name: str) -> Iterator[object]:
    """The schemas of an argument in a schema and in its choices."""
    if not isinstance(schema, Mapping):
        return
    named = schema.get("properties")
    if isinstance(named, Mapping) and name in named:
        yield named[name]
    for key in ("allOf", "anyOf", "oneOf"):
        for one in _items(schema.get(key)):
            yield from _properties(one, name)


def typed(value: object, schema: object) -> object:
    """An argument as a value of its schema. A text stays one if nothing else is allowed, if the
    model wrote it as a text and the schema allows texts, or if it can be nothing else."""
    if not isinstance(value, str):
        return value
    kinds, text = types_of(schema), str(value)
    if "string" in kinds:
        choices = _items(schema.get("enum")) if isinstance(schema, Mapping) else ()
        if kinds == {"string"} or not isinstance(value, Raw) or text in choices:
            return text
    for found in _read(text.strip(), kinds):
        if kinds_of(found) & kinds and not isinstance(found, str):
            return found
    return text


def _read(text: str, kinds: frozenset[str]) -> Iterator[object]:
    """The values that a text may be, the likeliest first."""
    for reads in (json_text, python_text):
        # 04820 is no number of JSON. If a text is allowed, it is one.
        if reads is python_text and "string" in kinds and text[:1] not in ("{", "[", "T", "F", "N"):
            break
        try:
            found = reads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, float) and not math.isfinite(found):
            continue
        yield found
        if isinstance(found, float) and found.is_integer():
            yield int(found)
    if "boolean" in kinds and text.lower() in ("true", "false"):
        yield text.lower() == "true"
    if kinds == {"boolean"} and text in ("0", "1"):
        yield text == "1"
