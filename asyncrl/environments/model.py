"""The model of a session, with the interface of `openai.AsyncOpenAI`. It runs in this process and
does not import openai, which takes 60 MB."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from asyncrl.runtime.clock import steady_time
from asyncrl.sessions.answers import Answer, ChatRequest
from asyncrl.sessions.chat_answers import chat_choice, usage_of
from asyncrl.sessions.requests import (
    LABELS,
    UnsupportedError,
    chat_message,
    chosen,
    functions_of,
    refuse_fields,
    resolved,
    schema_of,
    stops_of,
    unused_of,
)
from asyncrl.text.chat_messages import Message, Schema, are_messages
from asyncrl.text.schema_references import PartsLeft
from asyncrl.web.answers import MOST_CHOICES

WITHOUT_EFFECT = LABELS | {"modalities", "timeout"}
"""Arguments that change nothing here, and need not be counted."""
RETRY_KEY = "idempotency-key"
"""Header that names a request which a client may send again."""
ABSENT = (
    "annotations",
    "audio",
    "content",
    "function_call",
    "moderation",
    "reasoning",
    "refusal",
    "role",
    "service_tier",
    "system_fingerprint",
    "tool_calls",
)
"""Fields that openai's models always have."""


class SessionUrl(NamedTuple):
    """Where a session is served to agents that speak HTTP."""

    address: str
    """Such as `http://127.0.0.1:4000`."""
    key: str
    """Of this session only. It is void when the session ends."""

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that OpenAI's and Anthropic's clients read."""
        return {
            "OPENAI_BASE_URL": f"{self.address}/v1",
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.address,
            "ANTHROPIC_API_KEY": self.key,
        }


class ChatSession(Protocol):
    """What answers chats: a `Session`, or a stand-in in another process."""

    async def chat(self, request: ChatRequest) -> list[Answer]: ...


class Reply(dict[str, Any]):
    """A part of an answer, with its fields as items and as attributes. Like openai's models, it has
    `model_dump()`."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if name in ABSENT:
            return None
        raise AttributeError(f"the answer has no field {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def model_dump(
        self,
        exclude_none: bool = False,
        exclude: Collection[str] | None = None,
        include: Collection[str] | None = None,
        **_: object,
    ) -> dict[str, Any]:
        """The answer as plain dicts and lists."""
        return {
            name: _plain(value, exclude_none)
            for name, value in self.items()
            if (value is not None or not exclude_none)
            and name not in (exclude or ())
            and (include is None or name in include)
        }


def _plain(value: Any, exclude_none: bool) -> Any:
    if isinstance(value, Reply):
        return value.model_dump(exclude_none)
    return [_plain(item, exclude_none) for item in value] if isinstance(value, list) else value


class Model:
    """The model, bound to one session. `await model.chat.completions.create(messages=…)` takes one
    turn.

    The run decides about sampling. Other values that a request gives, such as a temperature, have
    no effect and are counted in `overridden`.
    """

    def __init__(
        self, session: ChatSession, name: str = "policy", url: SessionUrl | None = None
    ) -> None:
        self.overridden: Counter[str] = Counter()
        self._url = url
        self.chat = _Chat(_Completions(session, name, self.overridden))

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of a program that talks to this session: OPENAI_BASE_URL,
        OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY.

        Raises:
            UnsupportedError: the session has no URL.
        """
        if self._url is None:
            raise UnsupportedError(
                "this session has no URL; set environment.url: true, or give the agent in the"
                " config as environment.agent or environment.command"
            )
        return self._url.variables

    @property
    def base_url(self) -> str:
        """The URL for `openai.AsyncOpenAI`. Raises UnsupportedError."""
        return self.variables["OPENAI_BASE_URL"]

    @property
    def api_key(self) -> str:
        """The key of this session. Raises UnsupportedError."""
        return self.variables["OPENAI_API_KEY"]

    def with_options(
        self, *, timeout: object = None, max_retries: object = None, default_headers: object = None
    ) -> Model:
        """This model. The options have no effect: the run decides about time and retries."""
        return self

    copy = with_options

    async def __aenter__(self) -> Model:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def close(self) -> None:
        """Does nothing, as the session belongs to the run."""


class _Chat:
    def __init__(self, completions: _Completions) -> None:
        self.completions = completions


class _Completions:
    def __init__(self, session: ChatSession, name: str, overridden: Counter[str]) -> None:
        self._session, self._name, self._overridden = session, name, overridden
        self._answers = 0

    async def create(
        self,
        *,
        messages: Sequence[Message | Reply],
        tools: Sequence[Schema] | None = None,
        n: int | None = None,
        max_tokens: int | None = None,
        max_completion_tokens: int | None = None,
        stream: bool | None = False,
        stop: str | Sequence[str] | None = None,
        logprobs: bool | None = None,
        response_format: Mapping[str, Any] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Any:
        """Take a turn. Returns a chat completion, or an async iterator of its chunks with
        `stream=True`.

        Raises:
            UnsupportedError: an argument asks for what a session does not do.
            Those of `Session.chat`.
        """
        n, max_tokens = _number("n", n), _number("max_tokens", max_tokens)
        max_completion_tokens = _number("max_completion_tokens", max_completion_tokens)
        extra_headers = dict(more.pop("extra_headers", None) or {})
        refuse_fields(more)
        calls, forced = chosen(tool_choice)
        chat = _chat(messages)
        schemas, strict = _tools(tools)
        stops, schema = stops_of(stop, "stop"), schema_of(response_format, "response_format")
        unused = [name for name in more if more[name] is not None and name not in WITHOUT_EFFECT]
        self._overridden.update([*unused, *strict, *(["tool_choice"] if forced else [])])
        key = _key(extra_headers, chat, tools, n, stop, response_format)
        answers = await self._session.chat(
            ChatRequest(
                chat,
                schemas,
                n or 1,
                max_completion_tokens or max_tokens,
                key,
                stops,
                bool(logprobs),
                schema,
                calls,
                overridden=self._overridden.total(),
            )
        )
        self._answers += 1
        head = {
            "id": f"chatcmpl-{self._answers}",
            "created": int(steady_time()),
            "model": str(more.get("model") or self._name),
        }
        if not stream:
            return _completion(head, answers)
        options = more.get("stream_options") or {}
        return Stream(_chunks(head, answers, bool(options.get("include_usage"))))


def _number(name: str, value: object) -> int | None:
    """A number of a request. Like JSON, it may be 1.0. Raises UnsupportedError."""
    most = MOST_CHOICES if name == "n" else math.inf
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    if number is None or (type(number) is int and 1 <= number <= most):
        return number
    wanted = f"from 1 to {most}" if name == "n" else "above 0"
    raise UnsupportedError(f"{name}: {value!r} is not a whole number {wanted}", name)


def _chat(messages: Sequence[Message | Reply]) -> list[Message]:
    given = [
        message.model_dump() if isinstance(message, Reply) else message for message in messages
    ]
    if not are_messages(given):
        raise UnsupportedError(
            f"messages = {str(messages)[:80]!r} is not a list of messages with roles", "messages"
        )
    return [chat_message(message, index) for index, message in enumerate(given)]


def _tools(tools: Sequence[Schema] | None) -> tuple[list[Schema] | None, list[str]]:
    """The tools, and those of their fields that have no effect."""
    found: list[Schema] = []
    unused: list[str] = []
    parts = PartsLeft()
    for index, (where, function) in enumerate(functions_of(tools or ())):
        unused += unused_of(function, "parameters", where)
        kept = {name: value for name, value in function.items() if name != "strict"}
        tool = {**(tools or ())[index], "function": kept}
        found.append(resolved(tool, f"{where}.parameters", parts))
    return found or None, unused


def _key(headers: Mapping[str, object], *request: object) -> str | None:
    """The name of a request with an idempotency key. The key alone would give another request with
    it the answer of this one."""
    for name, value in headers.items():
        if name.lower() == RETRY_KEY:
            named = json.dumps([str(value), *request], sort_keys=True, default=str)
            return hashlib.blake2b(named.encode(errors="replace"), digest_size=16).hexdigest()
    return None


def _reply(value: Any) -> Any:
    """The value with replies instead of dicts."""
    if isinstance(value, Mapping):
        return Reply({name: _reply(item) for name, item in value.items()})
    return [_reply(item) for item in value] if isinstance(value, list) else value


def _completion(head: Mapping[str, Any], answers: Sequence[Answer]) -> Any:
    # Tokens are there if log-probs were asked for.
    choices = [
        chat_choice(index, answer, bool(answer.tokens)) for index, answer in enumerate(answers)
    ]
    usage = usage_of(answers, len(answers))
    return _reply({**head, "object": "chat.completion", "choices": choices, "usage": usage})


class Stream:
    """The chunks of an answer, as openai's `AsyncStream`."""

    def __init__(self, chunks: AsyncIterator[Reply]) -> None:
        self._chunks = chunks

    def __aiter__(self) -> AsyncIterator[Reply]:
        return self._chunks

    async def __anext__(self) -> Reply:
        return await anext(self._chunks)

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def close(self) -> None:
        """Does nothing, as the whole answer has come."""


async def _chunks(
    head: Mapping[str, Any], answers: Sequence[Answer], wants_usage: bool
) -> AsyncIterator[Reply]:
    """Each choice as a chunk with its text, one for each tool call, and one with its end."""
    for index, answer in enumerate(answers):
        message = _reply(chat_choice(index, answer, False)["message"])
        calls = [
            Reply(tool_calls=[Reply(call, index=number)])
            for number, call in enumerate(message.pop("tool_calls", ()))
        ]
        for delta in (message, *calls, Reply()):
            finish = None if delta else answer.chat_reason
            choice = Reply(index=index, delta=delta, finish_reason=finish, logprobs=None)
            yield Reply(**head, object="chat.completion.chunk", choices=[choice], usage=None)
    if wants_usage:
        end = Reply(usage_of(answers, len(answers)))
        yield Reply(**head, object="chat.completion.chunk", choices=[], usage=end)
