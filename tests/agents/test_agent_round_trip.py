"""An answer that a client sends back is the session's own message again, in every API. A stream has
the same answer in its parts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from agent_server import ADD_TOOL
from hypothesis import given, settings, strategies as st

from asyncrl.api.chat import Chat
from asyncrl.api.contract import Part
from asyncrl.api.messages import Messages
from asyncrl.api.responses import Responses
from asyncrl.sessions.answers import Answer
from asyncrl.sessions.chat_digests import chat_digests

USER = {"role": "user", "content": "q"}
TOOL: Any = ADD_TOOL["function"]
HEADS: dict[Any, dict[str, Any]] = {
    Chat: {"tools": [ADD_TOOL]},
    Responses: {"tools": [{"type": "function", **TOOL}]},
    Messages: {"tools": [{"name": "add", "input_schema": TOOL["parameters"]}], "max_tokens": 9},
}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-9, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@st.composite
def answers(draw: st.DrawFn) -> Answer:
    message: dict[str, Any] = {"role": "assistant", "content": draw(st.text(max_size=8))}
    if reasoning := draw(st.text(max_size=4)):
        message["reasoning"] = reasoning
    arguments = draw(st.lists(st.dictionaries(st.text(max_size=3), VALUES, max_size=2), max_size=2))
    if arguments:
        message["tool_calls"] = [
            {
                "id": f"call_{place}",
                "type": "function",
                "function": {"name": "add", "arguments": json.dumps(given)},
            }
            for place, given in enumerate(arguments)
        ]
    return Answer(message, draw(st.sampled_from(["stop", "length"])), 5, 7, 1)


def body(kind: Any, more: list[Any]) -> dict[str, Any]:
    name = "input" if kind is Responses else "messages"
    return {**HEADS[kind], name: [USER, *more]}


def sent_back(kind: Any, shown: dict[str, Any]) -> list[Any]:
    """What a client adds to its chat: the answer, and results of its calls or a question."""
    if kind is Chat:
        message = shown["choices"][0]["message"]
        calls = [call["id"] for call in message.get("tool_calls") or ()]
        results = [{"role": "tool", "tool_call_id": one, "content": "3"} for one in calls]
        return [message, *(results or [USER])]
    if kind is Responses:
        calls = [item["call_id"] for item in shown["output"] if item["type"] == "function_call"]
        outputs = [{"type": "function_call_output", "call_id": one, "output": "3"} for one in calls]
        return [*shown["output"], *(outputs or [USER])]
    used = [block["id"] for block in shown["content"] if block["type"] == "tool_use"]
    blocks = [{"type": "tool_result", "tool_use_id": one, "content": "3"} for one in used]
    return [
        {"role": "assistant", "content": shown["content"]},
        {"role": "user", "content": blocks} if blocks else USER,
    ]


def streamed(kind: Any, dialect: Any, answer: Answer, sizes: list[int]) -> dict[str, Any]:
    """The answer as a client puts it together from the events."""

    async def parts() -> AsyncIterator[Part]:
        place = 0
        for size in sizes:
            if text := str(answer.message["content"])[place : place + size]:
                yield Part(0, text)
            place += size
        yield Part(0, answer=answer)

    async def read() -> list[Any]:
        return [event.data async for event in dialect.events(parts())]

    events = asyncio.run(read())
    if kind is Responses:
        whole: dict[str, Any] = events[-1]["response"]
        done = [event["item"] for event in events if event["type"].endswith("output_item.done")]
        assert done == whole["output"]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        texts = [event for event in events if event["type"] == "response.output_text.delta"]
        assert "".join(event["delta"] for event in texts) == answer.message["content"]
        return whole
    if kind is Chat:
        message: dict[str, Any] = {"content": "", "tool_calls": []}
        for event in events[:-1]:
            delta = event["choices"][0]["delta"]
            message["content"] += delta.pop("content", None) or ""
            message["tool_calls"] += delta.pop("tool_calls", ())
            message |= delta
        return {"choices": [{"message": {k: v for k, v in message.items() if v != []}}]}
    content: list[Any] = []
    fields = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "json"}
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(content)
            content.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta" and event["delta"]["type"] in fields:
            _, value = event["delta"].items()
            content[event["index"]][fields[event["delta"]["type"]]] += value[1]
    for block in content:
        written = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(written)
    return {"content": content}


@pytest.mark.parametrize("kind", HEADS)
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(answer=answers(), sizes=st.none() | st.lists(st.integers(1, 5), max_size=3))
def test_an_answer_that_is_sent_back_is_the_same(
    kind: Any, answer: Answer, sizes: list[int] | None
) -> None:
    dialect = kind(body(kind, []), {})
    shown = dialect.answer([answer]) if sizes is None else streamed(kind, dialect, answer, sizes)
    more = json.loads(json.dumps(sent_back(kind, shown)))
    again = kind(body(kind, more), {}).request
    expected = chat_digests([*dialect.request.messages, answer.message], dialect.request.tools)
    assert chat_digests(again.messages, again.tools)[1] == expected[-1]
    assert [message["role"] for message in again.messages][:2] == ["user", "assistant"]


def test_answers_without_a_question_between_them_stay_apart() -> None:
    said = [
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"text": "why"}]},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "3"},
        {"type": "function_call", "call_id": "d", "name": "add", "arguments": "{}"},
    ]
    _, one, two, result, three = Responses(body(Responses, said), {}).request.messages
    assert one == {"role": "assistant", "content": "one", "reasoning": "why"}
    assert two["content"] == "two" and len(two["tool_calls"]) == 1  # type: ignore[arg-type]
    assert result["tool_call_id"] == "c"
    assert three["content"] == "" and len(three["tool_calls"]) == 1  # type: ignore[arg-type]
