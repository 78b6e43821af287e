"""Messages that clients send back in their own way, and messages that they changed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncrl.sessions.chat_digests import chat_digests

CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'},
}


def assistant(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", **fields}


@pytest.mark.parametrize(
    ("sampled", "sent"),
    [
        (assistant(content="7"), assistant(content=[{"type": "text", "text": "7"}])),
        (assistant(content="7\n"), assistant(content="7")),
        (assistant(content="7"), assistant(content="7", refusal=None, audio=None, tool_calls=None)),
        (assistant(content="7"), assistant(content="7", annotations=[], tool_calls=[])),
        (assistant(content="7"), assistant(content="7", provider_specific_fields={"a": 1})),
        (assistant(content="7"), assistant(content="7", parsed={"a": 1}, id="x", prefix=False)),
        (assistant(content="7"), assistant(content="7", name="Ada")),
        (assistant(content="<think>3+4</think>\n\n7"), assistant(content="7")),
        (assistant(content="7"), assistant(content=[{"type": "output_text", "text": "7"}])),
        (
            assistant(tool_calls=[{**CALL, "function": {"name": "now", "arguments": ""}}]),
            assistant(tool_calls=[{**CALL, "function": {"name": "now", "arguments": "{}"}}]),
        ),
        (
            assistant(tool_calls=[{**CALL, "function": {"name": "f", "arguments": '{"a": 1.0}'}}]),
            assistant(tool_calls=[{**CALL, "function": {"name": "f", "arguments": '{"a": 1}'}}]),
        ),
        (assistant(tool_calls=[CALL]), assistant(tool_calls=[{**CALL, "id": "another"}])),
        (assistant(content="7", reasoning="3+4"), assistant(content="7")),
        (assistant(content="7", reasoning_content="3+4"), assistant(content="7")),
        (assistant(content=None, tool_calls=[CALL]), assistant(content="", tool_calls=[CALL])),
        (
            assistant(tool_calls=[CALL]),
            assistant(
                tool_calls=[
                    {
                        "function": {"arguments": '{"b":2,"a":1}', "name": "add"},
                        "type": "function",
                        "id": "c1",
                        "index": 0,
                    }
                ]
            ),
        ),
        (
            {"role": "user", "content": "a"},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
                ],
            },
        ),
    ],
)
def test_the_same_message_in_another_form(sampled: dict[str, Any], sent: dict[str, Any]) -> None:
    assert chat_digests([sampled]) == chat_digests([sent])


@pytest.mark.parametrize(
    ("sampled", "sent"),
    [
        (assistant(content="7"), assistant(content="8")),
        (assistant(content="7"), {"role": "user", "content": "7"}),
        (assistant(content="7"), assistant(content="7", tool_calls=[CALL])),
        (
            assistant(tool_calls=[CALL]),
            assistant(tool_calls=[{**CALL, "function": {"name": "add", "arguments": '{"a": 1}'}}]),
        ),
        (
            {"role": "tool", "content": "7", "tool_call_id": "c1"},
            {"role": "tool", "content": "7", "tool_call_id": "c2"},
        ),
        ({"role": "user", "content": "a"}, {"role": "user", "content": "a "}),
        ({"role": "user", "content": "a"}, {"role": "user", "content": "a", "name": "Ada"}),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "y"}}]},
        ),
    ],
)
def test_another_message(sampled: dict[str, Any], sent: dict[str, Any]) -> None:
    assert chat_digests([sampled]) != chat_digests([sent])


def test_digests_of_beginnings_agree_up_to_the_first_different_message() -> None:
    chat = [{"role": "user", "content": str(number)} for number in range(6)]
    other = [*chat[:3], {"role": "user", "content": "other"}, *chat[4:]]
    first, second = chat_digests(chat), chat_digests(other)
    assert [a == b for a, b in zip(first, second, strict=True)] == [True] * 3 + [False] * 3
    assert len(set(first + second)) == 9


def test_tool_calls_with_other_ids_are_the_same_if_their_answers_are() -> None:
    def chat(first: str, second: str, *answered: str) -> list[dict[str, Any]]:
        calls = [{**CALL, "id": first}, {**CALL, "id": second}]
        answers = [{"role": "tool", "content": "7", "tool_call_id": one} for one in answered]
        return [assistant(tool_calls=calls), *answers]

    assert chat_digests(chat("a", "b", "b")) == chat_digests(chat("x", "y", "y"))
    assert chat_digests(chat("a", "b", "b")) != chat_digests(chat("x", "y", "x"))


def test_the_head_counts() -> None:
    chat = [{"role": "user", "content": "a"}]
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert chat_digests(chat, tools) == chat_digests(chat, json.loads(json.dumps(tools)))
    assert chat_digests(chat, tools) != chat_digests(chat)


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"role": 3, "content": 4},
        {"role": "assistant", "tool_calls": "none"},
        {"role": "assistant", "tool_calls": [None, {"function": None}]},
        {"role": "assistant", "tool_calls": [{"function": {"arguments": "{not JSON"}}]},
        {"role": "user", "content": [None, "text", {"type": "text"}]},
        {"role": "user", "content": {"type": "text", "text": "a"}},
        {"role": "user", "content": "\ud800"},
        {"role": "assistant", "tool_calls": [{"function": {"arguments": "[" * 200_000}}]},
        {"role": "user", "content": {1: "a", "b": 2}},
    ],
)
def test_odd_messages_have_a_digest(message: dict[str, Any]) -> None:
    assert chat_digests([message]) == chat_digests([message])
