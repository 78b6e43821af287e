"""Calls of a user's tools through a chat template: with the types that their schemas say."""

from __future__ import annotations

import importlib
import re
from typing import Any
from unittest.mock import ANY

import pytest
from pydantic import BaseModel
from test_tool_round_trip import TEMPLATES

from asyncrl.preflight.check_env.template_checks import TemplateChecks
from asyncrl.preflight.check_env.tool_examples import example_arguments, own_cases, refused_examples
from asyncrl.sessions.session import SessionTemplate
from asyncrl.text.response import ResponseReader
from asyncrl.text.schema_references import resolved_tool

QWEN = "Qwen3-Coder, Qwen3.5 and Nemotron 3"


class Stop(BaseModel):
    town: str
    nights: int = 1
    after: list[Stop] = []


class Trip(BaseModel):
    first: Stop
    last: Stop | None = None
    share: float = 0.5
    anything: Any = None


TOOL = resolved_tool(
    {"type": "function", "function": {"name": "plan", "parameters": Trip.model_json_schema()}}
)


def findings(template: str, tool: Any = TOOL) -> dict[str, list[str]]:
    """Verdict → what `check-env` says of the tool's calls."""
    bench = importlib.import_module("benchmarks.tool_turns")
    tokenizer = bench.tokenizer_of(template)
    session = SessionTemplate(tokenizer, frozenset(bench.ends_of(tokenizer)), 1 << 20)
    checks = TemplateChecks(
        session, ResponseReader(tokenizer), [{"role": "user", "content": "q"}], [tool]
    )
    found: dict[str, list[str]] = {}
    for one in checks.tool_calls():
        found.setdefault(one.verdict, []).append(one.text)
    return found


def test_examples_have_the_types_of_a_nested_schema() -> None:
    stop = {"town": "a", "nights": 42, "after": [{"a": [1, {"b": "a"}]}]}
    assert example_arguments(TOOL) == {"first": stop, "last": stop, "share": 1.5, "anything": "a"}
    assert example_arguments(TOOL, choice=1)["last"] is None
    kinds = own_cases(TOOL)
    assert {"plain", "quotes", "unicode", "choice 2", "choice 3", "two calls"} == set(kinds)
    assert kinds["choice 2"][0]["anything"] == {"a": [1, {"b": "a"}]}


def test_nested_arguments_come_back_through_tags() -> None:
    found = findings(TEMPLATES[QWEN])
    assert set(found) == {"ok"}, found
    assert "plan: plain, plan: quotes, plan: unicode, plan: choice 2" in found["ok"][0]


def test_a_template_that_writes_other_values_is_found() -> None:
    """It writes 1 for true, and one is not the other."""
    template = TEMPLATES[QWEN].replace("v | tojson", "v | tojson | replace('null', '0')")
    found = findings(template)
    assert any("plan: choice 2" in one and "comes back as" in one for one in found["FAIL"]), found


def test_schemas_of_users_may_have_anything_in_them() -> None:
    """Dumps of schemas keep nulls, and a keyword may have a value of another kind."""
    fields: dict[str, Any] = {
        "null": {"type": "integer", "minimum": None, "maximum": None},
        "small": {"type": "integer", "maximum": 7},
        "large": {"type": "integer", "minimum": 99.5},
        "enum": {"type": "string", "enum": {"a": 1}},
        "any": {"type": "string", "anyOf": {"type": "string"}},
        "odd": {"type": "object", "properties": ["a"]},
        "list": {"type": "array", "prefixItems": None, "items": {"type": "boolean"}},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": fields}}}
    found = example_arguments(tool)
    assert (found["null"], found["small"], found["large"]) == (42, 7, 100)
    assert (found["enum"], found["any"], found["list"]) == ("a", "a", [True])
    assert own_cases({"function": {"name": "f", "parameters": {"properties": ["a"]}}})["plain"]


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "array", "minItems": 3, "items": {"type": "string"}}, ["a", "a1", "a2"]),
        ({"type": "array", "minItems": 2, "uniqueItems": True, "items": {"enum": [1, 2]}}, [1, 2]),
        ({"type": "array", "prefixItems": [{"const": 1}, {}], "items": False}, [1, "a1"]),
        ({"type": "array", "contains": {"const": 5}}, [5]),
        ({"type": "array", "maxItems": 0}, []),
        ({"type": "string", "minLength": 3}, "aaa"),
        ({"type": "string", "pattern": r"^[A-Z]{3}-\d+(x|y)?[^a]$"}, ANY),
        ({"type": "string", "pattern": r"^\w+$", "minLength": 4}, ANY),
        ({"type": "string", "pattern": "(?=x).-9", "examples": ["x-9"]}, "x-9"),
        ({"type": "string", "pattern": r"^[\w-]{128}$"}, ANY),
        ({"type": "string", "pattern": "^a{99,}$", "maxLength": 100}, ANY),
        ({"type": "string", "pattern": "^(((a+b)+c)+d)+$", "maxLength": 9}, "abcd"),
        ({"type": "string", "pattern": "^(?!no)[a-z]+$"}, ANY),
        ({"type": "string", "pattern": None}, "a"),
        ({"type": "string", "format": "date"}, "2024-02-29"),
        ({"type": "string", "not": {"const": "a"}}, "b"),
        ({"type": "integer", "exclusiveMinimum": 50, "multipleOf": 7}, 56),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, 1),
        ({"type": "integer", "allOf": [{"minimum": 50}, {"minimum": 60}]}, 60),
        ({"type": "object", "minProperties": 2}, {"a": "a", "a1": "a"}),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, {"a": 42}),
        ({"type": "object", "patternProperties": {"^x-": {"const": 1}}}, {"x-": 1}),
        ({"additionalProperties": {}, "propertyNames": {"enum": ["b", "c"]}}, {"b": "a"}),
        ({"type": "object", "propertyNames": {"pattern": "^b$"}, "minProperties": 1}, {"b": "a"}),
        ({"type": "object", "required": ["b"], "additionalProperties": {"const": 1}}, {"b": 1}),
        ({"type": "integer", "anyOf": [{"minimum": 100}, {"maximum": 0}]}, 100),
        ({"type": "str", "nullable": True}, "a"),
    ],
)
def test_examples_follow_every_keyword(schema: Any, value: object) -> None:
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    tool = {"function": {"name": "f", "parameters": parameters}}
    assert (example_arguments(tool), refused_examples(tool)) == ({"x": value}, "")
    either = {
        "properties": {"x": schema, "y": {"const": 1}},
        "oneOf": [{"required": [k]} for k in "xy"],
    }
    tool = {"function": {"name": "f", "parameters": either}}
    assert (list(example_arguments(tool)), refused_examples(tool)) == (["x"], "")


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        ({"properties": {"x": {"allOf": [{"type": "string"}, {"const": 1}]}}}, "with 'x' were"),
        (
            {"properties": {"y": {"properties": {"x": {"not": {}}}}}},
            r"with 'y' were found.*\$\.y\.x",
        ),
        ({"allOf": [{"type": "object"}, {"type": "string"}]}, r"no arguments .*not of type 'strin"),
        ({"required": ["x"], "additionalProperties": False}, "no arguments were found"),
    ],
)
def test_a_schema_without_an_example_is_named(parameters: Any, why: str) -> None:
    tool = {"type": "function", "function": {"name": "plan", "parameters": parameters}}
    found = findings(TEMPLATES[QWEN], tool)
    assert any(re.search(f"plan: .*{why}.* not checked", one) for one in found["warn"]), found
