"""Sessions of agents: from their requests to the learner's rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.runtime.exports import lazy_exports

if TYPE_CHECKING:
    from asyncrl.sessions.answers import ChatRequest as ChatRequest
    from asyncrl.sessions.session import (
        Sampled as Sampled,
        Session as Session,
        SessionTemplate as SessionTemplate,
        TurnRequest as TurnRequest,
    )

__getattr__ = lazy_exports(
    __name__,
    ChatRequest="answers",
    Sampled="session",
    Session="session",
    SessionTemplate="session",
    TurnRequest="session",
)
