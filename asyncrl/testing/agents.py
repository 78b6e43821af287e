"""A fake for the protocol that the agent server uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from asyncrl.agents.served import session_closed, unknown_key
from asyncrl.contracts.text_listener import Heard
from asyncrl.sessions.answers import Answer, ChatRequest
from asyncrl.sessions.session import Session
from asyncrl.text.chat_messages import Message


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
            raise session_closed(self._ended[key])
        if key not in self.by_key:
            raise unknown_key()
        return self.by_key[key]

    def end(self, key: str, end: str) -> None:
        """End a session in this way. Its later requests get 409."""
        self._ended[key] = end
        self.by_key[key].session.close("the session has ended")
