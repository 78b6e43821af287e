"""The sessions that have a URL: a key for each, which is kept hashed and is void at its end."""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter, OrderedDict
from collections.abc import Iterable

from asyncrl.sessions.counted_session import Ask, CountedSession
from asyncrl.text.chat_messages import Message
from asyncrl.web.errors import ApiError

MOST_ENDED = 100_000
"""Keys of ended sessions that are known, so that a late request learns why it is refused."""


def session_closed(end: str) -> ApiError:
    """The answer to a request after its session has ended in this way, such as `deadline`."""
    message = f"the session has ended: {end}"
    return ApiError(409, message, "session_closed", more={"session_end": end})


def unknown_key() -> ApiError:
    """The answer to a request without a key, or with one that no session has."""
    return ApiError(
        401,
        "the key belongs to no session; send the one in OPENAI_API_KEY or ANTHROPIC_API_KEY",
        "invalid_api_key",
    )


class ServedSession(CountedSession):
    """One session as its agent sees it at the URL (`AgentSession`)."""

    def __init__(self, ask: Ask, most_turns: int) -> None:
        super().__init__(ask, most_turns)
        self.notes: dict[str, list[Message]] = {}
        self.overridden: Counter[str] = Counter()
        """Fields of requests that had no effect."""
        self.end = "closed"
        """How it has ended, for requests that come later."""

    def override(self, names: Iterable[str]) -> None:
        """Count fields of a request that have no effect."""
        self.overridden.update(names)


class ServedSessions:
    """All sessions of one server (`AgentSessions`)."""

    def __init__(self) -> None:
        self._sessions: dict[bytes, ServedSession] = {}
        self._ended: OrderedDict[bytes, str] = OrderedDict()

    def open(self, session: ServedSession) -> str:
        """Serve a session. Returns its key."""
        key = f"sk-asyncrl-{secrets.token_hex(24)}"
        self._sessions[_hashed(key)] = session
        return key

    def close(self, key: str) -> None:
        """Refuse further requests of a session. They learn its end."""
        hashed = _hashed(key)
        self._ended[hashed] = self._sessions.pop(hashed).end
        if len(self._ended) > MOST_ENDED:
            self._ended.popitem(last=False)

    def of(self, key: str) -> ServedSession:
        """The session of a key. Raises ApiError."""
        hashed = _hashed(key)
        if (session := self._sessions.get(hashed)) is not None:
            return session
        if (end := self._ended.get(hashed)) is not None:
            raise session_closed(end)
        raise unknown_key()


def _hashed(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()
