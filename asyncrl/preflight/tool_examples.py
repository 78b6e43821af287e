"""Tool calls for checks: those that the schema of a tool allows, and those of a made-up tool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
            "properties": {"text": {"type": "string"}, "nested": {"type": "object"}},
        },
    },
}
MADE_UP: Mapping[str, Sequence[Mapping[str, object]]] = {
    "quotes": [{"text": QUOTES}],
    "nested": [{"nested": {"a": [1, {"b": None}], "c": True}}],
    "unicode": [{"text": UNICODE}],
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
    found = {
        kind: given
        for number, (kind, given) in enumerate(cases.items())
        if given not in list(cases.values())[:number]
    }
    return {**found, "two calls": cases["plain"] * 2}


def example_arguments(tool: Schema, kind: str) -> dict[str, object]:
    """Arguments that a tool's schema allows.

    Args:
        kind: of texts in it: "plain", "quotes" or "unicode".
    """
    function: Any = tool.get("function", tool)
    parameters = function.get("parameters") or {}
    text = {"quotes": QUOTES, "unicode": UNICODE}.get(kind, "a")
    example = _example(parameters, text, 0)
    return dict(example) if isinstance(example, Mapping) else {}


def _example(schema: object, text: str, depth: int) -> object:
    """A value that a JSON schema allows, as far as its types say."""
    if not isinstance(schema, Mapping) or depth > 8:
        return text
    if schema.get("enum"):
        return schema["enum"][0]
    for name in ("anyOf", "oneOf", "allOf"):
        if schema.get(name):
            return _example(schema[name][0], text, depth + 1)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, Sequence) and not isinstance(kind, str) else kind
    match kind:
        case "integer":
            return max(42, int(schema.get("minimum", 42)))
        case "number":
            return 1.5
        case "boolean":
            return True
        case "null":
            return None
        case "array":
            return [_example(schema.get("items"), text, depth + 1)]
        case "object":
            named = schema.get("properties") or {}
            if depth and not named:
                return {"a": [1, {"b": text}]}
            return {str(name): _example(one, text, depth + 1) for name, one in named.items()}
    return text
