"""The values that JSON schemas allow, and arguments as such values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from asyncrl.text.call_texts import Raw, json_text, python_text

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


def _items(value: object) -> Sequence[Any]:
    """The items of a keyword that is a list. Another value says nothing."""
    return value if isinstance(value, list | tuple) else ()


def types_of(schema: object) -> frozenset[str]:
    """The JSON types of the values that a schema allows. All of them if it does not say."""
    kinds = _said_types(schema)
    if not isinstance(schema, Mapping):
        return kinds
    if kinds == ALL:
        words = {word for part in _parts(schema) for word in part}
        hinted = [KINDS[kind] for kind, hints in HINTS.items() if words & {*hints}]
        kinds = frozenset[str]().union(*hinted) if hinted else kinds
    return (kinds or ALL) | (frozenset({"null"}) if schema.get("nullable") is True else frozenset())


def _said_types(schema: object) -> frozenset[str]:
    """The types that a schema names, or whose values it names."""
    if not isinstance(schema, Mapping):
        return ALL
    kinds = _declared(schema.get("type"))
    for name in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(name), list | tuple) and options:
            kinds &= frozenset[str]().union(*map(types_of, options))
    for part in _items(schema.get("allOf")):
        kinds &= _said_types(part)
    given = [*_items(schema.get("enum")), *([schema["const"]] if "const" in schema else ())]
    if given:
        kinds &= frozenset[str]().union(*map(kinds_of, given))
    return kinds


def _parts(schema: object) -> Iterator[Mapping[str, Any]]:
    """A schema, and the parts of its `allOf`."""
    if isinstance(schema, Mapping):
        yield schema
        for part in _items(schema.get("allOf")):
            yield from _parts(part)


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


def property_schema(schema: object, name: str) -> object:
    """The schema of an argument. True: any value."""
    if not isinstance(schema, Mapping):
        return True
    named, more = schema.get("properties"), schema.get("additionalProperties")
    every = []
    if isinstance(named, Mapping) and name in named:
        every.append(named[name])
    elif isinstance(more, Mapping):
        every.append(more)
    for key in ("allOf", "anyOf", "oneOf"):
        parts = [property_schema(part, name) for part in _items(schema.get(key))]
        found = [part for part in parts if part is not True]
        every += found if key == "allOf" or len(found) < 2 else [{"anyOf": found}]
    return {"allOf": every} if len(every) > 1 else every[0] if every else True


def typed(value: object, schema: object) -> object:
    """An argument as a value of its schema. A text stays one if nothing else is allowed, if the
    model wrote it as a text and the schema allows texts, or if it can be nothing else."""
    if not isinstance(value, str):
        return value
    kinds, text = types_of(schema), str(value)
    if "string" in kinds:
        choices = [one for part in _parts(schema) for one in _items(part.get("enum"))]
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
