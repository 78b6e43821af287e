"""OpenAI's /v1/chat/completions: messages, through the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from asyncrl.contracts.messages import Details, GenerateRequest, Piece
from asyncrl.serving.answers import Head, Told, Words, siblings
from asyncrl.serving.dialects.fields import (
    MOST_LOGPROBS,
    Sampling,
    check,
    check_name,
    check_prompt,
    check_top,
    refuse_long_text,
)
from asyncrl.serving.dialects.render import Usage, ending, envelope, finite
from asyncrl.serving.errors import ApiError
from asyncrl.serving.identity import ServedModel
from asyncrl.text.template import MessagesError

__all__ = ["Chat", "ChatBody"]

OBJECT, EVENT = "chat.completion", "chat.completion.chunk"
UNSAID = ("annotations", "audio", "function_call", "name", "refusal", "tool_calls")
"""Fields of a message that a client sends back as null, or as an empty list, as the answer before
had them."""


class TextPart(BaseModel):
    """A part of a message's content."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    role: Literal["system", "developer", "user", "assistant"]
    """`developer` is OpenAI's newer name of `system`, which templates know."""
    content: str | list[TextPart]
    """Text, or parts that become lines."""

    @model_validator(mode="before")
    @classmethod
    def without_unsaid(cls, tree: Any) -> Any:
        return (
            {
                name: value
                for name, value in tree.items()
                if name not in UNSAID or value not in (None, [])
            }
            if isinstance(tree, dict)
            else tree
        )

    @property
    def plain(self) -> dict[str, str]:
        """As a template takes it."""
        content = (
            self.content
            if isinstance(self.content, str)
            else "\n".join(part.text for part in self.content)
        )
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatBody(Sampling):
    """The body of POST /v1/chat/completions, without fields that change nothing."""

    messages: list[Message] = Field(min_length=1)
    """The chat so far."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Longest answer, in tokens. Default: what the context has left."""
    logprobs: bool = False
    """Name the answer's tokens, with their log-probs."""
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    """So many of the most probable tokens at each place. Only with `logprobs`."""
    chat_template_kwargs: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Variables of the chat template, such as enable_thinking."""

    @model_validator(mode="after")
    def fields_fit(self) -> Self:
        self.refuse_contradictions()
        if self.top_logprobs and not self.logprobs:
            raise ValueError(
                "top_logprobs: it acts only with logprobs: true; leave it out, or set that"
            )
        return self


class Chat:
    """One request to /v1/chat/completions, and its answer."""

    prefix = "chatcmpl"

    def __init__(self, tree: Any, model: ServedModel) -> None:
        """Raises ApiError for a body that is wrong. What no model of this length takes is refused
        before anything works through it."""
        if isinstance(tree, dict):
            _refuse_many(tree.get("messages"), model)
        self.body = check(ChatBody, tree, "model and messages")
        check_name(self.body, model)
        check_top(self.body.top_logprobs, model, "top_logprobs")
        self._messages = [message.plain for message in self.body.messages]
        refuse_long_text(
            "".join(message["content"] for message in self._messages), model, "messages"
        )
        self._usage = Usage()
        self._prompt_ids: list[int] = []
        self._begun: set[int] = set()
        """Choices that have had an event."""

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
            said = (
                f"the chat template of {model.name!r} refuses the messages ({error}); correct them,"
                " or use /v1/completions"
            )
            raise ApiError(400, said, "invalid_value", "messages") from None
        refuse_long_text(text, model, "messages")  # what the template wrote around them included
        self._prompt_ids = await words.encode(text, rendered=True)
        longest = check_prompt(self._prompt_ids, self.body.max_tokens, model, "messages")
        self._usage.of_prompts([self._prompt_ids])
        return siblings(self.body.request(self._prompt_ids, longest), self.body.n)

    def answer(self, head: Head, choices: Sequence[Told]) -> dict[str, Any]:
        written = [
            self._choice(
                told,
                {"message": {"role": "assistant", "content": told.piece.text, "refusal": None}},
            )
            for told in choices
        ]
        return envelope(head, OBJECT, written) | {
            "usage": self._usage.shown(),
            "prompt_token_ids": self._prompt_ids,
        }

    def event(self, head: Head, told: Told) -> dict[str, Any]:
        delta = (
            {"content": told.piece.text}
            if told.choice in self._begun
            else {"role": "assistant", "content": told.piece.text}
        )
        first = {} if self._begun else {"prompt_token_ids": self._prompt_ids}
        self._begun.add(told.choice)
        return (
            envelope(head, EVENT, [self._choice(told, {"delta": delta})])
            | first
            | self._usage.in_event(self.body)
        )

    def last_event(self, head: Head) -> dict[str, Any] | None:
        return self._usage.last_event(self.body, envelope(head, EVENT, []))

    def _choice(self, told: Told, said: Mapping[str, Any]) -> dict[str, Any]:
        piece = told.piece
        self._usage.completion += len(piece.tokens.ids)
        return {
            "index": told.choice,
            **said,
            "token_ids": list(piece.tokens.ids),
            "logprobs": (
                {"content": _content(piece, told.texts), "refusal": None}
                if self.body.logprobs
                else None
            ),
            **ending(piece),
        }


def _refuse_many(messages: Any, model: ServedModel) -> None:
    """Each message takes a token at least."""
    if isinstance(messages, list) and len(messages) > model.max_model_len:
        text = (
            f"messages has {len(messages):,} messages, above the {model.max_model_len} tokens that"
            f" {model.name!r} takes; send fewer"
        )
        raise ApiError(400, text, "context_length_exceeded", "messages")


def _content(piece: Piece, texts: Mapping[int, str]) -> list[dict[str, Any]]:
    tokens = piece.tokens
    tops = tokens.top or ((),) * len(tokens.ids)
    return [
        _token(token, logprob, texts) | {"top_logprobs": [_token(*one, texts) for one in best]}
        for token, logprob, best in zip(tokens.ids, tokens.logprobs, tops, strict=True)
    ]


def _token(token: int, logprob: float | None, texts: Mapping[int, str]) -> dict[str, Any]:
    """`bytes` is null for a part of a character: the tokenizer does not tell which."""
    text = texts[token]
    return {
        "token": text,
        "logprob": finite(logprob),
        "bytes": None if "\ufffd" in text else list(text.encode()),
    }
