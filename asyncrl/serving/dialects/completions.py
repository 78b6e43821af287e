"""OpenAI's /v1/completions: prompts of text or token ids, one or several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from pydantic import Field, model_validator

from asyncrl.contracts.messages import Details, GenerateRequest, Piece, Tokens
from asyncrl.serving.answers import Head, Told, Words, siblings
from asyncrl.serving.dialects.fields import (
    MOST_CHOICES,
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

__all__ = ["CompletionBody", "Completions"]

OBJECT = "text_completion"
NO_TOKENS = Tokens((), ())


class CompletionBody(Sampling):
    """The body of POST /v1/completions, without fields that change nothing."""

    prompt: str | list[int] | list[str] | list[list[int]]
    """Text, token ids, or a list of either."""
    max_tokens: int = Field(default=16, ge=0)
    """Longest completion, in tokens. 0 with `echo`: the prompt alone."""
    echo: bool = False
    """Put the prompt before each completion, in the text and in the log-probs."""
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    """Name the tokens, and so many of the most probable ones at each place."""

    @model_validator(mode="after")
    def fields_fit(self) -> Self:
        self.refuse_contradictions()
        if not self.max_tokens and not self.echo:
            raise ValueError("max_tokens: 0 gives nothing; ask for 1 or more, or set echo: true")
        if len(self.prompts) * self.n > MOST_CHOICES:
            raise ValueError(
                f"prompt: {len(self.prompts)} prompts of n = {self.n} completions are above"
                f" {MOST_CHOICES}; send several requests"
            )
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several."""
        several = (
            isinstance(self.prompt, list) and self.prompt and not isinstance(self.prompt[0], int)
        )
        return list(self.prompt) if several else [self.prompt]  # type: ignore[list-item, arg-type]


class Completions:
    """One request to /v1/completions, and its answer."""

    prefix = "cmpl"

    def __init__(self, tree: Any, model: ServedModel) -> None:
        """Raises ApiError for a body that is wrong. What no model of this length takes is refused
        before anything works through it."""
        if isinstance(tree, dict):
            _refuse_long(tree.get("prompt"), model)
        self.body = check(CompletionBody, tree, "model and prompt")
        check_name(self.body, model)
        check_top(self.body.logprobs, model, "logprobs")
        self._usage = Usage()
        self._echoed: list[str] = []
        self._written: dict[int, int] = {}
        """Choice → characters of its tokens that were told."""

    @property
    def streams(self) -> bool:
        return self.body.stream

    @property
    def details(self) -> Details:
        spelled = self.body.logprobs is not None
        return Details(
            not self.streams, self.body.logprobs or 0, self.body.echo and spelled, spelled
        )

    async def requests(self, words: Words, model: ServedModel) -> list[GenerateRequest]:
        body, prompts = self.body, []
        for prompt in body.prompts:
            ids = await words.encode(prompt) if isinstance(prompt, str) else prompt
            check_prompt(ids, max(body.max_tokens, 1), model, "prompt")
            prompts.append(ids)
            if body.echo:
                self._echoed.append(prompt if isinstance(prompt, str) else await words.decode(ids))
        self._usage.of_prompts(prompts)
        return [
            choice
            for ids in prompts
            for choice in siblings(body.request(ids, body.max_tokens), body.n)
        ]

    def answer(self, head: Head, choices: Sequence[Told]) -> dict[str, Any]:
        written = [self._choice(told) for told in choices]
        return envelope(head, OBJECT, written) | {"usage": self._usage.shown()}

    def event(self, head: Head, told: Told) -> dict[str, Any]:
        return envelope(head, OBJECT, [self._choice(told)]) | self._usage.in_event(self.body)

    def last_event(self, head: Head) -> dict[str, Any] | None:
        return self._usage.last_event(self.body, envelope(head, OBJECT, []))

    def _choice(self, told: Told) -> dict[str, Any]:
        piece, first = told.piece, told.choice not in self._written
        echoed = self._echoed[told.choice // self.body.n] if first and self.body.echo else ""
        self._usage.completion += len(piece.tokens.ids)
        return {
            "index": told.choice,
            "text": echoed + piece.text,
            "token_ids": list(piece.tokens.ids),
            "logprobs": self._logprobs(piece, told.texts, told.choice),
            **ending(piece),
        }

    def _logprobs(self, piece: Piece, texts: Mapping[int, str], choice: int) -> dict[str, Any]:
        """Of the completion's tokens, and of an echoed prompt's before them."""
        offset = self._written.setdefault(choice, 0)
        if self.body.logprobs is None:
            return {
                "token_logprobs": [finite(one) for one in piece.tokens.logprobs],
                "tokens": None,
                "top_logprobs": None,
                "text_offset": None,
            }
        offsets, tops = [], []
        prompt = piece.prompt or NO_TOKENS
        ids, logprobs = (*prompt.ids, *piece.tokens.ids), (*prompt.logprobs, *piece.tokens.logprobs)
        for token in ids:
            offsets.append(offset)
            offset += len(texts[token])
        self._written[choice] = offset
        if self.body.logprobs:
            tops = [
                _top(*place, texts)
                for place in zip(ids, logprobs, (*prompt.top, *piece.tokens.top), strict=True)
            ]
        return {
            "token_logprobs": [finite(one) for one in logprobs],
            "tokens": [_name(token, texts) for token in ids],
            "top_logprobs": tops or None,
            "text_offset": offsets,
        }


def _top(
    token: int, logprob: float | None, best: Sequence[tuple[int, float]], texts: Mapping[int, str]
) -> dict[str, float | None] | None:
    """The most probable tokens at one place, and the one that was chosen. Of two with one text
    the better one is named."""
    if logprob is None:
        return None
    named: dict[str, float | None] = {}
    for one, its in (*best, (token, logprob)):
        named.setdefault(_name(one, texts), finite(its))
    return named


def _name(token: int, texts: Mapping[int, str]) -> str:
    """A token's text; its number if it has none of its own."""
    return f"token_id:{token}" if not texts[token] or "\ufffd" in texts[token] else texts[token]


def _refuse_long(prompt: Any, model: ServedModel) -> None:
    """Before the body is worked through. Wrong kinds are left to its check."""
    several = isinstance(prompt, list) and any(isinstance(one, str | list) for one in prompt[:1])
    if several and len(prompt) > MOST_CHOICES:
        raise ApiError(
            400,
            f"prompt has {len(prompt):,} prompts, above {MOST_CHOICES}; send several requests",
            "invalid_value",
            "prompt",
        )
    for one in prompt if several else [prompt]:
        if isinstance(one, str):
            refuse_long_text(one, model, "prompt")
        elif isinstance(one, list) and len(one) >= model.max_model_len:
            text = (
                f"prompt of {len(one):,} tokens leaves no room in the {model.max_model_len} that"
                f" {model.name!r} takes; shorten it"
            )
            raise ApiError(400, text, "context_length_exceeded", "prompt")
