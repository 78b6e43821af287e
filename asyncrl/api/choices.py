"""The answers of OpenAI's older APIs: chat completions and completions. Both list choices."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any, Literal

from asyncrl.api.contract import Dialect, Part
from asyncrl.api.fields import (
    AtLeastOne,
    Body,
    Choices,
    Items,
    Open,
    StreamOptions,
    new_id,
    rest_of,
)
from asyncrl.runtime.clock import steady_time
from asyncrl.sessions.answers import Answer, ChatRequest
from asyncrl.sessions.chat_answers import usage_of
from asyncrl.web.events import DONE, Event


class ChoicesBody(Body):
    """Fields of both bodies."""

    n: Choices | None = None
    """Number of answers, each a turn."""
    max_tokens: AtLeastOne | None = None
    max_completion_tokens: AtLeastOne | None = None
    """Most tokens of an answer. Default: as many as fit."""
    stop: str | Items[str] | None = None
    stream_options: StreamOptions | None = None


class Usage(Open):
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChoicesAnswer(Open):
    """Fields of both answers."""

    id: str
    object: Literal["chat.completion", "text_completion"]
    created: int
    model: str
    choices: Sequence[Open]
    usage: Usage


class ChoicesDialect(Dialect):
    """One request, and its answer."""

    prefix: str
    """Of the answer's id."""
    kind: str
    event_kind: str
    """What the answer and its events are called."""

    def __init__(
        self,
        body: ChoicesBody,
        request: ChatRequest,
        overridden: Sequence[str],
        top: int,
    ) -> None:
        super().__init__(body, request, overridden, top)
        options = body.stream_options
        self.wants_usage = options is not None and bool(options.include_usage)
        self._head = {
            "id": new_id(self.prefix),
            "created": int(steady_time()),
            "model": body.model or "policy",
        }

    @abstractmethod
    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """A choice of the answer."""

    @abstractmethod
    def deltas(self, part: Part, text: str, is_first: bool) -> list[dict[str, Any]]:
        """What a part adds to its choice, one for each event.

        Args:
            text: the new text. With an answer, the rest of its text.
            is_first: whether nothing of this choice was sent before.
        """

    def answer(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The body of the answer."""
        choices = [self.choice(index, answer) for index, answer in enumerate(answers)]
        shown = {
            "object": self.kind,
            "choices": choices,
            "usage": usage_of(answers, self.request.n),
        }
        return {**self._head, **shown}

    async def events(self, parts: AsyncIterator[Part]) -> AsyncGenerator[Event, None]:
        """The events of a streamed answer."""
        sent: dict[int, str] = {}
        answers: dict[int, Answer] = {}
        async for part in parts:
            before, text = sent.get(part.choice, ""), part.text
            if part.answer is not None:
                answers[part.choice] = part.answer
                text = rest_of(part.answer, before)
            for delta in self.deltas(part, text, part.choice not in sent):
                yield self._event([delta], None, part.of_body)
            sent[part.choice] = before + text
        if self.wants_usage:
            yield self._event(
                [], usage_of([answers[index] for index in sorted(answers)], self.request.n)
            )
        yield DONE

    def _event(
        self, choices: list[dict[str, Any]], usage: object, more: Mapping[str, Any] | None = None
    ) -> Event:
        shown = {"usage": usage} if self.wants_usage else {}
        head = {**self._head, "object": self.event_kind}
        return Event({**head, "choices": choices, **shown, **(more or {})})
