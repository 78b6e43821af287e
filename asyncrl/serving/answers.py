"""The core of the endpoint, which knows token ids and no dialect: choices are asked of the engine
side by side, and come back in pieces.

body → dialect: prompts → requests, one for each choice → pieces → dialect: one answer, or one event
for each piece
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from asyncrl.contracts.messages import Details, GenerateRequest, Piece, Tokens
from asyncrl.serving.identity import ServedModel

__all__ = ["Dialect", "Head", "Streamed", "Told", "Words", "ask", "siblings"]


class Words(Protocol):
    """The model's tokenizer and chat template (`asyncrl.serving.words.ModelWords`), or a fake
    (`asyncrl.testing.FakeWords`)."""

    async def encode(self, text: str, rendered: bool = False) -> list[int]:
        """Token ids of a prompt; `rendered` if a chat template wrote its special tokens."""
        ...

    async def render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> str:
        """A chat as text. Raises MessagesError."""
        ...

    async def decode(self, ids: Sequence[int]) -> str:
        """A prompt's text, with special tokens."""
        ...

    async def spell(self, ids: Iterable[int]) -> dict[int, str]:
        """Token id → its text. A token that is a part of a character has U+FFFD."""
        ...


class Streamed(Protocol):
    """What makes completions: a replica, or a fake."""

    def stream(self, request: GenerateRequest, details: Details) -> AsyncIterator[Piece]: ...


@dataclass(frozen=True, slots=True)
class Told:
    """A piece of one choice, and the texts of the tokens that it names, if they were asked for."""

    choice: int
    piece: Piece
    texts: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Head:
    """What all parts of one answer have in common."""

    name: str
    """Unique."""
    created: int
    """Unix seconds."""
    model: ServedModel


class Dialect(Protocol):
    """One request in the form of one API: its checked body, and how its answer is written."""

    prefix: str
    """Of the answer's name."""

    @property
    def streams(self) -> bool: ...

    async def requests(self, words: Words, model: ServedModel) -> list[GenerateRequest]:
        """One for each choice. Raises ApiError."""
        ...

    @property
    def details(self) -> Details: ...

    def answer(self, head: Head, choices: Sequence[Told]) -> dict[str, Any]:
        """The whole answer. `choices` are whole."""
        ...

    def event(self, head: Head, told: Told) -> dict[str, Any]:
        """What a piece adds to a stream."""
        ...

    def last_event(self, head: Head) -> dict[str, Any] | None:
        """What a stream says after all pieces."""
        ...


def siblings(request: GenerateRequest, n: int) -> list[GenerateRequest]:
    """n choices for one prompt. With a seed each has the next one, as vLLM counts them."""
    return [
        replace(request, n=1, seed=None if request.seed is None else request.seed + index)
        for index in range(n)
    ]


async def ask(
    streamed: Streamed, words: Words, requests: Sequence[GenerateRequest], details: Details
) -> AsyncGenerator[Told, None]:
    """The pieces of all choices as they come. The first that fails ends all; so does closing
    this."""
    # One place for each choice: an engine puts pieces together while a client reads slowly.
    pieces: asyncio.Queue[Told | Exception] = asyncio.Queue(len(requests))
    choices = [
        asyncio.ensure_future(_follow(streamed, words, choice, request, details, pieces))
        for choice, request in enumerate(requests)
    ]
    unfinished = len(choices)
    try:
        while unfinished:
            told = await pieces.get()
            if isinstance(told, Exception):
                raise told
            unfinished -= told.piece.finish_reason is not None
            yield told
    finally:
        for choice in choices:
            choice.cancel()
        await asyncio.gather(*choices, return_exceptions=True)


async def _follow(
    streamed: Streamed,
    words: Words,
    choice: int,
    request: GenerateRequest,
    details: Details,
    pieces: asyncio.Queue[Told | Exception],
) -> None:
    try:
        async with contextlib.aclosing(streamed.stream(request, details)) as stream:  # type: ignore[type-var]
            async for piece in stream:
                texts = await words.spell(_named(piece)) if details.spelled else {}
                await pieces.put(Told(choice, piece, texts))
    except Exception as error:
        await pieces.put(error)


def _named(piece: Piece) -> set[int]:
    """Ids of all tokens that a piece names."""
    return {
        token
        for tokens in (piece.tokens, piece.prompt or Tokens((), ()))
        for token in (*tokens.ids, *(one for best in tokens.top for one, _ in best))
    }
