"""The time of a session's tools: from an answer to its next request, or to its end."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Protocol

from asyncrl.contracts.text_listener import Heard
from asyncrl.environments.pool import PooledSession
from asyncrl.sessions.answers import Answer, ChatRequest


class PlayedSession(PooledSession, Protocol):
    """A session that a player plays. It may also be served at a URL."""

    async def chat(self, request: ChatRequest, heard: Heard | None = None) -> list[Answer]:
        """See `Session.chat`."""
        ...


class PacedSession:
    """A session whose tools have a limit of their own. Enter it while the session is played: the
    block is left with TimeoutError if no request comes within `tool_s` after an answer.

    Args:
        tool_s: most seconds between an answer and the next request. None: there is no limit.
    """

    def __init__(self, session: PlayedSession, tool_s: float | None) -> None:
        self.abandon = session.abandon
        self._session, self._tool_s = session, tool_s
        self._limit = asyncio.timeout(None)
        self._playing = False
        self._open, self._since = 0, 0.0
        self.turns, self._model_s = 0, 0.0
        self.overridden = 0
        """Arguments without effect that its requests in process have had."""

    async def __aenter__(self) -> PacedSession:
        await self._limit.__aenter__()
        self._playing = True
        self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._playing = False
        await self._limit.__aexit__(kind, error, trace)

    def start(self) -> None:
        """See `Clock.start`."""
        self._began = self._now()

    def excuse(self, seconds: float) -> None:
        """See `Clock.excuse`."""
        if (ends := self._limit.when()) is not None and not self._limit.expired():
            self._limit.reschedule(ends + seconds)

    @property
    def expired(self) -> bool:
        """Whether its tools took too long."""
        return self._limit.expired()

    @property
    def model_s(self) -> float:
        """Seconds in which at least one request was under way."""
        return self._model_s + (self._now() - self._since if self._open else 0.0)

    @property
    def played_s(self) -> float:
        """Seconds since its start."""
        return self._now() - self._began

    async def chat(self, request: ChatRequest, heard: Heard | None = None) -> list[Answer]:
        """See `Session.chat`."""
        self.overridden = max(self.overridden, request.overridden)
        if not self._open:
            self._since = self._now()
            self._allow(None)
        self._open += 1
        try:
            answers = await self._session.chat(request, heard)
            self.turns += 1
            return answers
        finally:
            self._open -= 1
            if not self._open:
                self._model_s += self._now() - self._since
                self._allow(self._tool_s)

    def _allow(self, seconds: float | None) -> None:
        """Let the session be without a request for so long."""
        # A request at a URL may end after its session.
        if self._playing and not self._limit.expired():
            self._limit.reschedule(None if seconds is None else self._now() + seconds)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
