"""OpenAI's /v1/completions: one or more prompts, as text or token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

from pydantic import Field, model_validator

from asyncrl.contracts.messages import Details, GenerateRequest, StreamPiece, Tokens
from asyncrl.serving.answers import ChoicePiece, Head, Words, siblings
from asyncrl.serving.dialects.fields import (
    MOST_LOGPROBS,
    Sampling,
    check,
    check_name,
    check_prompt,
    check_top,
    refuse_long_prompt,
    refuse_long_text,
)
from asyncrl.serving.dialects.render import TokenUsage, ending, envelope
from asyncrl.serving.identity import ServedModel
from asyncrl.web.answers import MOST_CHOICES, finite
from asyncrl.web.bodies import Whole
from asyncrl.web.errors import ApiError

OBJECT = "text_completion"
NO_TOKENS = Tokens((), ())


class CompletionBody(Sampling):
    """The body of POST /v1/completions, without fields that have no effect."""

    prompt: str | list[Whole] | list[str] | list[list[Whole]]
    """A string, token ids, or a list of either."""
    max_tokens: Whole = Field(default=16, ge=0)
    """Longest completion, in tokens. 0 is valid with `echo`, and returns the prompt alone."""
    echo: bool = False
    """Return the prompt before each completion, in the text and in the log-probs."""
    logprobs: Whole | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    """Return the tokens, and this many of the most probable ones at each position."""

    @model_validator(mode="after")
    def fields_fit(self) -> Self:
        self.refuse_contradictions()
        if not self.max_tokens and not self.echo:
            raise ValueError("max_tokens: 0 generates nothing; use 1 or more, or set echo: true")
        if len(self.prompts) * self.n > MOST_CHOICES:
            raise ValueError(
                f"prompt: {len(self.prompts)} prompts with n = {self.n} are above {MOST_CHOICES}"
                " completions; send several requests"
            )
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, also if there is only one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [part for part in self.prompt if isinstance(part, int)]
        several = [part for part in self.prompt if not isinstance(part, int)]
        return [*several] or [ids]


class Completions:
    """One request to /v1/completions, and its answer."""

    prefix = "cmpl"

    def __init__(self, tree: object, model: ServedModel) -> None:
        """Validate the body. Raises ApiError. Lengths are checked first, so that an oversized body
        costs no further work."""
        if isinstance(tree, dict):
            _refuse_long(tree.get("prompt"), model)
        self.body = check(CompletionBody, tree, "model and prompt")
        check_name(self.body, model)
        check_top(self.body.logprobs, model, "logprobs")
        self._usage = TokenUsage()
        self._echoed: list[str] = []
        self._written: dict[int, int] = {}
        """Choice → number of characters of its tokens that have been sent."""

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

    def answer(self, head: Head, choices: Sequence[ChoicePiece]) -> dict[str, object]:
        written = [self._choice(part) for part in choices]
        return envelope(head, OBJECT, written) | {"usage": self._usage.shown()}

    def event(self, head: Head, part: ChoicePiece) -> dict[str, object]:
        return envelope(head, OBJECT, [self._choice(part)]) | self._usage.in_event(self.body)

    def last_event(self, head: Head) -> dict[str, object] | None:
        return self._usage.last_event(self.body, envelope(head, OBJECT, []))

    def _choice(self, part: ChoicePiece) -> dict[str, object]:
        piece, first = part.piece, part.choice not in self._written
        echoed = self._echoed[part.choice // self.body.n] if first and self.body.echo else ""
        self._usage.completion += len(piece.tokens.ids)
        return {
            "index": part.choice,
            "text": echoed + piece.text,
            "token_ids": list(piece.tokens.ids),
            "logprobs": self._logprobs(piece, part.texts, part.choice),
            **ending(piece),
        }

    def _logprobs(
        self, piece: StreamPiece, texts: Mapping[int, str], choice: int
    ) -> dict[str, object]:
        """Log-probs of the tokens of an echoed prompt, and of the completion."""
        offset = self._written.setdefault(choice, 0)
        if self.body.logprobs is None:
            return {
                "token_logprobs": [finite(logprob) for logprob in piece.tokens.logprobs],
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
            "token_logprobs": [finite(logprob) for logprob in logprobs],
            "tokens": [_name(token, texts) for token in ids],
            "top_logprobs": tops or None,
            "text_offset": offsets,
        }


def _top(
    token: int, logprob: float | None, best: Sequence[tuple[int, float]], texts: Mapping[int, str]
) -> dict[str, float | None] | None:
    """The most probable tokens at one position, and the sampled token. If two tokens have the same
    text, only the more probable one is returned."""
    if logprob is None:
        return None
    named: dict[str, float | None] = {}
    for candidate, value in (*best, (token, logprob)):
        named.setdefault(_name(candidate, texts), finite(value))
    return named


def _name(token: int, texts: Mapping[int, str]) -> str:
    """A token's text; its id if the text is empty or a part of a character."""
    return f"token_id:{token}" if not texts[token] or "\ufffd" in texts[token] else texts[token]


def _refuse_long(prompt: object, model: ServedModel) -> None:
    """Raise ApiError for a prompt that is too long. Wrong types are left to `check`."""
    prompts: list[object] = [prompt]
    if isinstance(prompt, list) and any(isinstance(item, str | list) for item in prompt[:1]):
        prompts = prompt
    if len(prompts) > MOST_CHOICES:
        raise ApiError(
            400,
            f"prompt has {len(prompts):,} prompts, above {MOST_CHOICES}; send several requests",
            "invalid_value",
            "prompt",
        )
    for text_or_ids in prompts:
        if isinstance(text_or_ids, str):
            refuse_long_text(text_or_ids, model, "prompt")
        elif isinstance(text_or_ids, list):
            refuse_long_prompt(len(text_or_ids), model, "prompt")
