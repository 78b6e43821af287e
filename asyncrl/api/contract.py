"""What the dialects of the APIs and the servers behind them agree on.

body ──► Dialect.request ──► a server's model ──► Part … ──► answer | events
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.api.fields import Body, extras_in
from asyncrl.sessions.answers import Answer, ChatRequest, Token
from asyncrl.web.events import Event


@dataclass(frozen=True, slots=True)
class Part:
    """A part of one choice of a streamed answer."""

    choice: int
    text: str = ""
    """New text. It certainly belongs to the content of the message: tool calls and reasoning come
    with the answer."""
    answer: Answer | None = None
    """The whole choice, in its last part."""
    tokens: Sequence[Token] = ()
    """New tokens, if log-probs are wanted or the server always gives them."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the choice, from the server."""
    of_body: Mapping[str, Any] = field(default_factory=dict)
    """Further fields beside the choices, from the server."""


class Dialect(ABC):
    """One request in the form of one API. It is made of the parsed JSON body, and of notes of
    earlier answers. It raises ApiError (400) or UnsupportedError for a body that it cannot follow.

    Args:
        body: what all APIs have.
        request: without `key`, which a server reads from the headers.
        overridden: fields of the body that the dialect does not follow, such as `temperature`.
        top: how many of the most probable tokens the client wants at each position.
    """

    def __init__(
        self,
        body: Body,
        request: ChatRequest,
        overridden: Sequence[str],
        top: int = 0,
    ) -> None:
        self.model, self.streams, self.request = body.model, bool(body.stream), request
        self.overridden, self.unread, self.top = overridden, tuple(extras_in(body)), top
        """`unread`: unknown fields inside other fields."""

    @abstractmethod
    def answer(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The body of the answer."""

    @abstractmethod
    def events(self, parts: AsyncIterator[Part]) -> AsyncGenerator[Event, None]:
        """The events of a streamed answer."""
