"""The parts of a streamed answer: text while it is sampled, then the answers."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from asyncrl.agents.contract import HeardText, Part, Silent
from asyncrl.contracts.heard import Heard
from asyncrl.sessions.answers import Answer

MARKER = re.compile(r"<(?:[^\s\d=<]|\Z)|\[(?:[A-Z]|\Z)")
"""Where tool calls and reasoning may begin: <tool_call>, <think>, <|channel|>, [TOOL_CALLS]. A `<`
or `[` at the end may become one."""
BEGIN_S = 0.5
"""Seconds after the beginning of sampling until an answer that cannot be heard yet begins. What an
engine refuses is known by then."""
BARE_CALLS = ("{", "[", "`")
"""How tool calls without a marker begin."""


class CertainText:
    """Releases the text of a turn, as far as it certainly begins the content of its message.

    Tool calls and reasoning are no content, and the text around them loses its outer spaces. So
    nothing is released from the first possible marker on, nor spaces that may be outer ones.

    Args:
        tools: whether tools were offered.
    """

    def __init__(self, tools: bool) -> None:
        self._tools = tools
        self._held = ""
        self._started = self._over = False

    def add(self, text: str) -> str:
        """What has become certain with this new text."""
        if self._over or not text:
            return ""
        self._held += text
        if not self._started:
            self._started = True
            bare = self._tools and self._held.startswith(BARE_CALLS)
            if bare or self._held[0].isspace():
                self._over = True
                return ""
        found = MARKER.search(self._held)
        self._over = found is not None and len(found.group()) > 1
        certain = self._held[: found.start() if found else len(self._held)].rstrip()
        self._held = self._held[len(certain) :]
        return certain


async def parts_of(
    chat: Callable[[Heard], Awaitable[list[Answer]]], filters: Sequence[CertainText] | None
) -> AsyncGenerator[Part | Silent, None]:
    """The parts of an answer as they come, after a `Silent` if none comes soon. The work is
    canceled if the generator is closed before its end.

    Args:
        chat: answers a request.
        filters: one for each choice. None: all text is content.

    Raises:
        Those of `chat`.
    """
    queue: asyncio.Queue[HeardText | None] = asyncio.Queue()
    started = asyncio.Event()

    def heard(choice: int, text: str) -> None:
        started.set()
        certain = text if filters is None else filters[choice].add(text)
        if certain:
            queue.put_nowait(HeardText(choice, certain))

    task = asyncio.ensure_future(chat(heard))

    def ended(_: object) -> None:
        started.set()
        queue.put_nowait(None)

    task.add_done_callback(ended)
    try:
        await started.wait()
        part: HeardText | Silent | None = Silent()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BEGIN_S):
                part = await queue.get()
        while part is not None:
            yield part
            part = await queue.get()
        yield await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
