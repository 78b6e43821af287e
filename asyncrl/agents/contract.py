"""What the agent server, its dialects and the sessions behind it agree on.

agent ──HTTP──► app ──body──► Dialect.request ──► AgentSession.chat ──► Session (the tree)
                 ▲                                      │
                 └──────── answer | events ◄── Answer, heard texts
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from asyncrl.contracts.heard import Heard
from asyncrl.sessions.answers import Answer, ChatRequest
from asyncrl.text.template import Message
from asyncrl.web.events import Event


@dataclass(frozen=True, slots=True)
class HeardText:
    """New text of a choice, while its turn is sampled. It certainly belongs to the content of the
    message: tool calls and reasoning come with the answers."""

    choice: int
    text: str


@dataclass(frozen=True, slots=True)
class Silent:
    """Sampling has started, and nothing can be heard yet. Its client gets the stream's head."""


Part: TypeAlias = HeardText | Sequence[Answer]
"""Of a streamed answer. The answers, one for each choice, are the last part."""


class Dialect(Protocol):
    """One request in the form of one API. It is made of the parsed JSON body and the session's
    notes, and raises ApiError (400) or UnsupportedError for a body that it cannot follow."""

    request: ChatRequest
    """Without `key`, which the app reads from the headers."""
    streams: bool
    overridden: Sequence[str]
    """Fields that have no effect in a session, such as `temperature`. They are counted."""

    def answer(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The body of the answer."""
        ...

    def events(self, parts: AsyncIterator[Part]) -> AsyncGenerator[Event, None]:
        """The events of a streamed answer. The heard texts of a choice are the beginning of its
        message's content. Tool calls, reasoning and the rest come with the answers."""
        ...


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
