"""OpenAI's /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from asyncrl.api.choices import ChoicesAnswer, ChoicesBody, ChoicesDialect
from asyncrl.api.contract import Part
from asyncrl.api.fields import (
    ContentPart,
    Harmless,
    Items,
    Open,
    TopLogprobs,
    check,
    invalid,
    overridden_of,
)
from asyncrl.sessions.answers import Answer, ChatRequest, Token
from asyncrl.sessions.chat_answers import chat_choice, chat_logprobs
from asyncrl.sessions.requests import (
    chat_message,
    chosen,
    function_tools,
    functions_of,
    refuse_fields,
    schema_of,
    stops_of,
)
from asyncrl.text.chat_messages import Message

MESSAGE_FIELDS = ("name", "tool_call_id", "reasoning", "reasoning_content")
"""Fields of a message that are kept as they are, beside its role, text and tool calls."""


class FunctionCall(Open):
    """What a tool call asks for. `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCall(Open):
    """A tool call of an assistant's message."""

    id: str
    type: str | None = None
    function: FunctionCall
    index: Harmless = None


class ChatMessage(Open):
    """A message of a chat. `developer` is a `system` for the chat template."""

    texts_read = MESSAGE_FIELDS
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[ContentPart] | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None


class Function(Open):
    """A function that the model may call. `parameters` is a JSON schema."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Any = None


class Tool(Open):
    """A tool of type `function`."""

    type: Literal["function"]
    function: Function


class NamedSchema(Open):
    """A JSON schema with a name."""

    name: Harmless = None
    description: Harmless = None
    strict: Harmless = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class ResponseFormat(Open):
    """What the text must be. A grammar forces tokens, so such a turn is not trained."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class ChatBody(ChoicesBody):
    """The body of POST /v1/chat/completions."""

    messages: Items[ChatMessage] = Field(min_length=1)
    tools: Items[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    """`auto`, or `none`: tool calls stay text. Others count as `auto`."""
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    """Whether the answer has the log-probs of its tokens."""
    top_logprobs: TopLogprobs | None = None
    """How many of the most probable tokens to list. A session lists the sampled one."""
    response_format: ResponseFormat | None = None
    modalities: Items[str] | None = None


class AnsweredMessage(Open):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Open):
    """One answer."""

    index: int
    message: AnsweredMessage
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatAnswer(ChoicesAnswer):
    """The answer of POST /v1/chat/completions."""

    choices: list[ChatChoice]


class Chat(ChoicesDialect):
    """One request, and its answer."""

    prefix, kind, event_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, tree: object, notes: Mapping[str, list[Message]]) -> None:
        """Raises ApiError, 400, and UnsupportedError."""
        if isinstance(tree, dict):
            refuse_fields(tree)
        body = check(ChatBody, tree)
        given: Mapping[str, Any] = tree  # type: ignore[assignment]  # it was checked
        tools, unused = function_tools(functions_of(given.get("tools") or ()), "parameters")
        calls, forced = chosen(body.tool_choice)
        named = {
            **dict.fromkeys(unused, True),
            "tool_choice": forced,
            "parallel_tool_calls": body.parallel_tool_calls is False and bool(tools),
            "top_logprobs": bool(body.top_logprobs),
        }
        request = ChatRequest(
            [_message(message, index) for index, message in enumerate(given["messages"])],
            tools or None,
            body.n or 1,
            body.max_completion_tokens or body.max_tokens,
            stop=stops_of(body.stop, "stop"),
            logprobs=bool(body.logprobs),
            schema=schema_of(given.get("response_format"), "response_format"),
            calls=calls,
        )
        top = body.top_logprobs or 0
        super().__init__(body, request, overridden_of(body, named), top)

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """A choice of the answer."""
        return chat_choice(index, answer, self.request.logprobs, self.top)

    def deltas(self, part: Part, text: str, is_first: bool) -> list[dict[str, Any]]:
        """What a part adds to its choice, one for each event."""
        delta: dict[str, Any] = {"role": "assistant"} if is_first else {}
        delta["content"] = text
        choice = {
            "index": part.choice,
            "delta": delta,
            "logprobs": self._logprobs(part.tokens),
            "finish_reason": None,
        }
        if (answer := part.answer) is None:
            return [{**choice, **part.more}]
        if reasoning := answer.reasoning:
            delta["reasoning"] = reasoning
        end = {"finish_reason": answer.chat_reason, **part.more}
        if not (calls := answer.calls):
            return [{**choice, **end}]
        if is_first:
            delta["content"] = text or None
        # One call in each chunk, as OpenAI does: some clients read only the first.
        other = {**choice, "logprobs": None}
        deltas = [{"tool_calls": [{"index": index, **call}]} for index, call in enumerate(calls)]
        asked = [{**other, "delta": delta} for delta in deltas]
        return [choice, *asked, {**other, "delta": {}, **end}]

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        return chat_logprobs(tokens, self.top) if self.request.logprobs else None


def _message(message: Mapping[str, Any], index: int) -> Message:
    """A message as sessions keep it."""
    if "content" not in message and message.get("role") != "assistant":
        raise invalid(
            f"messages.{index}.content is missing; set it", "messages", "missing_parameter"
        )
    read = chat_message(message, index)
    kept: dict[str, object] = {"role": read["role"], "content": read.get("content") or ""}
    if calls := read.get("tool_calls"):
        kept["tool_calls"] = [_call(call["id"], **call["function"]) for call in calls]
    return kept | {
        name: message[name] for name in MESSAGE_FIELDS if isinstance(message.get(name), str)
    }


def _call(call_id: str, /, name: str, arguments: str, **_: object) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}
