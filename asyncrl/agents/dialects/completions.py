"""OpenAI's /v1/completions: continues a text."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal

from asyncrl.agents.contract import HeardText, Part
from asyncrl.agents.dialects.chat import StreamOptions, Usage, usage_of
from asyncrl.agents.dialects.fields import (
    AtLeastOne,
    Body,
    Choices,
    Open,
    TopLogprobs,
    check,
    content_of,
    invalid,
    new_id,
    overridden_of,
    rest_of,
)
from asyncrl.runtime.clock import steady_time
from asyncrl.sessions.answers import Answer, ChatRequest
from asyncrl.sessions.requests import stops_of
from asyncrl.text.template import Message
from asyncrl.web.answers import end_reason, finite
from asyncrl.web.events import DONE, Event


class CompletionsBody(Body):
    """The body of POST /v1/completions."""

    prompt: str | list[str]
    """One text. Its tokens, if a turn or an earlier prompt has them, are not encoded again."""
    n: Choices | None = None
    """Number of answers, each a turn."""
    max_tokens: AtLeastOne | None = None
    """Most tokens of an answer. Default: as many as fit."""
    stop: str | list[str] | None = None
    logprobs: TopLogprobs | None = None
    """Whether the answer has its tokens. Only the sampled ones are listed."""
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None
    stream_options: StreamOptions | None = None


class CompletionsChoice(Open):
    """One answer."""

    index: int
    text: str
    finish_reason: Literal["stop", "length"]


class CompletionsAnswer(Open):
    """The answer of POST /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionsChoice]
    usage: Usage


class Completions:
    """One request, and its answer."""

    def __init__(self, tree: object, notes: Mapping[str, list[Message]]) -> None:
        """Raises ApiError, 400."""
        body = self._body = check(CompletionsBody, tree)
        prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        if len(prompts) != 1 or not prompts[0]:
            raise invalid("prompt is not one text; send one request for each text", "prompt")
        self.streams = bool(body.stream)
        self.overridden: Sequence[str] = overridden_of(body, {"logprobs": (body.logprobs or 0) > 1})
        self.request = ChatRequest(
            n=body.n or 1,
            max_tokens=body.max_tokens,
            stop=stops_of(body.stop, "stop"),
            logprobs=body.logprobs is not None,
            prompt=prompts[0],
        )
        self._head = {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": int(steady_time()),
            "model": body.model or "policy",
        }

    def answer(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The body of the answer."""
        choices = [
            self._choice(index, content_of(answer), answer) for index, answer in enumerate(answers)
        ]
        return {**self._head, "choices": choices, "usage": usage_of(answers)}

    async def events(self, parts: AsyncIterator[Part]) -> AsyncGenerator[Event, None]:
        """The events of a streamed answer."""
        sent: dict[int, str] = {}
        async for part in parts:
            if isinstance(part, HeardText):
                sent[part.choice] = sent.get(part.choice, "") + part.text
                yield self._chunk([self._choice(part.choice, part.text)], None)
                continue
            for index, answer in enumerate(part):
                rest = rest_of(content_of(answer), sent.get(index, ""))
                yield self._chunk([self._choice(index, rest, answer)], None)
            if self._wants_usage:
                yield self._chunk([], usage_of(part))
        yield DONE

    @property
    def _wants_usage(self) -> bool:
        options = self._body.stream_options
        return options is not None and bool(options.include_usage)

    def _chunk(self, choices: list[dict[str, Any]], usage: object) -> Event:
        shown = {"usage": usage} if self._wants_usage else {}
        return Event({**self._head, "choices": choices, **shown})

    def _choice(self, index: int, text: str, answer: Answer | None = None) -> dict[str, Any]:
        """A choice, or an event of one if there is no answer yet."""
        ended = None if answer is None else end_reason(answer.finish_reason)
        logprobs = None if answer is None else self._logprobs(answer)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": ended}

    def _logprobs(self, answer: Answer) -> dict[str, Any] | None:
        if not self.request.logprobs:
            return None
        texts = [text for text, _ in answer.tokens]
        values = [finite(logprob) for _, logprob in answer.tokens]
        tops = [{text: value} for text, value in zip(texts, values, strict=True)]
        return {
            "tokens": texts,
            "token_logprobs": values,
            "top_logprobs": tops if self._body.logprobs else None,
            "text_offset": list(accumulate(map(len, texts), initial=0))[:-1],
        }
