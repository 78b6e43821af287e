"""OpenAI's /v1/chat/completions: renders messages with the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from pydantic import Field, model_validator

from asyncrl.contracts.messages import Details, GenerateRequest, StreamPiece
from asyncrl.serving.answers import ChoicePiece, Head, Words, siblings
from asyncrl.serving.dialects.fields import (
    MOST_LOGPROBS,
    Sampling,
    check,
    check_name,
    check_prompt,
    check_top,
    refuse_long_text,
)
from asyncrl.serving.dialects.render import TokenUsage, ending, envelope
from asyncrl.serving.identity import ServedModel
from asyncrl.sessions.requests import UnsupportedError, chat_message
from asyncrl.text.chat_messages import MessagesError
from asyncrl.web.answers import finite
from asyncrl.web.bodies import Whole
from asyncrl.web.errors import ApiError, printable

OBJECT, EVENT = "chat.completion", "chat.completion.chunk"
ROLES = ("system", "developer", "user", "assistant")
KEPT = ("name", "reasoning", "reasoning_content")
"""Texts of a message that chat templates may write, beside its role and content."""
CALLS = ("tool_calls", "tool_call_id", "function_call")
OPTIONAL = ("annotations", "audio", "refusal", *CALLS, *KEPT)
"""Fields that clients copy from an earlier answer. They may be null or an empty list."""


class ChatBody(Sampling):
    """The body of POST /v1/chat/completions, without fields that have no effect."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    """The chat so far. A content is a string, text parts that are joined with line breaks, or
    null. `developer` is OpenAI's newer name for `system`."""
    max_tokens: Whole | None = Field(default=None, ge=1)
    """Longest completion, in tokens. Default: the rest of the context."""
    logprobs: bool = False
    """Return the completion's tokens with their log-probs."""
    top_logprobs: Whole | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    """Number of most probable tokens to return at each position. Requires `logprobs`."""
    chat_template_kwargs: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Variables of the chat template, such as enable_thinking."""

    @model_validator(mode="after")
    def fields_fit(self) -> Self:
        self.refuse_contradictions()
        if self.top_logprobs and not self.logprobs:
            raise ValueError(
                "top_logprobs: only valid with logprobs: true; remove it, or set logprobs"
            )
        return self


class Chat:
    """One request to /v1/chat/completions, and its answer."""

    prefix = "chatcmpl"

    def __init__(self, tree: object, model: ServedModel) -> None:
        """Validate the body. Raises ApiError. Lengths are checked first, so that an oversized body
        costs no further work."""
        if isinstance(tree, dict):
            _refuse_many(tree.get("messages"), model)
        self.body = check(ChatBody, tree, "model and messages")
        check_name(self.body, model)
        check_top(self.body.top_logprobs, model, "top_logprobs")
        self._messages = [_plain(one, place) for place, one in enumerate(self.body.messages)]
        refuse_long_text(
            "".join(message["content"] for message in self._messages), model, "messages"
        )
        self._usage = TokenUsage()
        self._prompt_ids: list[int] = []
        self._started: set[int] = set()
        """Choices that have sent an event."""

    @property
    def streams(self) -> bool:
        return self.body.stream

    @property
    def details(self) -> Details:
        return Details(not self.streams, self.body.top_logprobs or 0, spelled=self.body.logprobs)

    async def requests(self, words: Words, model: ServedModel) -> list[GenerateRequest]:
        try:
            text = await words.render(self._messages, self.body.chat_template_kwargs)
        except MessagesError as error:
            message = (
                f"the chat template of {model.name!r} refuses the messages ({error}); correct them,"
                " or use /v1/completions"
            )
            raise ApiError(400, message, "invalid_value", "messages") from None
        refuse_long_text(text, model, "messages")  # now with the template's own text
        self._prompt_ids = await words.encode(text, rendered=True)
        longest = check_prompt(self._prompt_ids, self.body.max_tokens, model, "messages")
        self._usage.of_prompts([self._prompt_ids])
        return siblings(self.body.request(self._prompt_ids, longest), self.body.n)

    def answer(self, head: Head, choices: Sequence[ChoicePiece]) -> dict[str, object]:
        written = [
            self._choice(
                part,
                {"message": {"role": "assistant", "content": part.piece.text, "refusal": None}},
            )
            for part in choices
        ]
        return envelope(head, OBJECT, written) | {
            "usage": self._usage.shown(),
            "prompt_token_ids": self._prompt_ids,
        }

    def event(self, head: Head, part: ChoicePiece) -> dict[str, object]:
        delta = (
            {"content": part.piece.text}
            if part.choice in self._started
            else {"role": "assistant", "content": part.piece.text}
        )
        first = {} if self._started else {"prompt_token_ids": self._prompt_ids}
        self._started.add(part.choice)
        return (
            envelope(head, EVENT, [self._choice(part, {"delta": delta})])
            | first
            | self._usage.in_event(self.body)
        )

    def last_event(self, head: Head) -> dict[str, object] | None:
        return self._usage.last_event(self.body, envelope(head, EVENT, []))

    def _choice(self, part: ChoicePiece, content: Mapping[str, object]) -> dict[str, object]:
        piece = part.piece
        self._usage.completion += len(piece.tokens.ids)
        return {
            "index": part.choice,
            **content,
            "token_ids": list(piece.tokens.ids),
            "logprobs": (
                {"content": _content(piece, part.texts), "refusal": None}
                if self.body.logprobs
                else None
            ),
            **ending(piece),
        }


def _plain(message: Mapping[str, Any], place: int) -> dict[str, str]:
    """A message as chat templates expect it. Raises ApiError, 400, which names the field."""
    at = f"messages.{place}"
    for name, value in message.items():
        if name in ("role", "content", "cache_control") or (
            name in OPTIONAL and value in (None, [])
        ):
            continue
        shown = f"{at}.{printable(name)}"
        if name in CALLS:
            why = f"{shown} is not supported; tool calls are not implemented; leave it out"
            raise ApiError(400, why, "unknown_parameter", "messages")
        if name not in KEPT:
            problem = "is not supported" if name in OPTIONAL else "is unknown"
            why = f"{shown} {problem}; leave it out"
            raise ApiError(400, why, "unknown_parameter", "messages")
        if not isinstance(value, str):
            raise ApiError(400, f"{shown} is no string; send one", "invalid_value", "messages")
    if (role := message.get("role")) not in ROLES:
        why = f"{at}.role: send one of {', '.join(ROLES)}"
        raise ApiError(400, why, "invalid_value", "messages")
    if "content" not in message and role != "assistant":
        why = f"{at}.content is missing; set it"
        raise ApiError(400, why, "missing_parameter", "messages")
    try:
        read = chat_message(message, place)
    except UnsupportedError as error:
        raise ApiError(400, str(error), "invalid_value", "messages") from None
    kept = {name: message[name] for name in KEPT if message.get(name) is not None}
    return {"role": read["role"], "content": read.get("content") or "", **kept}


def _refuse_many(messages: object, model: ServedModel) -> None:
    """Raise ApiError for more messages than tokens, since each message takes at least one."""
    if isinstance(messages, list) and len(messages) > model.max_model_len:
        text = (
            f"messages has {len(messages):,} messages, above the {model.max_model_len} tokens that"
            f" {model.name!r} accepts; send fewer"
        )
        raise ApiError(400, text, "context_length_exceeded", "messages")


def _content(piece: StreamPiece, texts: Mapping[int, str]) -> list[dict[str, object]]:
    tokens = piece.tokens
    tops = tokens.top or ((),) * len(tokens.ids)
    return [
        _token(token, logprob, texts)
        | {"top_logprobs": [_token(*alternative, texts) for alternative in best]}
        for token, logprob, best in zip(tokens.ids, tokens.logprobs, tops, strict=True)
    ]


def _token(token: int, logprob: float | None, texts: Mapping[int, str]) -> dict[str, object]:
    """`bytes` is null for a part of a character, because the tokenizer does not say which part."""
    text = texts[token]
    return {
        "token": text,
        "logprob": finite(logprob),
        "bytes": None if "\ufffd" in text else list(text.encode()),
    }
