"""The core of the endpoint. It generates all choices of an HTTP request concurrently, and makes
parts of answers of their pieces. It works on token ids, and does not depend on an API.

    body → `Asked` → one request for each choice → pieces → parts → dialect → answer or events
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from asyncrl.api.contract import Part
from asyncrl.contracts.messages import Details, GenerateRequest, StreamPiece, Tokens
from asyncrl.sessions.answers import Answer, ChatRequest, Token
from asyncrl.text.chat_messages import Message, Schema
from asyncrl.text.stops import first_stop

NO_TOKENS = Tokens((), ())


class ChatTokenizer(Protocol):
    """A model's tokenizer and chat template
    (`asyncrl.serving.chat_tokenizer.ModelTokenizer`), or a fake
    (`asyncrl.testing.FakeTokenizer`)."""

    async def encode(self, text: str, rendered: bool = False) -> list[int]:
        """Encode a prompt. `rendered`: a chat template wrote its special tokens."""
        ...

    async def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, object],
        tools: Sequence[Schema] | None,
    ) -> str:
        """Render a chat. Raises MessagesError."""
        ...

    async def content_filter(self, prompt_ids: Sequence[int], tools: bool) -> Callable[[str], str]:
        """What gets the new texts of a turn after this prompt, and returns what has become certain
        of the message's content."""
        ...

    async def read(
        self,
        prompt_ids: Sequence[int],
        ids: Sequence[int],
        text: str,
        tools: Sequence[Schema] | None,
    ) -> Message:
        """The assistant's message of a turn: text, reasoning and tool calls."""
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
    """A piece of one choice."""

    choice: int
    piece: StreamPiece


def siblings(request: GenerateRequest, n: int) -> list[GenerateRequest]:
    """Split a request into n choices. Each gets the next seed, as in vLLM."""
    return [
        replace(request, n=1, seed=None if request.seed is None else request.seed + index)
        for index in range(n)
    ]


async def ask(
    source: CompletionSource, requests: Sequence[GenerateRequest], details: Details
) -> AsyncGenerator[ChoicePiece, None]:
    """Yield the pieces of all choices as they arrive. The first failure ends all choices, and so
    does closing the generator."""
    # The queue is bounded so that a slow client does not fill the memory: the engine merges the
    # pieces that wait.
    pieces: asyncio.Queue[ChoicePiece | Exception] = asyncio.Queue(len(requests))
    choices = [
        asyncio.ensure_future(_read_choice(source, choice, request, details, pieces))
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


async def _read_choice(
    source: CompletionSource,
    choice: int,
    request: GenerateRequest,
    details: Details,
    pieces: asyncio.Queue[ChoicePiece | Exception],
) -> None:
    try:
        async with contextlib.aclosing(source.stream(request, details)) as stream:  # type: ignore[type-var]
            async for piece in stream:
                await pieces.put(ChoicePiece(choice, piece))
    except Exception as error:
        await pieces.put(error)


def _ids_in(both: Iterable[Tokens]) -> set[int]:
    """The ids of all tokens, including the most probable ones."""
    tops = [top for tokens in both for best in tokens.top for top, _ in best]
    return {*tops, *(token for tokens in both for token in tokens.ids)}


class Choice:
    """One choice of an answer, whose pieces come one after the other.

    Args:
        echoed: text of the prompt that begins the answer.
        of_first: fields beside the choices, of its first part.
        of_last: the same, of its last part.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        asked: ChatRequest,
        request: GenerateRequest,
        content_filter: Callable[[str], str],
        echoed: str = "",
        of_first: Mapping[str, Any] | None = None,
        of_last: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer, self._asked, self._prompt_ids = tokenizer, asked, request.prompt_ids
        self._filter, self._echoed, self._begin = content_filter, echoed, echoed
        self._of_body, self._of_last = of_first or {}, of_last or {}
        self._text = ""
        self._ids: list[int] = []
        self._tokens: list[Token] = []

    async def part(self, told: ChoicePiece) -> Part:
        """The part of a piece."""
        piece, ids = told.piece, list(told.piece.tokens.ids)
        both = (piece.prompt or NO_TOKENS, piece.tokens)
        texts = await self._tokenizer.spell(_ids_in(both)) if self._asked.logprobs else {}
        tokens = [token for some in both for token in _spelled(some, texts)]
        self._text += piece.text
        self._ids += ids
        self._tokens += tokens
        more: dict[str, Any] = {"token_ids": ids}
        begin, self._begin = self._begin, ""
        of_body, self._of_body = self._of_body, {}
        if piece.finish_reason is None:
            text = begin + self._filter(piece.text)
            return Part(told.choice, text, None, tokens, more, of_body)
        versions = {
            "versions": [
                {"version": span.version, "start": span.start, "end": span.end}
                for span in piece.versions
            ]
        }
        answer = await self._answer(piece.finish_reason, {"token_ids": self._ids, **versions})
        return Part(
            told.choice, "", answer, tokens, {**more, **versions}, {**of_body, **self._of_last}
        )

    async def _answer(self, finish_reason: str, more: Mapping[str, Any]) -> Answer:
        asked = self._asked
        message: Message = (
            await self._tokenizer.read(
                self._prompt_ids, self._ids, self._text, asked.tools if asked.calls else None
            )
            if asked.prompt is None
            else {"role": "assistant", "content": self._echoed + self._text}
        )
        return Answer(
            message,
            finish_reason,
            len(self._ids),
            len(self._prompt_ids),
            tokens=tuple(self._tokens),
            stop=await self._stop(finish_reason),
            more=more,
        )

    async def _stop(self, finish_reason: str) -> str | None:
        """The string of the request's `stop` that ended the choice."""
        if not self._asked.stop or finish_reason != "stop":
            return None
        return first_stop(await self._tokenizer.decode(self._ids), self._asked.stop)


def _spelled(tokens: Tokens, texts: Mapping[int, str]) -> list[Token]:
    """Tokens with their texts, or with empty ones if no request asked for them."""
    return [
        Token(
            token,
            texts.get(token, ""),
            logprob,
            tuple(Token(other, texts.get(other, ""), value) for other, value in best),
        )
        for token, logprob, best in zip(
            tokens.ids, tokens.logprobs, tokens.top or ((),) * len(tokens.ids), strict=True
        )
    ]
