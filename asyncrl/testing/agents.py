"""A fake for the protocol that the agent server uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from asyncrl.contracts.heard import Heard
from asyncrl.sessions.answers import Answer, ChatRequest
from asyncrl.sessions.session import Session
from asyncrl.text.template import Message
from asyncrl.web.errors import ApiError

__all__ = ["FakeAgentSession", "FakeAgentSessions"]


class FakeAgentSession:
    """A session in this process, and what its agent asked for in vain."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.notes: dict[str, list[Message]] = {}
        self.overridden: Counter[str] = Counter()
        self.requests: list[ChatRequest] = []

    async def chat(self, request: ChatRequest, heard: Heard | None = None) -> list[Answer]:
        self.requests.append(request)
        return await self.session.chat(request, heard)

    def override(self, names: Iterable[str]) -> None:
        self.overridden.update(names)


class FakeAgentSessions:
    """Sessions by their keys."""

    def __init__(self, sessions: Mapping[str, Session]) -> None:
        self.by_key = {key: FakeAgentSession(session) for key, session in sessions.items()}
        self._ended: dict[str, str] = {}

    def of(self, key: str) -> FakeAgentSession:
        if key in self._ended:
            raise ApiError(409, f"the session has ended: {self._ended[key]}", self._ended[key])
        if key not in self.by_key:
            raise ApiError(401, "the key is missing or unknown", "invalid_api_key")
        return self.by_key[key]

    def end(self, key: str, reason: str) -> None:
        """End a session. Its later requests get 409 with this reason as code."""
        self._ended[key] = reason
        self.by_key[key].session.close(reason)
