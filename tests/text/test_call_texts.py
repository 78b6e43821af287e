"""Tool calls in the syntax of Python and in JSON, read without running anything."""

from __future__ import annotations

import ast
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from asyncrl.text.call_texts import json_calls, named_calls, python_calls, some_calls


def found(calls: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    calls=st.lists(
        st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=3)), min_size=1, max_size=3
    )
)
def test_what_python_writes_is_read(calls: list[tuple[str, dict[str, Any]]]) -> None:
    texts = [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in calls
    ]
    for text in (f"[{', '.join(texts)}]", "\n".join(texts)):
        assert found(some_calls(python_calls, text)) == calls


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("'it's here'", "it's here"),
        ("'say \"hi\" \\ 'x'\n{}'", "say \"hi\" \\ 'x'\n{}"),
        ('"""two\n"lines"."""', 'two\n"lines".'),
        ("(1, 2,)", [1, 2]),
        ('{"a": true, "b": [null, false]}', {"a": True, "b": [None, False]}),
        ("-1.5e3", -1500.0),
        ("''", ""),
    ],
)
def test_values_of_models(written: str, value: object) -> None:
    assert found(some_calls(python_calls, f"[f(a={written})]")) == [("f", {"a": value})]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "f",
        "f(1)",
        "f(a=1",
        "f(a='x",
        "f(a=g())",
        "f(a=__import__('os'))",
        "f(a=1 + 2)",
        "f(a=b)",
        "[f(a=1)",
        "[f(a=1)] and more",
        "f(a={1: 2})",
        "f(a=1 b=2)",
        f"f(a={'[' * 40}{']' * 40})",
        f"f(a={'[' * 100_000})",
        f"f(a={'9' * 5000})",
    ],
)
def test_what_is_no_call(text: str) -> None:
    with pytest.raises(ValueError):
        some_calls(python_calls, text)


def test_no_more_is_read_than_python_reads() -> None:
    text = "f(a=[1, 'b', {'c': None}], d=-2)"
    call: Any = ast.parse(text, mode="eval").body
    expected = {one.arg: ast.literal_eval(one.value) for one in call.keywords}
    assert found(some_calls(python_calls, text)) == [("f", expected)]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "f", "parameters": {"a": 1}}', [("f", {"a": 1})]),
        (
            '[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]',
            [("f", {}), ("g", {})],
        ),
        (
            '{"name": "f", "arguments": "{}"}; {"name": "g", "arguments": {}}',
            [("f", {}), ("g", {})],
        ),
        ('{"type": "function", "function": {"name": "f", "arguments": {}}}', [("f", {})]),
        ('[{"f": {"a": 1}}]', [("f", {"a": 1})]),
    ],
)
def test_calls_in_json(text: str, calls: object) -> None:
    assert found(some_calls(json_calls, text)) == calls


@pytest.mark.parametrize("text", ["", "[]", "[1]", '{"a": 1} x', '{"name": "f"', "x"])
def test_json_that_is_no_call(text: str) -> None:
    with pytest.raises(ValueError):
        some_calls(json_calls, text)


@pytest.mark.parametrize(
    ("text", "calls", "ids"),
    [
        ('f[ARGS]{"a": "[TOOL_CALLS]"}[TOOL_CALLS]g{}', ["f", "g"], [None, None]),
        ("f[CALL_ID]abc123XYZ[ARGS]{}", ["f"], ["abc123XYZ"]),
        ('[{"name": "f", "arguments": {}, "id": "abc123XYZ"}]', ["f"], ["abc123XYZ"]),
    ],
)
def test_mistrals_calls(text: str, calls: list[str], ids: list[str | None]) -> None:
    read = some_calls(named_calls, text)
    assert [name for name, _ in found(read)] == calls
    assert [call.get("id") for call in read] == ids
    with pytest.raises(ValueError):
        some_calls(named_calls, "[TOOL_CALLS] sunny")
