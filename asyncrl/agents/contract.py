"""What the agent server and the sessions behind it agree on.

agent ──HTTP──► app ──body──► Dialect.request ──► AgentSession.chat ──► Session (the tree)
                 ▲                                      │
                 └──────── answer | events ◄── Answer, heard texts
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from asyncrl.contracts.text_listener import Heard
from asyncrl.sessions.answers import Answer, ChatRequest
from asyncrl.text.chat_messages import Message


class AgentSession(Protocol):
    """The session of one key."""

    notes: dict[str, list[Message]]
    """What dialects keep of the session: the chat of each answer of the Responses API by its id,
    for `previous_response_id`. It ends with the session."""

    async def chat(self, request: ChatRequest, heard: Heard | None = None) -> list[Answer]:
        """As `Session.chat`. It also raises TurnsExceededError, and TurnDeadlineError."""
        ...

    def override(self, names: Iterable[str]) -> None:
        """Count fields that have no effect."""
        ...


class AgentSessions(Protocol):
    """The sessions that a server serves."""

    def of(self, key: str) -> AgentSession:
        """The session of a key. Raises ApiError: 401 for no key or an unknown one, 409 with
        the end of its session if that has ended."""
        ...
