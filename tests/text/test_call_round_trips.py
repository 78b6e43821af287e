"""Calls of each format come back as they were written, or their turn is unparsed: with the marks of
the format in their texts, cut anywhere, without arguments, and beside a broken call."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from test_turn_formats import BARE, OPEN, SEP, TURNS, tokenizer_of

from asyncrl.text.response import ResponseReader
from asyncrl.text.schema_references import resolved_tool
from asyncrl.text.turn_formats import TURN_FORMATS

SPOT = {"type": "object", "properties": {"town": {"type": "string"}, "days": {"type": "integer"}}}
PROPERTIES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "sure": {"type": "boolean"},
    "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "spot": {"$ref": "#/$defs/Spot"},
    "spots": {"type": "array", "items": {"$ref": "#/$defs/Spot"}},
    "last": {"anyOf": [{"$ref": "#/$defs/Spot"}, {"type": "null"}]},
    "kind": {"enum": [1, 2]},
    "any": {"description": "Any value."},
}
TOOLS: Any = [
    resolved_tool(
        {
            "type": "function",
            "function": {
                "name": "visit",
                "parameters": {"$defs": {"Spot": SPOT}, "properties": PROPERTIES},
            },
        }
    ),
    {"type": "function", "function": {"name": "now"}},
]
Arguments = Mapping[str, Any]


def compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def in_json(form: str) -> Callable[[str, Arguments], str]:
    """Writes calls: @N is the name, and @J the arguments."""
    return lambda name, arguments: form.replace("@N", name).replace("@J", compact(arguments))


def in_python(form: str) -> Callable[[str, Arguments], str]:
    def write(name: str, arguments: Arguments) -> str:
        listed = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        return form.replace("CALL", f"{name}({listed})")

    return write


def in_tags(head: str, tag: str, end: str) -> Callable[[str, Arguments], str]:
    """Writes calls: @N is a name, @K a key, and @V its value."""

    def write(name: str, arguments: Arguments) -> str:
        tags = [
            tag.replace("@K", key).replace(
                "@V", value if isinstance(value, str) else compact(value)
            )
            for key, value in arguments.items()
        ]
        return head.replace("@N", name) + "".join(tags) + end

    return write


def bare(value: object, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{bare(one, quote)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(bare(one, quote) for one in value) + "]"
    return compact(value)


def in_bare(form: str, quote: str) -> Callable[[str, Arguments], str]:
    return lambda name, arguments: form.replace("@N", name).replace("@J", bare(arguments, quote))


PARAMETER = "<parameter=@K>\n@V\n</parameter>\n"
QWEN, GLM = "Qwen3-Coder, Qwen3.5 and Nemotron 3", "GLM-4.5 and later"
HERMES = "Hermes, Qwen 2.5 and Qwen3"
LISTED = '[{"name": "@N", "arguments": @J}]'
WRITES: Mapping[str, Callable[[str, Arguments], str]] = {
    "gpt-oss": in_json(
        "<|channel|>commentary to=functions.@N <|constrain|>json<|message|>@J<|call|>"
    ),
    "Gemma 4": in_bare("<|tool_call>call:@N@J<tool_call|>", '<|"|>'),
    "FunctionGemma": in_bare("<start_function_call>call:@N@J<end_function_call>", "<escape>"),
    "DeepSeek V3 and R1": in_json(f"{OPEN}function{SEP}@N\n```json\n@J\n```<｜tool▁call▁end｜>"),
    "DeepSeek V3.1": in_json(f"{OPEN}@N{SEP}@J<｜tool▁call▁end｜>"),
    "DeepSeek V3.2": in_tags(
        '<｜DSML｜invoke name="@N">\n',
        '<｜DSML｜parameter name="@K">@V</｜DSML｜parameter>\n',
        "</｜DSML｜invoke>",
    ),
    "Kimi K2": in_json(
        "<|tool_call_begin|>functions.@N:0<|tool_call_argument_begin|>@J<|tool_call_end|>"
    ),
    "MiniMax M2": in_tags(
        '<invoke name="@N">\n', '<parameter name="@K">@V</parameter>\n', "</invoke>\n"
    ),
    "Seed-OSS": in_tags(
        "<seed:tool_call>\n<function=@N>\n", PARAMETER, "</function>\n</seed:tool_call>"
    ),
    QWEN: in_tags("<tool_call>\n<function=@N>\n", PARAMETER, "</function>\n</tool_call>"),
    GLM: in_tags(
        "<tool_call>@N\n", "<arg_key>@K</arg_key>\n<arg_value>@V</arg_value>\n", "</tool_call>"
    ),
    HERMES: in_json('<tool_call>\n{"name": "@N", "arguments": @J}\n</tool_call>'),
    "LFM2": in_python("<|tool_call_start|>[CALL]<|tool_call_end|>"),
    "OLMo 3": in_python("<function_calls>CALL</function_calls>"),
    "Mistral": in_json("[TOOL_CALLS]@N[ARGS]@J"),
    "Phi-4-mini and Granite 3": in_json(f"<|tool_call|>{LISTED}<|/tool_call|>"),
    "Command R7B and Command A": in_json(
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "@N", "parameters": @J}]<|END_ACTION|>'
    ),
    "Nemotron Nano 2 and Llama Nemotron": in_json(f"<TOOLCALL>{LISTED}</TOOLCALL>"),
    "Hunyuan, Jamba and Apriel": in_json(f"<tool_calls>{LISTED}</tool_calls>"),
    "Apertus": in_json('<|tools_prefix|>[{"@N": @J}]<|tools_suffix|>'),
    "GigaChat 3": in_json('<|function_call|>{"name": "@N", "arguments": @J}'),
    "Solar Open": in_json(
        "<|tool_call:begin|>a1<|tool_call:name|>@N<|tool_call:args|>@J<|tool_call:end|>"
    ),
    "Functionary 3.1": in_json("<function=@N>@J</function>"),
    "Llama 3": in_json('{"name": "@N", "parameters": @J}'),
    "Llama 4": in_python("<|python_start|>[CALL]<|python_end|>"),
}
"""Format → how its models write a call."""
TAGGED = ("DeepSeek V3.2", "MiniMax M2", "Seed-OSS", QWEN, GLM)
UNWRITABLE = {
    **dict.fromkeys(("Seed-OSS", QWEN, "MiniMax M2"), ("<parameter", "</param")),
    GLM: ("<arg_", "</arg_"),
    "DeepSeek V3.2": ("<｜DSML｜parameter", "</｜DSML｜p"),
    "Gemma 4": ('<|"|>',),
    "FunctionGemma": ("<escape>",),
}
"""What ends a text in a format, so that no text can have it."""
MARKS = (
    *dict.fromkeys(mark for one in TURN_FORMATS for mark in (one.opening, one.closing) if mark),
    *("</think>", "<think>", "</function>", "</tool_calls>", "</TOOLCALL>", "<|END_ACTION|>"),
    *(
        '"',
        "'",
        "\\",
        "\n",
        " ",
        "{",
        "}",
        "]",
        ")",
        ",",
        "word",
        "Grüße",
        "🙂",
        "```",
        "</invoke>",
    ),
)
TEXTS = st.lists(st.sampled_from(MARKS), max_size=4).map("".join)
SPOTS = st.fixed_dictionaries({}, optional={"town": TEXTS, "days": st.integers()})
VALUES = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXTS,
        "count": st.integers(),
        "share": st.sampled_from([0.5, -2.25, 7]),
        "sure": st.booleans(),
        "maybe": st.none() | st.integers(),
        "spot": SPOTS,
        "spots": st.lists(SPOTS, max_size=2),
        "last": st.none() | SPOTS,
        "kind": st.sampled_from([1, 2]),
        "any": st.integers() | st.booleans() | st.none() | SPOTS,
    },
)


@functools.cache
def reader_of(name: str) -> tuple[Any, ResponseReader, list[int]]:
    tokenizer = tokenizer_of(name)
    start = TURNS[name][0].partition("<think>")[0]
    ids = tokenizer.encode(start, add_special_tokens=False)
    return tokenizer, ResponseReader(tokenizer), ids


def read(name: str, turn: str, tools: Any = TOOLS) -> tuple[str, bool, Any]:
    """The calls of a turn as JSON, whether it was parsed, and its message."""
    tokenizer, reader, start = reader_of(name)
    ids = tokenizer.encode(turn, add_special_tokens=False)
    plain = tokenizer.decode(ids, skip_special_tokens=True)
    message: Any
    message, parsed = reader.read(start, ids, plain, tools)
    calls = [one["function"] for one in message.get("tool_calls", [])]
    return compact([[one["name"], json.loads(one["arguments"])] for one in calls]), parsed, message


def writable(name: str, arguments: Arguments) -> bool:
    written = json.dumps(arguments, ensure_ascii=False)
    return not any(
        json.dumps(mark, ensure_ascii=False)[1:-1] in written for mark in UNWRITABLE.get(name, ())
    )


def test_every_format_is_written() -> None:
    assert set(WRITES) == set(TURNS)


@pytest.mark.parametrize("name", WRITES)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(arguments=VALUES)
def test_arguments_come_back_with_their_types(name: str, arguments: Arguments) -> None:
    if not writable(name, arguments):
        return
    turn = WRITES[name]("visit", arguments)
    calls, parsed, message = read(name, turn)
    assert (calls, parsed) == (compact([["visit", arguments]]), True), (turn, message)


@pytest.mark.parametrize("name", WRITES)
@settings(max_examples=3, deadline=None, derandomize=True)
@given(arguments=VALUES)
def test_a_cut_call_is_not_run_with_other_arguments(name: str, arguments: Arguments) -> None:
    if not writable(name, arguments):
        return
    first = {"text": "</tool_call></function>", **arguments}
    if not writable(name, first):
        return
    turn = WRITES[name]("visit", first)
    wholes = {compact([]), compact([["visit", first]])}
    for end in range(0, len(turn), 3):
        assert read(name, turn[:end])[0] in wholes, turn[:end]


IN_PYTHON = ("LFM2", "OLMo 3", "Llama 4")


@pytest.mark.parametrize("name", [name for name in WRITES if name not in (*TAGGED, *IN_PYTHON)])
def test_a_call_without_arguments_is_one(name: str) -> None:
    whole = WRITES[name]("now", {})
    end = "<|im_end|>" if name == "Mistral" else ""
    for written in ("", "null", '""', '"{}"') if "Gemma" not in name else ("",):
        turn = whole.replace("{}", written)
        if not written:  # nor the entry of the arguments
            turn = re.sub(r', "(?:arguments|parameters)": (?=\})', "", turn)
        if written or name != "Apertus":
            assert read(name, turn + end)[:2] == ('[["now", {}]]', True), turn


LOST = (
    '{"name": "visit", "args": {"count": 1}}',
    '{"name": "visit", "input": {"count": 1}}',
    '{"name": "visit", "count": 1}',
    '{"name": "visit", "id": 5}',
    '{"name": "visit", "arguments": {"count": 1}, "text": "a"}',
    '{"name": "visit", "arguments": {"count": 1}, "parameters": {"text": "a"}}',
    '{"name": "visit", "arguments": {"count": 1, "count": 2}}',
    '{"name": "visit", "arguments": {"count": 1}, "arguments": {"count": 2}}',
    '{"name": "visit", "arguments": [{"count": 1}]}',
    '{"name": "visit", "arguments": "count=1"}',
    '{"name": "visit", "arguments": 1}',
    '{"name": "visit", "arguments": {"count": 1},}',
    '{"name": "visit", "tool_name": "now", "arguments": {}}',
    '{"arguments": {"count": 1}}',
    '{"function": {"name": "visit"}, "arguments": {"count": 1}}',
    '{"type": "text", "name": "visit"}',
    '{"name": "now"} {"name": "visit", "arguments": {"count": ',
    '{"name": "visit"} and more',
)
JSON_FORMS = {
    HERMES: "<tool_call>@J</tool_call>",
    "Hunyuan, Jamba and Apriel": "<tool_calls>@J</tool_calls>",
    "Phi-4-mini and Granite 3": "<|tool_call|>@J<|/tool_call|>",
    "Command R7B and Command A": "<|START_ACTION|>@J<|END_ACTION|>",
    "Nemotron Nano 2 and Llama Nemotron": "<TOOLCALL>@J</TOOLCALL>",
    "Apertus": "<|tools_prefix|>@J<|tools_suffix|>",
    "GigaChat 3": "<|function_call|>@J",
    "LFM2": "<|tool_call_start|>@J<|tool_call_end|>",
    "Mistral": "[TOOL_CALLS]@J",
    "Llama 3": "@J",
}
ENTRIES = (
    '{"name": "visit", "parameters": {"count": 1}}',
    '{"name": "visit", "arguments": "{\\"count\\": 1}"}',
    '{"name": "visit", "arguments": "\\"{\\\\\\"count\\\\\\": 1}\\""}',
    '{"name": "visit", "arguments": {"count": "1"}}',
    '{"type": "function", "function": {"name": "visit", "arguments": {"count": 1}}}',
    '{"type": "function", "function": "visit", "parameters": {"count": 1}}',
    '{"name": "visit", "id": "a", "arguments": {"count": 1}}',
    '{"arguments": {"count": 1}, "name": "visit"}',
)


@pytest.mark.parametrize("name", JSON_FORMS)
def test_a_call_in_json_is_read_as_it_was_meant_or_not_at_all(name: str) -> None:
    for entry in ENTRIES:
        turn = JSON_FORMS[name].replace("@J", entry)
        assert read(name, turn)[:2] == ('[["visit", {"count": 1}]]', True), turn
    for entry in LOST:
        turn = JSON_FORMS[name].replace("@J", entry)
        calls, parsed, message = read(name, turn)
        assert (calls, parsed) == ("[]", False), turn
        assert "visit" in message["content"] or "count" in message["content"]


@pytest.mark.parametrize("name", [name for name in WRITES if name not in BARE])
def test_no_call_of_a_turn_with_a_broken_one_is_run(name: str) -> None:
    write = WRITES[name]
    good, other = write("visit", {"count": 1}), write("now", {})
    broken = other[: max(len(other) // 2, other.index("now") + 2)]
    for turn in (f"{good}{broken}", f"{broken}{good}"):
        calls, parsed, _ = read(name, turn)
        assert (calls, parsed) == ("[]", False) or calls == compact(
            [["visit", {"count": 1}]]
        ) * 0, turn


@pytest.mark.parametrize("name", [name for name in WRITES if name not in BARE])
def test_a_call_in_reasoning_without_an_end_is_unparsed(name: str) -> None:
    call = WRITES[name]("visit", {"count": 1})
    thought = next(one for one in TURN_FORMATS if one.name == name).fields["reasoning"]
    opens = thought.get("open", "<|channel>thought\n")
    closes = thought["close"]
    for before in ("", "look "):
        if before and name in ("gpt-oss", "Command R7B and Command A"):
            continue
        calls, parsed, message = read(name, f"{before}{opens}so {call}")
        assert (calls, parsed) == ("[]", False)
        assert "visit" in message["content"] and "reasoning" not in message
    calls, parsed, message = read(name, f"{opens}so {call}{closes}")
    assert (calls, parsed) == ("[]", False) and "visit" in message["content"]
    # A call in reasoning that has an end is a thought.
    after = {
        "gpt-oss": "<|channel|>final<|message|>fine",
        "Command R7B and Command A": "<|START_RESPONSE|>fine<|END_RESPONSE|>",
    }.get(name, "fine")
    calls, parsed, message = read(name, f"{opens}so {call}{closes}{after}")
    assert (calls, parsed, message["content"]) == ("[]", True, "fine")
    assert "visit" in message["reasoning"]


@pytest.mark.parametrize(
    ("name", "turn"),
    [
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>commentary"
            ' to=browser.search code<|message|>{"q": 1}<|call|>',
        ),
        ("Command R7B and Command A", "<|START_THINKING|>so<|END_THINKING|>It is sunny."),
        (QWEN, "<function=now>\n</function>"),
        ("MiniMax M2", '<minimax:tool_call>\n{"name": "now"}\n</minimax:tool_call>'),
        ("Kimi K2", "<|tool_call_begin|>now<|tool_call_end|>"),
        ("DeepSeek V3.1", f"{OPEN}now<｜tool▁call▁end｜>"),
        ("Gemma 4", '<|tool_call>call:now ""<tool_call|>'),
        ("gpt-oss", "<|channel|>commentary to=functions.now <|constrain|>json<|message|>"),
        ("Mistral", "[TOOL_CALLS]now[ARGS]"),
        (QWEN, "<tool_cal>\n<function=now>\n</function>\n</tool_call>"),
        ("LFM2", "<|tool_call_strt|>[now()]<|tool_call_end|>"),
        # A lost quote or end makes one argument of two.
        (
            QWEN,
            WRITES[QWEN]("visit", {"text": "a", "count": 1}).replace("</parameter>\n<", "</", 1),
        ),
        (
            GLM,
            WRITES[GLM]("visit", {"text": "a", "count": 1}).replace("</arg_value>", "</arg_val", 1),
        ),
        ("LFM2", "<|tool_call_start|>[visit(text='a, any='b')]<|tool_call_end|>"),
        ("OLMo 3", "<function_calls>visit(spot={'town'days': 2})</function_calls>"),
    ],
)
def test_what_is_in_no_part_of_the_message_is_unparsed(name: str, turn: str) -> None:
    calls, parsed, message = read(name, turn)
    assert (calls, parsed) == ("[]", False) and message["content"]


def test_text_outside_all_marks_is_not_lost_without_tools() -> None:
    turn = "<|START_THINKING|>so<|END_THINKING|>It is sunny."
    _, parsed, message = read("Command R7B and Command A", turn, tools=None)
    assert not parsed and message["content"] == "soIt is sunny."


def test_arguments_that_no_parameter_has_reach_the_tool() -> None:
    turn = WRITES[QWEN]("now", {"other": "7", "more": "text"})
    assert read(QWEN, turn)[:2] == ('[["now", {"other": 7, "more": "text"}]]', True)
    turn = WRITES[QWEN]("unknown", {"other": "a"})
    assert read(QWEN, turn)[:2] == ('[["unknown", {"other": "a"}]]', True)


def test_a_tag_may_say_that_its_value_is_a_text() -> None:
    form = WRITES["DeepSeek V3.2"]("visit", {"any": 7}).replace('"any"', '"any" string="{}"')
    for text, value in (("true", "7"), ("false", 7)):
        assert read("DeepSeek V3.2", form.format(text))[0] == compact([["visit", {"any": value}]])


@pytest.mark.parametrize("name", TAGGED)
def test_two_tags_with_one_key_are_unparsed(name: str) -> None:
    one, two = (WRITES[name]("visit", {"count": value}) for value in (1, 2))
    place = one.index("1")
    head = one.index("count")
    start = one.rindex("<", 0, head)
    end = one.index(">", one.index("</", place)) + 1
    doubled = one[:end] + two[start:end] + one[end:]
    assert read(name, doubled)[:2] == ("[]", False), doubled


@pytest.mark.parametrize("turn", ['{"name": "Bob"}', '[{"name": "Bob"}]', '{"function": "x"}'])
def test_json_that_names_no_tool_is_no_call_without_arguments(turn: str) -> None:
    calls, _, message = read("Llama 3", turn)
    assert (calls, message["content"]) == ("[]", turn)
    assert read("Llama 3", turn.replace("Bob", "now").replace("x", "now"))[0] == '[["now", {}]]'
