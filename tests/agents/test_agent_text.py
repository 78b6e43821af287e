"""Text that is released while a turn is sampled begins the content of its message."""

from __future__ import annotations

from typing import Any

import pytest
from agent_server import ADD_TOOL, call, tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.agents.heard import CertainText
from asyncrl.text.response import ResponseReader

PIECES = [
    call(1, 2),
    '<tool_call>{"name": "add", "arguments": 3}</tool_call>',
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


@settings(max_examples=400, deadline=None, derandomize=True)
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
    held, released, place, turn = CertainText(tools), "", 0, 0
    while place < len(text):
        size = cuts[turn % len(cuts)]
        released += held.add(text[place : place + size])
        place, turn = place + size, turn + 1
    model: Any = reader._tokenizer
    begin = model.encode("<|im_start|>assistant\n", add_special_tokens=False)
    ids = model.encode(text + ("<|im_end|>" if end else ""), add_special_tokens=False)
    message, _ = reader.read(begin, ids, text, [ADD_TOOL] if tools else None)
    assert str(message["content"]).startswith(released)


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
        (" outer space", False, ""),
        ('{"name": 1}', True, ""),
        ('{"name": 1}', False, '{"name": 1}'),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_what_is_held_back(text: str, tools: bool, released: str, size: int) -> None:
    held = CertainText(tools)
    pieces = [text[place : place + size] for place in range(0, len(text), size)]
    assert "".join(held.add(piece) for piece in pieces) == released
