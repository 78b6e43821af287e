"""Tells the retries of a request from equal requests that are new.

The official clients number the retries of a request in a header. A request without that header and
without an idempotency key is a new one, even if an earlier one had the same body.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

RETRY_COUNT, IDEMPOTENCY = "x-stainless-retry-count", "idempotency-key"
MOST = 16_384
"""Most bodies whose requests are kept. The retry of a forgotten one is a new request."""
DIGEST_BYTES = 16


@dataclass(slots=True)
class _Asked:
    """Requests with one body."""

    latest: str
    left: deque[str] = field(default_factory=deque)
    """Requests whose clients closed the connection before they had an answer."""


def _digest(*parts: bytes) -> str:
    hashed = blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        hashed.update(len(part).to_bytes(8, "big"))
        hashed.update(part)
    return hashed.hexdigest()


def retry_of(headers: Mapping[str, str]) -> bool | None:
    """Whether a request is a retry. None: its client does not say, so none will come."""
    count = headers.get(RETRY_COUNT, "")
    return int(count) > 0 if count.isascii() and count.isdigit() and len(count) < 10 else None


class RequestNames:
    """Names requests, so that a retry has the name of the request that it repeats."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._asked: OrderedDict[str, _Asked] = OrderedDict()
        self._numbers = itertools.count()

    def key(self, session: str, path: str, headers: Mapping[str, str], body: bytes) -> str | None:
        """The name of a request. None: its client sends no retries.

        Args:
            session: the API key of its session.
            headers: by lower-case names.
        """
        named = headers.get(IDEMPOTENCY)
        if named:
            # With the body, because a key that names two requests would give one's answer to the
            # other.
            return _digest(named.encode(), path.encode(), body)
        retry = retry_of(headers)
        if retry is None:
            return None
        request = _digest(session.encode(), path.encode(), body)
        asked = self._asked.get(request)
        if asked is None or not retry:
            return self._begin(request, asked)
        self._asked.move_to_end(request)
        # Several equal requests may be under way. The one that lost its client asks again.
        return asked.left.popleft() if asked.left else asked.latest

    def _begin(self, request: str, asked: _Asked | None) -> str:
        key = f"{request}-{next(self._numbers)}"
        if asked is None:
            self._asked[request] = _Asked(key)
            if len(self._asked) > self._most:
                self._asked.popitem(last=False)
        else:
            asked.latest = key
            self._asked.move_to_end(request)
        return key

    def left(self, key: str | None) -> None:
        """Note that the client of a request closed the connection before it had the answer."""
        asked = self._asked.get((key or "").partition("-")[0])
        if asked is not None and key is not None and key not in asked.left:
            asked.left.append(key)

    def __len__(self) -> int:
        return len(self._asked)
