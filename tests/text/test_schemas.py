"""Schemas of tools: without references, and the values that they allow."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from asyncrl.environments.model import _tools as model_tools
from asyncrl.sessions.requests import UnsupportedError, function_tools, functions_of
from asyncrl.text.call_texts import Raw
from asyncrl.text.schema_references import SchemaError, resolved_tool
from asyncrl.text.schemas import property_schema, typed, types_of
from asyncrl.text.template import MessagesError, tool_schemas


class Stop(BaseModel):
    """A stop of a trip."""

    town: str
    nights: int = 1


class Tree(BaseModel):
    value: int
    children: list[Tree] = []


class Trip(BaseModel):
    first: Stop = Field(description="Where it begins.")
    more: list[Stop] = []
    last: Stop | None = None
    by_day: dict[str, Stop] = {}
    tree: Tree
    class_: Literal[1, 2] = 1


def tool(parameters: Any) -> Any:
    return {"type": "function", "function": {"name": "plan", "parameters": parameters}}


def resolved(parameters: Any) -> Any:
    function: Any = resolved_tool(tool(parameters))["function"]
    return function["parameters"]


def test_nested_models_have_no_references() -> None:
    found = resolved(Trip.model_json_schema())
    assert "$ref" not in json.dumps(found) and "$defs" not in found
    first = found["properties"]["first"]
    assert first["description"] == "Where it begins." and first["type"] == "object"
    assert first["properties"]["nights"]["type"] == "integer"
    assert found["properties"]["more"]["items"]["required"] == ["town"]
    assert found["properties"]["last"]["anyOf"][0]["title"] == "Stop"
    assert found["properties"]["by_day"]["additionalProperties"]["title"] == "Stop"


def test_a_schema_within_itself_has_only_its_type_and_name() -> None:
    tree = resolved(Trip.model_json_schema())["properties"]["tree"]
    assert tree["properties"]["children"]["items"] == {"title": "Tree", "type": "object"}
    whole = resolved({"type": "object", "properties": {"inner": {"$ref": "#"}}})
    assert whole["properties"]["inner"] == {"type": "object"}
    assert resolved({"$ref": "#"}) == {}


INTEGER, AT_LEAST, A = {"type": "integer"}, {"minimum": 1}, {"$ref": "#/$defs/A"}
APART: Any = [
    [{"properties": {"a": {}}, "additionalProperties": False}, {"properties": {"b": {}}}],
    [{"patternProperties": {"^a": {}}}, {"additionalProperties": INTEGER}],
    [{"prefixItems": [{}]}, {"items": INTEGER}],
    [{"contains": INTEGER}, {"minContains": 2}],
    [{"contains": {}}, {"minContains": 0}],
    [{"if": True}, {"then": False}],
    [{"if": INTEGER}, {"else": AT_LEAST}],
    [{"properties": {"a": {}}, "unevaluatedProperties": False}, {"anyOf": [INTEGER]}],
    [{"const": 1}, {"const": True}],
]
"""Schemas that say something else as one schema."""


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (
            {
                "definitions": {"A": {"type": "integer"}},
                "properties": {"a": {"$ref": "#/definitions/A"}},
            },
            {"properties": {"a": {"type": "integer"}}},
        ),
        (
            {"properties": {"a/b": {"const": 1}, "c": {"$ref": "#/properties/a~1b"}}},
            {"properties": {"a/b": {"const": 1}, "c": {"const": 1}}},
        ),
        (
            {"$defs": {"x": {"$anchor": "here", "type": "null"}}, "items": {"$ref": "#here"}},
            {"items": {"$anchor": "here", "type": "null"}},
        ),
        (
            {
                "$defs": {"A": {"properties": {"a": {"type": "integer"}}, "required": ["a"]}},
                "allOf": [{"$ref": "#/$defs/A"}, {"properties": {"b": {}}, "required": ["b"]}],
            },
            {"properties": {"a": {"type": "integer"}, "b": {}}, "required": ["a", "b"]},
        ),
        # What says two things at once stays as it is.
        (
            {"allOf": [{"type": "integer"}, {"minimum": 1}, {"minimum": 2}]},
            {"allOf": [{"type": "integer"}, {"minimum": 1}, {"minimum": 2}]},
        ),
        *(({"allOf": parts}, {"allOf": parts}) for parts in APART),
        # Both parts say the same of a property, or each says something else of it.
        (
            {"allOf": [{"properties": {"a": part}} for part in (True, INTEGER, INTEGER, AT_LEAST)]},
            {"properties": {"a": {**INTEGER, **AT_LEAST}}},
        ),
        (
            {"allOf": [{"properties": {"a": {"type": "null"}}}, {"properties": {"a": INTEGER}}]},
            {"properties": {"a": {"allOf": [{"type": "null"}, INTEGER]}}},
        ),
        # These act on all parts, or on nothing.
        (
            {"$defs": {"A": {"properties": {"a": {}}}}, **A, "unevaluatedProperties": False},
            {"properties": {"a": {}}, "unevaluatedProperties": False},
        ),
        (
            {
                "allOf": [
                    {"properties": {"a": {}}, "additionalProperties": True},
                    {"properties": {}},
                ]
            },
            {"properties": {"a": {}}, "additionalProperties": True},
        ),
        ({"$defs": {"A": {"properties": None}}, "not": A}, {"not": {"properties": None}}),
        ({"$defs": {"A": {"items": [INTEGER]}}, "not": A}, {"not": {"items": [INTEGER]}}),
        (
            {"$id": "http://h/", "items": None, "anyOf": None, "$defs": {"A": INTEGER}, "not": A},
            {"$id": "http://h/", "items": None, "anyOf": None, "not": INTEGER},
        ),
        # An address that begins with # is an old anchor.
        (
            {"$id": "http://h/s", "$defs": {"A": INTEGER}, "not": {"$id": "#/not", "contains": A}},
            {"$id": "http://h/s", "not": {"$id": "#/not", "contains": INTEGER}},
        ),
        (
            {
                "$id": "schemas/foo.json",
                "items": {"$ref": "bar.json"},
                "contains": {"$ref": "bar.json#here"},
                "$defs": {
                    "B": {"$id": "bar.json", "$defs": {"A": {"$anchor": "here"}}, "not": A},
                },
            },
            {
                "$id": "schemas/foo.json",
                "items": {"$id": "bar.json", "not": {"$anchor": "here"}},
                "contains": {"$anchor": "here"},
            },
        ),
        (
            {"$defs": {"x": {"$id": "#a", "type": "null"}}, "dependencies": {"b": {"$ref": "#a"}}},
            {"dependencies": {"b": {"$id": "#a", "type": "null"}}},
        ),
        # A place that is no keyword can have a schema, too.
        (
            {"parts": {"A": {"not": A}}, "$defs": {"A": INTEGER}, "not": {"$ref": "#/parts/A"}},
            {"parts": {"A": {"not": A}}, "not": {"not": INTEGER}},
        ),
        # A reference is relative to the nearest address.
        (
            {
                "$defs": {"A": {"type": "null"}},
                "items": {"$id": "urn:b", "$defs": {"A": INTEGER}, "contains": A},
                "not": A,
            },
            {"items": {"$id": "urn:b", "contains": INTEGER}, "not": {"type": "null"}},
        ),
        # Data is no schema, and neither is the name of a property.
        (
            {"default": {"$ref": "#/x"}, "properties": {"$ref": {"type": "string"}}},
            {"default": {"$ref": "#/x"}, "properties": {"$ref": {"type": "string"}}},
        ),
        # Columns of Arrow have each key.
        (
            {"properties": {"a": {"$ref": None, "type": "string"}}},
            {"properties": {"a": {"type": "string"}}},
        ),
    ],
)
def test_references_of_any_kind(schema: Any, expected: Any) -> None:
    assert resolved(schema) == expected


def test_a_tool_without_references_stays() -> None:
    plain = tool({"type": "object", "properties": {"a": {"type": "string"}}})
    assert resolved_tool(plain) is plain
    deep: Any = {}
    for _ in range(65):
        deep = {"anyOf": [deep]}
    with pytest.raises(SchemaError, match="has more than 64 levels; make it smaller"):
        resolved_tool(tool(deep))
    assert resolved_tool(tool(deep["anyOf"][0])) == tool(deep["anyOf"][0])
    flat = {"name": "plan", "parameters": {"$defs": {"A": {"const": 1}}, "$ref": "#/$defs/A"}}
    assert resolved_tool(flat) == {"name": "plan", "parameters": {"const": 1}}


DOUBLES = {
    "$defs": {
        **{
            f"A{i}": {"properties": {n: {"$ref": f"#/$defs/A{i + 1}"} for n in "ab"}}
            for i in range(16)
        },
        "A16": {},
    },
    "$ref": "#/$defs/A0",
}


LONG_CHAIN = {
    "$defs": {f"A{i}": {"items": {"$ref": f"#/$defs/A{i + 1}"}} for i in range(70)} | {"A70": {}},
    "$ref": "#/$defs/A0",
}


def nested(depth: int) -> Any:
    schema: Any = {"$ref": "#/$defs/A"}
    for _ in range(depth):
        schema = {"items": schema}
    return {"$defs": {"A": {}}, **schema}


def repeated(**said: Any) -> Any:
    """A schema that stands for another one many times."""
    references = {f"p{i}": {"$ref": "#/$defs/A"} for i in range(40)}
    return {"$defs": {"A": said}, "properties": references}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"$ref": "#/$defs/Nope"}, "refers to '#/$defs/Nope', which it does not contain"),
        ({"$ref": "https://example.org/a.json"}, "refers to 'https://example.org/a.json'"),
        ({"items": {"$ref": 5}}, "refers to '5'"),
        ({"$dynamicRef": "#a"}, "uses $dynamicRef, which is not read; use $ref"),
        (DOUBLES, "has more than 5000 parts without its references; make it smaller"),
        (nested(100), "has more than 64 levels; make it smaller"),
        (LONG_CHAIN, "has more than 64 levels without its references"),
        (nested(100_000), "cannot be read"),
        ({"description": "ab", "$ref": "#/description/0/0"}, "refers to '#/description/0/0'"),
        ({"$ref": "#/anyOf/-1", "anyOf": [True]}, "refers to '#/anyOf/-1'"),
        (
            {"$ref": "#", "anyOf": [{"$anchor": str(i)} for i in range(1_001)]},
            "has more than 1000 $id and $anchor; use fewer",
        ),
        (
            {"$ref": "#", "anyOf": [{"$id": f"urn:a#{i}"} for i in range(1_001)]},
            "has more than 1000 $id and $anchor; use fewer",
        ),
        ({"items": {"default": "ab", "$ref": "#/items/default"}}, "refers to '#/items/default'"),
        (
            {"$id": "http://h/", "$ref": "#", "additionalItems": {"$id": "http://[x"}},
            "has $id = 'http://[x', which is no address",
        ),
        (
            {"$ref": "#", "additionalItems": {"$id": 5}},
            "has $id = '5', which is no address",
        ),
        ({"$id": "urn:" + "x" * 2_000, "$ref": "#"}, "which is no address"),
        (repeated(description="x" * 30_000), "more than 1000000 characters without their"),
        (repeated(enum=["x" * 300] * 100), "more than 1000000 characters without their"),
        (repeated(required=["x" * 300] * 100), "more than 1000000 characters without their"),
        (repeated(anyOf=["x" * 300] * 100), "more than 1000000 characters without their"),
        (repeated(properties={"x" * 30_000: {}}), "more than 1000000 characters without their"),
        ({"allOf": "a\nb"}, "has allOf = 'a\\nb'; give a list of schemas"),
    ],
)
def test_what_cannot_be_resolved_is_refused_by_name(schema: Any, message: str) -> None:
    with pytest.raises(SchemaError, match="the schema of the tool 'plan'") as error:
        resolved(schema)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_many_tools_together_are_refused_as_one_that_is_too_large() -> None:
    """Each of them stands for some 4,000 schemas, which is allowed."""
    large = {"$defs": {**DOUBLES["$defs"], "A10": {}}, "$ref": "#/$defs/A0"}
    assert resolved(large)
    tools = [tool(large)] * 20
    with pytest.raises(MessagesError, match=r"and those before it have more than 50000 parts"):
        tool_schemas(tools)
    assert len(tool_schemas(tools[:12])) == 12
    with pytest.raises(UnsupportedError, match=r"and those before it have more than 50000 parts"):
        function_tools(functions_of(tools), "parameters")
    with pytest.raises(UnsupportedError, match=r"and those before it have more than 50000 parts"):
        model_tools(tools)


@pytest.mark.parametrize(
    "schema", [{"allOf": 5}, {"allOf": True}, {"properties": {"a": {"allOf": {"a": 1}}}}]
)
def test_all_of_that_is_no_list_is_refused(schema: Any) -> None:
    with pytest.raises(SchemaError, match=r"has allOf = .*; give a list of schemas"):
        resolved(schema)


def test_keywords_of_a_wrong_kind_say_nothing() -> None:
    parts = [{"properties": 5}, {"properties": {"a": {}}}]
    assert resolved({"allOf": parts}) == {"allOf": parts}
    assert resolved({"enum": 5, "properties": {"a": {"$ref": "#"}}})["enum"] == 5
    for schema in ({"enum": 5}, {"allOf": 5}, {"anyOf": 5}):
        assert types_of(schema) == ANY and property_schema(schema, "a") is True
        assert typed("1", schema) == typed("1", {})
    with pytest.raises(MessagesError, match="its tools are not JSON"):
        tool_schemas("[" * 100_000)


ANY = {"null", "boolean", "integer", "number", "string", "array", "object"}


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        ({"type": "integer"}, {"integer"}),
        ({"type": "number"}, {"integer", "number"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"type": "string", "nullable": True}, {"string", "null"}),
        ({"anyOf": [{"type": "array"}, {"properties": {}}]}, {"array", "object"}),
        ({"oneOf": [{"const": "a"}, {"enum": [None, True]}]}, {"string", "null", "boolean"}),
        ({"type": "object", "anyOf": [{"required": ["a"]}]}, {"object"}),
        ({"allOf": [{"type": ["integer", "null"]}, {"minimum": 1}]}, {"integer", "null"}),
        ({"allOf": [{"minimum": 1}, {"title": "a"}]}, {"integer", "number"}),
        ({"enum": [1, 2]}, {"integer", "number"}),
        ({"prefixItems": [{}]}, {"array"}),
        ({"format": "date"}, {"string"}),
        ({"type": "dict"}, {"object"}),
        ({"type": "float"}, {"number", "integer"}),
        ({"description": "any"}, ANY),
        ({"type": "thing"}, ANY),
        ({"anyOf": [{"type": "integer"}, {}]}, ANY),
        (True, ANY),
    ],
)
def test_the_types_of_a_schema(schema: Any, kinds: set[str]) -> None:
    assert types_of(schema) == kinds


STRING, OPTIONAL = {"type": "string"}, {"anyOf": [{"type": "string"}, {"type": "null"}]}
MIXED = {"anyOf": [{"type": "string"}, {"type": "integer"}]}


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("3", {"type": "integer"}, 3),
        ("3.0", {"type": "integer"}, 3),
        ("3.5", {"type": "integer"}, "3.5"),
        ("three", {"type": "integer"}, "three"),
        (".5", {"type": "number"}, 0.5),
        ("NaN", {"type": "number"}, "NaN"),
        ("1e999", {"type": "number"}, "1e999"),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
        ("true", {"type": "boolean"}, True),
        ("FALSE", {"type": "boolean"}, False),
        ("1", {"type": "boolean"}, True),
        ("null", OPTIONAL, None),
        ("None", OPTIONAL, None),
        ("nothing", OPTIONAL, "nothing"),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ("{'a': True}", {"type": "object"}, {"a": True}),
        ('{"a": 1, "a": 2}', {"type": "object"}, '{"a": 1, "a": 2}'),
        ("[1, 2", {"type": "array"}, "[1, 2"),
        ('{"town"days": 2}', {"type": "object"}, '{"town"days": 2}'),
        ("{'town'days': 2}", {"type": "object"}, "{'town'days': 2}"),
        ("3", STRING, "3"),
        ("{}", STRING, "{}"),
        ("7", MIXED, 7),
        ("04820", MIXED, "04820"),
        ("1_000", {"type": "integer"}, "1_000"),
        ("1", {"enum": [1, 2]}, 1),
        ("1", {"enum": ["1", 1]}, "1"),
        ("2", {"const": 2}, 2),
        ("2", {}, 2),
        ("two", {}, "two"),
        ('{"a": null}', {}, {"a": None}),
        ("  [1]\n", {"items": {}}, [1]),
        ("[" * 100_000, {"type": "array"}, "[" * 100_000),
    ],
)
def test_an_argument_in_tags_gets_the_type_of_its_schema(
    text: str, schema: Any, value: Any
) -> None:
    found = typed(Raw(text), schema)
    assert json.dumps(found) == json.dumps(value)


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("3", {"type": "integer"}, 3),
        ("04820", MIXED, "04820"),
        ("7", MIXED, "7"),
        ("null", OPTIONAL, "null"),
        ("2", {}, "2"),
        ('{"a": 1}', {"type": "object"}, {"a": 1}),
    ],
)
def test_a_text_in_json_stays_one_if_the_schema_allows_it(
    text: str, schema: Any, value: Any
) -> None:
    assert json.dumps(typed(text, schema)) == json.dumps(value)


def test_the_schema_of_an_argument() -> None:
    choices = {"anyOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"a": STRING}}]}
    assert property_schema(choices, "a") == {"anyOf": [{"const": 1}, STRING]}
    assert property_schema({"properties": {"a": STRING}}, "a") == STRING
    assert property_schema({"additionalProperties": STRING}, "a") == STRING
    assert property_schema({"properties": {"a": STRING}}, "b") is True
    both = {"allOf": [{"properties": {"a": {}}}, {"additionalProperties": STRING}]}
    assert property_schema(both, "n") == STRING and property_schema(both, "a") == {
        "allOf": [{}, STRING]
    }
    assert property_schema(None, "a") is True
    assert typed(Raw("1"), {"allOf": [{"enum": ["1", "2", 3]}, {"title": "t"}]}) == "1"


@pytest.mark.parametrize(
    "schema",
    [
        {"$id": 5, "$ref": "#"},
        {"required": ["x", {}], "allOf": [{"required": [{"z": 1}]}]},
        {"required": [1], "allOf": [{"required": 5}]},
    ],
)
def test_what_is_no_schema_is_refused_or_stays_as_it_is(schema: dict[str, Any]) -> None:
    tool = {"function": {"name": "f", "parameters": schema}}
    if "$id" in schema:
        with pytest.raises(SchemaError, match=r"the tool 'f' has \$id = '5', which is no address"):
            resolved_tool(tool)
    else:
        assert resolved_tool(tool) == tool
