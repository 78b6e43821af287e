"""Tool calls for checks: those that the schema of a tool allows, and those of a made-up tool."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.text.schemas import types_of
from asyncrl.text.template import Schema

__all__ = ["MADE_UP", "PROBE", "example_arguments", "own_cases", "tool_name"]

QUOTES, UNICODE = "say \"hi\" \\ 'x'\n{}", "Grüße, 日本語 🙂"
PROBE: Schema = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "A made-up tool.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "nested": {"type": "object"},
                "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "any": {"description": "Any value."},
            },
        },
    },
}
CHOICES = (1, 2)
"""Further values that are tried where a schema offers several."""
KINDS = ("string", "object", "number", "integer", "array", "boolean", "null")
"""Types of JSON, in the order in which they are tried."""
DEEPEST = 8
"""Levels of values in an example."""
MADE_UP: Mapping[str, Sequence[Mapping[str, object]]] = {
    "quotes": [{"text": QUOTES}],
    "nested": [{"nested": {"a": [1, {"b": None}], "c": True}}],
    "unicode": [{"text": UNICODE}],
    "no value": [{"maybe": None}],
    "any value": [{"any": {"a": [1]}}],
    "no arguments": [{}],
    "two calls": [{"text": "a"}, {"text": "b"}],
}
"""Kind → the arguments of each call of the made-up tool."""


def tool_name(tool: Schema) -> str:
    """The name in a tool's schema."""
    function: Any = tool.get("function")
    return str((function if isinstance(function, Mapping) else tool).get("name"))


def own_cases(tool: Schema) -> dict[str, list[dict[str, object]]]:
    """Arguments that the schema of a tool allows, by kind. No two are the same."""
    cases = {kind: [example_arguments(tool, kind)] for kind in ("plain", "quotes", "unicode")}
    cases |= {
        f"choice {choice + 1}": [example_arguments(tool, choice=choice)] for choice in CHOICES
    }
    found = {
        kind: given
        for number, (kind, given) in enumerate(cases.items())
        if given not in list(cases.values())[:number]
    }
    return {**found, "two calls": cases["plain"] * 2}


def example_arguments(tool: Schema, kind: str = "plain", choice: int = 0) -> dict[str, object]:
    """Arguments that a tool's schema allows.

    Args:
        kind: of texts in it: "plain", "quotes" or "unicode".
        choice: which value, where a schema offers several. The last one if it has fewer.
    """
    function: Any = tool.get("function", tool)
    parameters = function.get("parameters") or {}
    text = {"quotes": QUOTES, "unicode": UNICODE}.get(kind, "a")
    example = _example(parameters, text, choice, 0)
    return dict(example) if isinstance(example, Mapping) else {}


def _example(schema: object, text: str, choice: int, depth: int) -> object:
    """A value that a JSON schema allows, as far as its types say."""
    schema = schema if isinstance(schema, Mapping) else {}
    if "const" in schema:
        return schema["const"]
    if options := _list(schema.get("enum")):
        return options[min(choice, len(options) - 1)]
    options = _list(schema.get("anyOf")) or _list(schema.get("oneOf"))
    if options and "type" not in schema:
        return _example(options[min(choice, len(options) - 1)], text, choice, depth)
    kinds = types_of(schema)
    allowed = [kind for kind in KINDS if kind in kinds]
    match allowed[min(choice, len(allowed) - 1)]:
        case "object":
            return _object(schema, text, choice, depth)
        case "array":
            items = [*_list(schema.get("prefixItems")), schema.get("items")]
            items = items[:-1] if len(items) > 1 and not items[-1] else items
            return [_example(one, text, choice, depth + 1) for one in items if depth < DEEPEST]
        case "integer":
            return _integer(schema.get("minimum"), schema.get("maximum"))
        case "number":
            return 1.5
        case "boolean":
            return True
        case "null":
            return None
    return text


def _list(value: object) -> list[Any]:
    """A list of a schema. Schemas of users may have anything in its place."""
    return value if isinstance(value, list) else []


def _integer(lowest: object, highest: object) -> int:
    """42, or the nearest number between the limits that are numbers."""
    found = 42
    if isinstance(lowest, int | float):
        found = max(found, math.ceil(lowest))
    if isinstance(highest, int | float):
        found = min(found, math.floor(highest))
    return found


def _object(schema: Mapping[str, Any], text: str, choice: int, depth: int) -> dict[str, object]:
    named, more = schema.get("properties"), schema.get("additionalProperties")
    named = named if isinstance(named, Mapping) else None
    if depth >= DEEPEST:
        return {}
    if not named and isinstance(more, Mapping):
        named = {"a": more}
    if depth and not named:
        return {"a": [1, {"b": text}]}
    return {
        str(name): _example(one, text, choice, depth + 1) for name, one in (named or {}).items()
    }
