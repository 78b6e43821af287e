"""OpenAI's /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from asyncrl.agents.contract import HeardText, Part
from asyncrl.agents.dialects.fields import (
    AtLeastOne,
    Body,
    Choices,
    Open,
    TopLogprobs,
    calls_of,
    check,
    content_of,
    finish_reason,
    invalid,
    new_id,
    overridden_of,
    rest_of,
    schema_of,
)
from asyncrl.runtime.clock import steady_time
from asyncrl.sessions.answers import Answer, ChatRequest
from asyncrl.sessions.requests import (
    chat_message,
    chosen,
    function_tools,
    functions_of,
    refuse_fields,
    stops_of,
)
from asyncrl.text.template import Message, Schema
from asyncrl.web.answers import finite, usage
from asyncrl.web.events import DONE, Event

MESSAGE_FIELDS = ("name", "tool_call_id", "reasoning", "reasoning_content")
"""Fields of a message that are kept as they are, beside its role, text and tool calls."""


class ContentPart(Open):
    """A part of a message. Only text can be read."""

    type: str
    text: str | None = None


class FunctionCall(Open):
    """What a tool call asks for. `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCall(Open):
    """A tool call of an assistant's message."""

    id: str
    type: str | None = None
    function: FunctionCall


class ChatMessage(Open):
    """A message of a chat. `developer` is a `system` for the chat template."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class Function(Open):
    """A function that the model may call. `parameters` is a JSON schema."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Open):
    """A tool of type `function`."""

    type: Literal["function"]
    function: Function


class NamedSchema(Open):
    """A JSON schema with a name."""

    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class ResponseFormat(Open):
    """What the text must be. A grammar forces tokens, so such a turn is not trained."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StreamOptions(Open):
    """What a stream has in addition."""

    include_usage: bool | None = None


class ChatBody(Body):
    """The body of POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    """`auto`, or `none`: tool calls stay text. Others count as `auto`."""
    parallel_tool_calls: bool | None = None
    n: Choices | None = None
    """Number of answers, each a turn."""
    max_tokens: AtLeastOne | None = None
    max_completion_tokens: AtLeastOne | None = None
    """Most tokens of an answer."""
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    """Whether the answer has the log-probs of its tokens."""
    top_logprobs: TopLogprobs | None = None
    """Only the sampled token is listed."""
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    modalities: list[str] | None = None


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


class Usage(Open):
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatAnswer(Open):
    """The answer of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Chat:
    """One request, and its answer."""

    def __init__(self, tree: object, notes: Mapping[str, list[Message]]) -> None:
        """Raises ApiError, 400, and UnsupportedError."""
        if isinstance(tree, dict):
            refuse_fields(tree)
        body = self._body = check(ChatBody, tree)
        given: Mapping[str, Any] = tree  # type: ignore[assignment]  # it was checked
        self.streams = bool(body.stream)
        tools, unused = function_tools(functions_of(given.get("tools") or ()), "parameters")
        calls, forced = chosen(body.tool_choice)
        named = {
            **dict.fromkeys(unused, True),
            "tool_choice": forced,
            "parallel_tool_calls": body.parallel_tool_calls is False and bool(tools),
            "top_logprobs": bool(body.top_logprobs),
        }
        self.overridden: Sequence[str] = overridden_of(body, named)
        self.request = ChatRequest(
            [_message(message, place) for place, message in enumerate(given["messages"])],
            tools or None,
            body.n or 1,
            body.max_completion_tokens or body.max_tokens,
            stop=stops_of(body.stop, "stop"),
            logprobs=bool(body.logprobs),
            schema=_schema(body.response_format),
            calls=calls,
        )
        self._head = {
            "id": new_id("chatcmpl-"),
            "created": int(steady_time()),
            "model": body.model or "policy",
        }

    def answer(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The body of the answer."""
        choices = [
            {
                "index": index,
                "message": _shown(answer),
                "logprobs": self._logprobs(answer),
                "finish_reason": finish_reason(answer),
            }
            for index, answer in enumerate(answers)
        ]
        return {
            **self._head,
            "object": "chat.completion",
            "choices": choices,
            "usage": usage_of(answers),
        }

    async def events(self, parts: AsyncIterator[Part]) -> AsyncGenerator[Event, None]:
        """The events of a streamed answer."""
        sent: dict[int, str] = {}
        async for part in parts:
            if not isinstance(part, HeardText):
                for index, answer in enumerate(part):
                    rest = rest_of(content_of(answer), sent.get(index, ""))
                    delta = self._last_delta(answer, rest, first=index not in sent)
                    yield self._event(index, delta, self._logprobs(answer))
                    # One call in each chunk, as OpenAI does: some clients read only the first.
                    for place, call in enumerate(calls_of(answer)):
                        yield self._event(index, {"tool_calls": [{"index": place, **call}]})
                    yield self._event(index, {}, finish=finish_reason(answer))
                if self._wants_usage:
                    yield self._chunk([], usage_of(part))
                continue
            first = {} if part.choice in sent else {"role": "assistant"}
            sent[part.choice] = sent.get(part.choice, "") + part.text
            yield self._event(part.choice, {**first, "content": part.text})
        yield DONE

    @property
    def _wants_usage(self) -> bool:
        options = self._body.stream_options
        return options is not None and bool(options.include_usage)

    @staticmethod
    def _last_delta(answer: Answer, rest: str, first: bool) -> dict[str, Any]:
        """What an answer has beside the text that was sent, and its tool calls."""
        message = _shown(answer)
        kept = {name: message[name] for name in ("role", "content") if first}
        kept |= {name: message[name] for name in ("reasoning",) if name in message}
        return kept | ({"content": rest} if rest else {})

    def _event(
        self, index: int, delta: object, logprobs: object = None, finish: str | None = None
    ) -> Event:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return self._chunk([choice], None)

    def _chunk(self, choices: list[dict[str, object]], usage: object) -> Event:
        shown = {"usage": usage} if self._wants_usage else {}
        return Event({**self._head, "object": "chat.completion.chunk", "choices": choices, **shown})

    def _logprobs(self, answer: Answer) -> dict[str, Any] | None:
        if not self.request.logprobs:
            return None
        tokens = [
            {"token": text, "logprob": finite(logprob), "bytes": list(text.encode())}
            for text, logprob in answer.tokens
        ]
        tops = bool(self._body.top_logprobs)
        content = [{**token, "top_logprobs": [token] if tops else []} for token in tokens]
        return {"content": content, "refusal": None}


def usage_of(answers: Sequence[Answer]) -> dict[str, int]:
    """The numbers of tokens of an answer."""
    prompt = answers[0].prompt_tokens if answers else 0
    return usage(prompt, sum(answer.completion_tokens for answer in answers))


def _message(message: Mapping[str, Any], place: int) -> Message:
    """A message as sessions keep it."""
    read = chat_message(message, place)
    kept: dict[str, object] = {"role": read["role"], "content": read.get("content") or ""}
    if calls := read.get("tool_calls"):
        kept["tool_calls"] = [_call(call["id"], **call["function"]) for call in calls]
    return kept | {
        name: message[name] for name in MESSAGE_FIELDS if isinstance(message.get(name), str)
    }


def _call(call_id: str, /, name: str, arguments: str, **_: object) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _schema(form: ResponseFormat | None) -> Schema | None:
    if form is None:
        return None
    schema = None if form.json_schema is None else form.json_schema.schema_
    problem = invalid("response_format has no json_schema.schema; set it", "response_format")
    return schema_of(form.type, schema, problem)


def _shown(answer: Answer) -> dict[str, Any]:
    """An answer's message as clients get it."""
    calls = calls_of(answer)
    text = content_of(answer)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": text or (None if calls else ""),
        "refusal": None,
    }
    if reasoning := answer.message.get("reasoning"):
        message["reasoning"] = str(reasoning)
    return message | ({"tool_calls": calls} if calls else {})
