"""Tool calls for checks: those that the schema of a tool allows, and those of a made-up tool."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from asyncrl.preflight.check_env.schema_examples import Example, refusal
from asyncrl.text.chat_messages import Schema

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
    cases = {kind: _found(tool, kind) for kind in ("plain", "quotes", "unicode")}
    cases |= {f"choice {choice + 1}": _found(tool, choice=choice) for choice in CHOICES}
    cases = {kind: found for kind, found in cases.items() if not found[1]}
    found = {
        kind: [given]
        for number, (kind, (given, _)) in enumerate(cases.items())
        if given not in [earlier for earlier, _ in list(cases.values())[:number]]
    }
    return {**found, **({"two calls": found["plain"] * 2} if "plain" in found else {})}


def example_arguments(tool: Schema, kind: str = "plain", choice: int = 0) -> dict[str, object]:
    """Arguments that a tool's schema allows, unless `refused_examples` says that there are none.

    Args:
        kind: of texts in it: "plain", "quotes" or "unicode".
        choice: which value, where a schema offers several. The last one if it has fewer.
    """
    return _found(tool, kind, choice)[0]


def refused_examples(tool: Schema) -> str:
    """What was tried and the schema of a tool refuses, and why. Empty if it allows a value of each
    argument."""
    tried = [*_tried(tool)]
    allowed = {name for arguments, why in tried if not why for name in _names(arguments)}
    refused = [(arguments, why) for arguments, why in tried if why]
    if len(refused) == len(tried):
        return f"no arguments were found that its schema allows ({refused[0][1]})"
    missed = [*dict.fromkeys(_declared(_parameters(tool)))]
    for arguments, why in refused:
        names = {*_names(arguments)} - allowed
        if missing := next((name for name in missed if name in names), None):
            return f"no arguments with {missing!r} were found that its schema allows ({why})"
    return ""


def _names(value: object, within: str = "") -> Iterator[str]:
    """The keys of a value and of the values in it, outer ones first, with dots between them."""
    if isinstance(value, Mapping):
        for key in value:
            yield f"{within}{key}"
            yield from _names(value[key], f"{within}{key}.")
    for one in value if isinstance(value, list) else ():
        yield from _names(one, within)


def _declared(schema: object, within: str = "") -> Iterator[str]:
    """The keys that a schema names, as `_names` gives them."""
    if not isinstance(schema, Mapping):
        return
    fields = schema.get("properties")
    for name, one in fields.items() if isinstance(fields, Mapping) else ():
        yield f"{within}{name}"
        yield from _declared(one, f"{within}{name}.")
    for key in ("allOf", "anyOf", "oneOf", "prefixItems", "items"):
        parts = schema.get(key)
        for one in parts if isinstance(parts, list) else [parts]:
            yield from _declared(one, within)


def _parameters(tool: Schema) -> object:
    """The schema of a tool's arguments."""
    function: Any = tool.get("function", tool)
    return function.get("parameters") or {}


def _tried(
    tool: Schema, kind: str = "plain", choice: int = 0
) -> Iterator[tuple[dict[str, object], str]]:
    """Arguments, the best first, and why the schema of the tool refuses them. See
    `example_arguments`."""
    parameters = _parameters(tool)
    texts = ({"quotes": QUOTES, "unicode": UNICODE}.get(kind, "a"), "b")
    choices = dict.fromkeys([choice, 0, *CHOICES])
    for one, text, sparse, given in itertools.product(choices, texts, (False, True), (False, True)):
        arguments = Example(text, one, sparse, given).as_object(parameters)
        yield arguments, refusal(parameters, arguments)


def _found(tool: Schema, kind: str = "plain", choice: int = 0) -> tuple[dict[str, object], str]:
    """The best arguments that the schema of the tool allows, or the best ones that it refuses."""
    allowed = (one for one in _tried(tool, kind, choice) if not one[1])
    return next(allowed, None) or next(_tried(tool, kind, choice))
