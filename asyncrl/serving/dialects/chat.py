"""OpenAI's /v1/chat/completions: renders messages with the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

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
from asyncrl.text.template import MessagesError
from asyncrl.web.answers import finite
from asyncrl.web.errors import ApiError

__all__ = ["Chat", "ChatBody"]

OBJECT, EVENT = "chat.completion", "chat.completion.chunk"
OPTIONAL = ("annotations", "audio", "function_call", "name", "refusal", "tool_calls")
"""Fields of a message that clients copy from an earlier answer. They may be null or an empty
list."""


class TextPart(BaseModel):
    """A part of a message's content."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    role: Literal["system", "developer", "user", "assistant"]
    """`developer` is OpenAI's newer name for `system`. Templates only know `system`."""
    content: str | list[TextPart]
    """A string, or text parts that are joined with line breaks."""

    @model_validator(mode="before")
    @classmethod
    def without_empty_fields(cls, tree: object) -> object:
        return (
            {
                name: value
                for name, value in tree.items()
                if name not in OPTIONAL or value not in (None, [])
            }
            if isinstance(tree, dict)
            else tree
        )

    @property
    def plain(self) -> dict[str, str]:
        """The message as chat templates expect it."""
        content = (
            self.content
            if isinstance(self.content, str)
            else "\n".join(part.text for part in self.content)
        )
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatBody(Sampling):
    """The body of POST /v1/chat/completions, without fields that have no effect."""

    messages: list[Message] = Field(min_length=1)
    """The chat so far."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Longest completion, in tokens. Default: the rest of the context."""
    logprobs: bool = False
    """Return the completion's tokens with their log-probs."""
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
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
        self._messages = [message.plain for message in self.body.messages]
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
