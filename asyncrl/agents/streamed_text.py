"""The parts of an answer: text while it is sampled, then the answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

from asyncrl.api.contract import Part
from asyncrl.api.streamed_content import StreamedContent
from asyncrl.contracts.text_listener import Heard
from asyncrl.sessions.answers import Answer, ChatRequest

BEGIN_S = 0.5
"""Seconds after the beginning of sampling until an answer that cannot be heard yet begins. What an
engine refuses is known by then."""


class HeardParts:
    """The parts of one answer.

    Args:
        chat: answers the request. A stream gives it what hears the texts.
    """

    def __init__(
        self,
        chat: Callable[[Heard | None], Awaitable[list[Answer]]],
        request: ChatRequest,
        streams: bool,
    ) -> None:
        self._chat, self._streams = chat, streams
        self._began = asyncio.Event()
        self._parts: asyncio.Queue[Part | None] = asyncio.Queue()
        # A continued text is content only.
        filters = [StreamedContent(bool(request.tools)).add for _ in range(request.n)]
        self._filters = filters if request.prompt is None else [str] * request.n

    async def head(self) -> None:
        """Wait until a stream sends its head, also if nothing can be heard yet."""
        await self._began.wait()
        await asyncio.sleep(BEGIN_S)

    async def parts(self) -> AsyncGenerator[Part, None]:
        """The parts as they come. The work is canceled if the generator is closed before its end.

        Raises:
            Those of `chat`.
        """
        task = asyncio.ensure_future(self._chat(self._hear if self._streams else None))
        task.add_done_callback(lambda _: self._parts.put_nowait(None))
        try:
            while (part := await self._parts.get()) is not None:
                yield part
            for choice, answer in enumerate(await task):
                yield Part(choice, answer=answer, tokens=answer.tokens)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _hear(self, choice: int, text: str) -> None:
        self._began.set()
        if content := self._filters[choice](text):
            self._parts.put_nowait(Part(choice, content))
