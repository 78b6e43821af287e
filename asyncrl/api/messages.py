"""Anthropic's /v1/messages."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field

from asyncrl.api.contract import Dialect, Part
from asyncrl.api.fields import (
    AtLeastOne,
    Body,
    Content,
    ContentPart,
    Harmless,
    Items,
    Open,
    by_type,
    check,
    invalid,
    new_id,
    overridden_of,
    rest_of,
)
from asyncrl.sessions.answers import Answer, ChatRequest
from asyncrl.sessions.requests import chosen, function_tools, part_text, stops_of, text_of
from asyncrl.text.chat_messages import Message, argument_values
from asyncrl.web.events import Event

REFUSED = {
    "mcp_servers": "connect the agent itself to them",
    "container": "run code in the agent",
}
"""Fields without which the answer would not be what the agent asked for → what to do."""
SIGNATURE = "YXN5bmNybA=="
"""Of thinking blocks. It proves nothing, but some clients rewrite a block that has none."""


class ToolUse(Open):
    """A tool call of an assistant's message."""

    type: str
    id: Any = None
    name: Any = None
    input: Any = None


class ToolResult(Open):
    """What a tool returned. `is_error` has no effect: templates cannot say it, but the text can."""

    type: str
    tool_use_id: Any = None
    content: Content = None
    is_error: Harmless = None


class Thinking(Open):
    """Reasoning of an assistant's message."""

    type: str
    thinking: Any = None
    signature: Harmless = None


Block = by_type(
    {"text": ContentPart, "tool_use": ToolUse, "tool_result": ToolResult, "thinking": Thinking},
    "text",
)
"""A block of a message."""


class TextBlock(Open):
    """A block of text."""

    type: Literal["text"]
    text: str


class MessageParam(Open):
    """A message of a chat."""

    role: Literal["user", "assistant", "system"]
    content: str | Items[Block]  # type: ignore[valid-type]


class ToolParam(Open):
    """A function that the model may call. `input_schema` is a JSON schema."""

    name: str = Field(min_length=1)
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: Any = None


class ToolChoice(Open):
    """Of type `auto`, or `none`: tool calls stay text. Others count as `auto`."""

    type: Any = None
    name: Any = None
    disable_parallel_tool_use: Any = None


class OutputFormat(Open):
    """What the text must be. A grammar forces tokens, so such a turn is not trained."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Open):
    """Settings of the text."""

    effort: Any = None
    format: OutputFormat | None = None


class MessagesBody(Body):
    """The body of POST /v1/messages."""

    messages: Items[MessageParam] = Field(min_length=1)
    max_tokens: AtLeastOne | None = None
    """Most tokens of the answer. Default: as many as fit."""
    system: str | Items[TextBlock] | None = None
    tools: Items[ToolParam] | None = None
    tool_choice: ToolChoice | None = None
    stop_sequences: Items[str] | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None


class AnsweredBlock(Open):
    """A block of text, a tool call, or reasoning."""

    type: Literal["text", "tool_use", "thinking"]


class MessagesUsage(Open):
    """Numbers of tokens."""

    input_tokens: int
    output_tokens: int


class MessagesAnswer(Open):
    """The answer of POST /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnsweredBlock]
    stop_reason: Literal["end_turn", "max_tokens", "tool_use", "stop_sequence"]
    stop_sequence: str | None
    usage: MessagesUsage


class AnthropicErrorDetail(Open):
    """An error of Anthropic's API, with a code for programs."""

    type: str
    message: str
    code: str
    session_end: str | None = None


class AnthropicErrorBody(BaseModel):
    """The body of an error answer."""

    type: Literal["error"]
    error: AnthropicErrorDetail


class Messages(Dialect):
    """One request, and its answer."""

    def __init__(self, tree: object, notes: Mapping[str, list[Message]]) -> None:
        """Raises ApiError, 400."""
        for name, fix in REFUSED.items():
            if isinstance(tree, dict) and tree.get(name):
                raise invalid(f"{name} is not supported; {fix}", name, "unsupported_parameter")
        body = check(MessagesBody, tree)
        given: Mapping[str, Any] = tree  # type: ignore[assignment]  # it was checked
        tools, unused = function_tools(_tools(given.get("tools") or ()), "input_schema")
        choice = body.tool_choice or ToolChoice()
        calls, forced = chosen("any" if choice.type == "tool" else choice.type)
        chat = [
            message
            for index, one in enumerate(given["messages"])
            for message in _messages(one, f"messages.{index}")
        ]
        if chat and chat[-1]["role"] == "assistant":
            raise invalid(
                "the last message is the assistant's, and a session does not continue an answer;"
                " end with a user's message or a tool result",
                "messages",
            )
        system = text_of(given.get("system"), "system")
        before: list[Message] = [{"role": "system", "content": system}] if system else []
        named = {
            **dict.fromkeys(unused, True),
            "tool_choice": forced,
            "disable_parallel_tool_use": bool(choice.disable_parallel_tool_use),
            "effort": bool(body.output_config and body.output_config.effort),
        }
        form = body.output_format or (body.output_config and body.output_config.format)
        request = ChatRequest(
            [*before, *chat],
            tools or None,
            max_tokens=body.max_tokens,
            stop=stops_of(body.stop_sequences, "stop_sequences"),
            schema=form.schema_ if form else None,
            calls=calls,
        )
        super().__init__(body, request, overridden_of(body, named))
        self._head: dict[str, Any] = {
            "id": new_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": body.model or "policy",
        }

    def answer(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The body of the answer."""
        (answer,) = answers
        return {
            **self._head,
            "content": list(_blocks(answer)),
            **_stop(answer),
            "usage": _usage(answer),
            **answer.more,
        }

    async def events(self, parts: AsyncIterator[Part]) -> AsyncGenerator[Event, None]:
        """The events of a streamed answer."""
        empty: dict[str, Any] = {"content": [], "usage": _usage(None)}
        ended = {"stop_reason": None, "stop_sequence": None}
        yield _event("message_start", message={**self._head, **empty, **ended})
        yield _event("ping")
        sent, more = "", dict[str, Any]()
        async for part in parts:
            more |= part.of_body
            if (answer := part.answer) is None:
                if part.text and not sent:
                    yield _begin(0, {"type": "text", "text": ""})
                sent += part.text
                if part.text:
                    yield _delta(0, "text_delta", text=part.text)
                continue
            rest = rest_of(answer, sent)
            blocks = list(_blocks(answer))
            if sent:  # its block is first, because it was sent first
                if rest:
                    yield _delta(0, "text_delta", text=rest)
                yield _event("content_block_stop", index=0)
                blocks = [block for block in blocks if block["type"] != "text"]
            for index, block in enumerate(blocks, start=bool(sent)):
                for event in _block_events(index, block, answer):
                    yield event
            more |= answer.more
            yield _event("message_delta", delta=_stop(answer), usage=_usage(answer), **more)
            yield _event("message_stop")


def _event(name: str, **fields: Any) -> Event:
    return Event({"type": name, **fields}, name)


def _begin(index: int, block: Mapping[str, Any]) -> Event:
    return _event("content_block_start", index=index, content_block=block)


def _delta(index: int, kind: str, **fields: Any) -> Event:
    return _event("content_block_delta", index=index, delta={"type": kind, **fields})


def _block_events(index: int, block: Mapping[str, Any], answer: Answer) -> Iterator[Event]:
    """The events of one whole block."""
    if block["type"] == "thinking":
        yield _begin(index, {**block, "thinking": "", "signature": ""})
        yield _delta(index, "thinking_delta", thinking=block["thinking"])
        yield _delta(index, "signature_delta", signature=block["signature"])
    elif block["type"] == "tool_use":
        yield _begin(index, {**block, "input": {}})
        yield _delta(index, "input_json_delta", partial_json=json.dumps(block["input"]))
    else:
        yield _begin(index, {**block, "text": ""})
        if block["text"]:
            yield _delta(index, "text_delta", text=block["text"])
    yield _event("content_block_stop", index=index)


def _blocks(answer: Answer) -> Iterator[dict[str, Any]]:
    """The content of an answer."""
    if reasoning := answer.reasoning:
        yield {"type": "thinking", "thinking": reasoning, "signature": SIGNATURE}
    calls, text = answer.calls, answer.text
    if text or not calls:
        yield {"type": "text", "text": text, "citations": None}
    for call in calls:
        arguments = argument_values(call["function"]["arguments"])
        yield {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": arguments if isinstance(arguments, dict) else {},
        }


def _stop(answer: Answer) -> dict[str, Any]:
    """Why the answer ended."""
    if answer.finish_reason != "stop":
        reason = "max_tokens"
    elif answer.calls:
        reason = "tool_use"
    else:
        reason = "end_turn" if answer.stop is None else "stop_sequence"
    sequence = answer.stop if reason == "stop_sequence" else None
    return {"stop_reason": reason, "stop_sequence": sequence}


def _usage(answer: Answer | None) -> dict[str, int]:
    """Numbers of tokens. Those of the prompt are known with the answer."""
    return {
        "input_tokens": 0 if answer is None else answer.prompt_tokens,
        "output_tokens": 0 if answer is None else answer.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _tools(tools: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Where each tool is in the body, and the tool. Raises ApiError, 400, for other types."""
    for index, tool in enumerate(tools):
        if tool.get("type") not in (None, "custom"):
            raise invalid(
                f"tools.{index} has the type {str(tool['type'])[:40]!r}, which the policy does not"
                " know; send tools with an input_schema",
                "tools",
            )
        yield f"tools.{index}", tool


def _messages(message: Mapping[str, Any], param: str) -> list[dict[str, Any]]:
    """The messages of one message of Anthropic's API: tool results are messages of their own."""
    role, content = message["role"], message["content"]
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = [(block, f"{param}.content.{index}") for index, block in enumerate(content)]
    return [_assistant(blocks)] if role == "assistant" else list(_others(role, blocks))


def _assistant(blocks: Sequence[tuple[Mapping[str, Any], str]]) -> dict[str, Any]:
    """An assistant's message: its text, tool calls and reasoning."""
    texts, calls, thoughts = [], [], []
    for block, param in blocks:
        if block["type"] == "tool_use":
            calls.append(_call(block, param))
        elif block["type"] == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        else:
            texts.append(part_text(block, param))
    kept: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if reasoning := "\n".join(thoughts):
        kept["reasoning"] = reasoning
    return kept | ({"tool_calls": calls} if calls else {})


def _call(block: Mapping[str, Any], param: str) -> dict[str, Any]:
    call_id, name, given = (block.get(one) for one in ("id", "name", "input"))
    if not (isinstance(call_id, str) and isinstance(name, str) and isinstance(given, Mapping)):
        raise invalid(f"{param} needs texts as id and name, and an object as input", "messages")
    function = {"name": name, "arguments": json.dumps(given)}
    return {"id": call_id, "type": "function", "function": function}


def _others(role: str, blocks: Sequence[tuple[Mapping[str, Any], str]]) -> Iterator[dict[str, Any]]:
    """The messages of a user's or system's blocks, in their order."""
    texts: list[str] = []
    for block, param in blocks:
        if block["type"] != "tool_result":
            texts.append(part_text(block, param))
            continue
        if texts:
            yield {"role": role, "content": "\n".join(texts)}
            texts = []
        if not isinstance(call_id := block.get("tool_use_id"), str):
            raise invalid(f"{param} needs a text as tool_use_id", "messages")
        result = text_of(block.get("content"), f"{param}.content")
        yield {"role": "tool", "tool_call_id": call_id, "content": result}
    if texts or not blocks:
        yield {"role": role, "content": "\n".join(texts)}
