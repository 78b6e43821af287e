"""The core of the endpoint. It generates all choices of an HTTP request concurrently, and yields
them in pieces. It works on token ids, and does not depend on a dialect.

    body → dialect → one request for each choice → pieces → dialect → one answer, or one event for
    each piece
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from asyncrl.contracts.messages import Details, GenerateRequest, StreamPiece, Tokens
from asyncrl.serving.identity import ServedModel


class Words(Protocol):
    """A model's tokenizer and chat template (`asyncrl.serving.words.ModelWords`), or a fake
    (`asyncrl.testing.FakeWords`)."""

    async def encode(self, text: str, rendered: bool = False) -> list[int]:
        """Encode a prompt. `rendered`: a chat template wrote its special tokens."""
        ...

    async def render(
        self, messages: Sequence[Mapping[str, object]], variables: Mapping[str, object]
    ) -> str:
        """Render a chat. Raises MessagesError."""
        ...

    async def decode(self, ids: Sequence[int]) -> str:
        """Decode a prompt, with special tokens."""
        ...

    async def spell(self, ids: Iterable[int]) -> dict[int, str]:
        """Token id → its text, which contains U+FFFD if the token is a part of a character."""
        ...


class CompletionSource(Protocol):
    """A source of completions: a replica, or a fake."""

    def stream(self, request: GenerateRequest, details: Details) -> AsyncIterator[StreamPiece]: ...


@dataclass(frozen=True, slots=True)
class ChoicePiece:
    """A piece of one choice. `texts` spells its tokens, if the request asked for that."""

    choice: int
    piece: StreamPiece
    texts: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Head:
    """The fields that all parts of one answer share."""

    name: str
    """Unique id of the answer."""
    created: int
    """Unix time, in seconds."""
    model: ServedModel


class Dialect(Protocol):
    """One HTTP request in the format of one API. It validates the body and formats the answer."""

    prefix: str
    """Start of the answer's id."""

    @property
    def streams(self) -> bool: ...

    async def requests(self, words: Words, model: ServedModel) -> list[GenerateRequest]:
        """One request for each choice. Raises ApiError."""
        ...

    @property
    def details(self) -> Details: ...

    def answer(self, head: Head, choices: Sequence[ChoicePiece]) -> dict[str, object]:
        """The whole answer. Each item of `choices` is a whole completion."""
        ...

    def event(self, head: Head, part: ChoicePiece) -> dict[str, object]:
        """The event that sends this piece in a stream."""
        ...

    def last_event(self, head: Head) -> dict[str, object] | None:
        """The event after all pieces; None if the stream needs none."""
        ...


def siblings(request: GenerateRequest, n: int) -> list[GenerateRequest]:
    """Split a request into n choices. Each gets the next seed, as in vLLM."""
    return [
        replace(request, n=1, seed=None if request.seed is None else request.seed + index)
        for index in range(n)
    ]


async def ask(
    source: CompletionSource, words: Words, requests: Sequence[GenerateRequest], details: Details
) -> AsyncGenerator[ChoicePiece, None]:
    """Yield the pieces of all choices as they arrive. The first failure ends all choices, and so
    does closing the generator."""
    # The queue is bounded so that a slow client does not fill the memory: the engine merges the
    # pieces that wait.
    pieces: asyncio.Queue[ChoicePiece | Exception] = asyncio.Queue(len(requests))
    choices = [
        asyncio.ensure_future(_follow(source, words, choice, request, details, pieces))
        for choice, request in enumerate(requests)
    ]
    unfinished = len(choices)
    try:
        while unfinished:
            item = await pieces.get()
            if isinstance(item, Exception):
                raise item
            unfinished -= item.piece.finish_reason is not None
            yield item
    finally:
        for choice in choices:
            choice.cancel()
        await asyncio.gather(*choices, return_exceptions=True)


async def _follow(
    source: CompletionSource,
    words: Words,
    choice: int,
    request: GenerateRequest,
    details: Details,
    pieces: asyncio.Queue[ChoicePiece | Exception],
) -> None:
    try:
        async with contextlib.aclosing(source.stream(request, details)) as stream:  # type: ignore[type-var]
            async for piece in stream:
                texts = await words.spell(_tokens_in(piece)) if details.spelled else {}
                await pieces.put(ChoicePiece(choice, piece, texts))
    except Exception as error:
        await pieces.put(error)


def _tokens_in(piece: StreamPiece) -> set[int]:
    """Ids of all tokens in a piece, including the most probable ones."""
    return {
        token
        for tokens in (piece.tokens, piece.prompt or Tokens((), ()))
        for token in (*tokens.ids, *(alternative for best in tokens.top for alternative, _ in best))
    }
