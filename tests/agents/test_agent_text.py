"""Text that is released while a turn is sampled begins the content of its message."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from agent_server import ADD_TOOL, call, tokenizer
from hypothesis import given, settings, strategies as st

from asyncrl.api.streamed_content import StreamedContent
from asyncrl.text.response import ResponseReader
from asyncrl.text.turn_formats import TURN_FORMATS, TurnFormat
from benchmarks.families import byte_tokenizer

PIECES = [
    call(1, 2),
    '<tool_call>{"name": "add", "arguments": 3}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": "</tool_call>"}}</tool_call>',
    "<tool_call>",
    "<think>so</think>",
    "<think>",
    "</think>",
    "<",
    "a < b",
    "<b>",
    "[1, 2]",
    "[TOOL_CALLS]",
    "{",
    " ",
    "\n\n",
    "word",
    "more words.",
]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> ResponseReader:
    return ResponseReader(tokenizer(tmp_path_factory.mktemp("model")))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    parts=st.lists(st.sampled_from(PIECES), max_size=6),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    tools=st.booleans(),
    end=st.booleans(),
)
def test_released_text_begins_the_content(
    reader: ResponseReader, parts: list[str], cuts: list[int], tools: bool, end: bool
) -> None:
    text = "".join(parts)
    held, released, place, turn = StreamedContent(tools), "", 0, 0
    while place < len(text):
        size = cuts[turn % len(cuts)]
        released += held.add(text[place : place + size])
        place, turn = place + size, turn + 1
    model: Any = reader._tokenizer
    begin = model.encode("<|im_start|>assistant\n", add_special_tokens=False)
    ids = model.encode(text + ("<|im_end|>" if end else ""), add_special_tokens=False)
    message, _ = reader.read(begin, ids, text, [ADD_TOOL] if tools else None)
    assert str(message["content"]).startswith(released)


def format_pieces(form: TurnFormat) -> list[str]:
    calls = ['{"name": "add", "arguments": {}}', "[add()]", "functools", form.opening, form.closing]
    return [*calls, *form.marks, "<think>", "</think>", "[", "word", " ", "\n", "<", "{"]


@pytest.mark.parametrize("form", TURN_FORMATS, ids=lambda form: form.name)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_released_text_begins_the_content_of_each_format(
    form: TurnFormat, data: st.DataObject
) -> None:
    reader, tools = format_reader(form.marks), data.draw(st.booleans())
    parts = data.draw(st.lists(st.sampled_from(format_pieces(form)), max_size=5))
    text, held = "".join(parts), StreamedContent(tools)
    released = "".join(held.add(part) for part in parts)
    model: Any = reader._tokenizer
    ids = model.encode(text, add_special_tokens=False)
    message, _ = reader.read([], ids, text, [ADD_TOOL] if tools else None)
    if reader.begins_content(tools):
        assert str(message["content"]).startswith(released)


@functools.lru_cache
def format_reader(marks: tuple[str, ...]) -> ResponseReader:
    """A reader of turns that have no special tokens."""
    model: Any = byte_tokenizer()
    model.chat_template = "{# " + " ".join(marks) + " #}{{ tools }}"
    return ResponseReader(model)


def test_a_word_that_begins_a_call_is_not_released() -> None:
    form = next(one for one in TURN_FORMATS if one.begins_with_word)
    reader, turn = format_reader(form.marks), 'functools[{"name": "add", "arguments": {}}]'
    model: Any = reader._tokenizer
    message, _ = reader.read([], model.encode(turn, add_special_tokens=False), turn, [ADD_TOOL])
    assert message["tool_calls"] and StreamedContent(True).add(turn)
    assert not reader.text_begins_content


@pytest.mark.parametrize(
    ("text", "tools", "released"),
    [
        ("plain words.", True, "plain words."),
        ("an end ", True, "an end"),
        ("a < b and 3 <4 <= 5", True, "a < b and 3 <4 <= 5"),
        ("lists [1, 2] [x]", True, "lists [1, 2] [x]"),
        ("so <tool_call>{", True, "so"),
        ("so <", True, "so"),
        ("so [TOOL_CALLS]", True, "so"),
        ("<think>why</think>so", False, ""),
        ("<b>one</b> [A] <3 [TOOL_CALLS] ", False, "<b>one</b> [A] <3 [TOOL_CALLS]"),
        ("a <thin", False, "a"),
        ("a <thing> b", False, "a <thing> b"),
        ("a </seed:think> b", False, "a"),
        ("a <|channel|> b", False, "a"),
        ("a [THINK] b", False, "a"),
        (" outer space", False, ""),
        ('{"name": 1}', True, ""),
        ('{"name": 1}', False, '{"name": 1}'),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_what_is_held_back(text: str, tools: bool, released: str, size: int) -> None:
    held = StreamedContent(tools)
    pieces = [text[place : place + size] for place in range(0, len(text), size)]
    assert "".join(held.add(piece) for piece in pieces) == released
