"""Sampled turns as messages: text, reasoning and tool calls of several kinds of models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_families import CHATML, HEADERS, save_chat_model

from asyncrl.text.chat_messages import Message
from asyncrl.text.response import ResponseReader, format_name, in_reasoning
from asyncrl.text.tokenizer import decode, load_tokenizer
from benchmarks.families import byte_tokenizer

TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
HERMES = CHATML.replace("m.content", "(m.content or '')") + "{# <tool_call> #}"
CALL = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
OWN = {
    "start_anchor": "<|head|>assistant<|/head|>\n\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"call (?P<name>\w+)",
            "close": ";",
            "content": "json",
            "repeats": True,
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
        "content": {"close": "<|eot|>"},
    },
}


def read(tokenizer: Any, text: str, plain: str = "plain") -> tuple[Message, bool]:
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "q"}], add_generation_prompt=True, tokenize=False
    )
    ids = [tokenizer.encode(one, add_special_tokens=False) for one in (prompt, text)]
    return ResponseReader(tokenizer).read(*ids, plain, TOOLS)


@pytest.fixture
def hermes(tmp_path: Path) -> Any:
    return load_tokenizer(save_chat_model(tmp_path / "model", HERMES))


@pytest.mark.parametrize("stop", ["\nEnd:", "\nEnd: ", "\n\n", "End:"])
def test_the_line_break_of_a_stop_string_is_no_content(hermes: Any, stop: str) -> None:
    seen = decode(hermes, hermes.encode("<think>a</think>Look at", add_special_tokens=False))
    message, _ = read(hermes, f"<think>a</think>Look at{stop}", seen)
    assert message["content"] == "Look at"


@pytest.mark.parametrize("before", ["<think>a</think>", CALL, f"<think>a</think>so {CALL}"])
def test_a_stop_string_is_no_content(hermes: Any, before: str) -> None:
    def seen(text: str) -> str:
        return decode(hermes, hermes.encode(text, add_special_tokens=False))

    message, _ = read(hermes, f"{before}Look at\nEnd:", seen(f"{before}Look at\n"))
    assert str(message["content"]).endswith("Look at\n")
    # One that ends a call is a part of it, and what was said before it stays.
    text = f"so }} {CALL}"
    message, _ = read(hermes, text, seen(text)[: seen(text).rindex("}")])
    assert message["content"] == "so }" and message["tool_calls"]


def test_a_hermes_call_is_found(hermes: Any) -> None:
    text = (
        'so <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call><|im_end|>'
    )
    message, parsed = read(hermes, text)
    assert parsed and message["content"] == "so"
    (call,) = message["tool_calls"]  # type: ignore[misc]
    assert call["function"]["name"] == "add" and call["type"] == "function"
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": [2]}


def test_text_around_a_call_is_kept(hermes: Any) -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    message, parsed = read(hermes, f"one {call} two <think>why</think>three<|im_end|>")
    assert parsed and message["content"] == "one\ntwo\nthree" and message["reasoning"] == "why"


def test_calls_of_one_answer_and_of_later_ones_have_ids_of_their_own(hermes: Any) -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    calls: list[Any] = []
    for before in ([], [1] * 5):
        message, _ = ResponseReader(hermes).read(
            before, hermes.encode(call * 2, add_special_tokens=False), "", TOOLS
        )
        calls += message["tool_calls"]  # type: ignore[arg-type]
    assert len({call["id"] for call in calls}) == 4


def test_a_call_is_text_if_no_tool_was_offered(hermes: Any) -> None:
    ids = hermes.encode('<tool_call>{"name": "add", "arguments": {}}</tool_call>')
    message, parsed = ResponseReader(hermes).read([], ids, "plain", None)
    assert parsed and message == {"role": "assistant", "content": "plain"}


def test_reasoning_is_kept_apart(hermes: Any) -> None:
    message, parsed = read(hermes, "<think>hm</think>yes<|im_end|>")
    assert parsed
    assert message == {"role": "assistant", "content": "yes", "reasoning": "hm"}


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{'name': 1}</tool_call><|im_end|>",
        '<tool_call>{"name": "add"',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "1"}</tool_call>',
        '<tool_call>["add"]</tool_call>',
        "<tool_call></tool_call>",
        '<tool_call>{"name": "add", "arguments": {"a": "\\ud83d"}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": [1e999]}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": " ", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add\\u001b[31m", "arguments": {}}</tool_call>',
    ],
)
def test_a_call_that_cannot_be_parsed_is_text(hermes: Any, text: str) -> None:
    message, parsed = read(hermes, text)
    assert not parsed and message == {"role": "assistant", "content": "plain"}


@pytest.mark.parametrize("text", ["", "<|im_end|>", "yes<|im_end|>", "</tool_call>", "a" * 5000])
def test_an_answer_without_a_call_is_its_text(hermes: Any, text: str) -> None:
    assert read(hermes, text) == ({"role": "assistant", "content": "plain"}, True)


def test_the_models_own_template_comes_first(tmp_path: Path) -> None:
    folder = save_chat_model(tmp_path / "model", HEADERS)
    settings = Path(folder) / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "response_template": OWN}))
    tokenizer: Any = load_tokenizer(folder)
    assert format_name(tokenizer) == "its own response_template"
    message, parsed = read(tokenizer, 'now call add{"a": 2};<|eot|>')
    (call,) = message["tool_calls"]  # type: ignore[misc]
    assert parsed and call["function"] == {"name": "add", "arguments": '{"a": 2}'}


def test_a_mark_in_an_argument_of_the_models_own_template_ends_no_call() -> None:
    tokenizer: Any = byte_tokenizer()
    tokenizer.chat_template, tokenizer.response_template = HEADERS, OWN
    for arguments in ('{"a": "x; y"}', '{"a": 2}'):
        message, parsed = read(tokenizer, f"now call add{arguments};")
        (call,) = message["tool_calls"]  # type: ignore[misc]
        assert parsed and call["function"] == {"name": "add", "arguments": arguments}


def test_a_call_in_open_reasoning_of_the_models_own_template_is_unparsed() -> None:
    tokenizer: Any = byte_tokenizer()
    tokenizer.chat_template = HEADERS
    think = {"open": "<think>", "close": "</think>"}
    tokenizer.response_template = {**OWN, "fields": {**OWN["fields"], "reasoning": think}}  # type: ignore[dict-item]
    assert read(tokenizer, 'now <think>so call add{"a": 2};')[0]["content"] == "plain"
    assert not read(tokenizer, 'now <think>so call add{"a": 2};')[1]
    assert read(tokenizer, "<think>so</think>fine")[1]


def test_a_model_without_calls_writes_text(tmp_path: Path) -> None:
    tokenizer: Any = load_tokenizer(save_chat_model(tmp_path / "model", CHATML))
    assert format_name(tokenizer) is None
    assert read(tokenizer, "<tool_call>x</tool_call>")[0]["content"] == "plain"


@pytest.mark.parametrize(
    ("text", "within"),
    [
        ("assistant\n<think>", True),
        ("assistant\n<think>\n\n</think>\n\n", False),
        ("<think>a</think><seed:think>b", True),
        ("[THINK]a", True),
        ("[THINK]a[/THINK]b", False),
        ("to think", False),
        ("<|assistant_start|><|inner_prefix|>", True),
        ("<|START_THINKING|>a<|END_THINKING|>", False),
    ],
)
def test_where_reasoning_goes_on(text: str, within: bool) -> None:
    assert in_reasoning(text) is within


def test_text_does_not_begin_the_content_where_marks_are_unseen(hermes: Any) -> None:
    assert not ResponseReader(hermes).text_begins_content  # <think> is a special token here
    assert not ResponseReader(hermes).begins_content(tools=False)
    seen: Any = byte_tokenizer()
    seen.chat_template = HERMES
    assert ResponseReader(seen).text_begins_content
    thinks: Any = byte_tokenizer()
    thinks.chat_template = HERMES
    thinks.add_special_tokens({"extra_special_tokens": ["<think>"]})
    assert not ResponseReader(thinks).text_begins_content
    calls: Any = byte_tokenizer()
    calls.chat_template = HERMES
    calls.add_special_tokens({"extra_special_tokens": ["<tool_call>"]})
    assert not ResponseReader(calls).text_begins_content
    assert ResponseReader(calls).begins_content(tools=False)
    seen.response_template = OWN
    assert not ResponseReader(seen).text_begins_content
