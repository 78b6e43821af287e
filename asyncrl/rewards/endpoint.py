"""A server that a reward asks over HTTP: its connections, its key, and repeated tries."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
from collections.abc import Awaitable, Callable
from typing import TypeVar

import httpx2

from asyncrl.runtime.urls import sends_in_the_clear

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

RETRIED = (408, 409, 425, 429)
"""Statuses below 500 after which the same request may succeed."""
REFUSED = (400, 413, 414, 422, 451)
"""Statuses of a request that the server refuses for what is in it: it is too long, or filtered."""
ABOUT_CONTENT = re.compile(
    r"moderation|flagged|content.?(?:filter|polic|management)|usage.polic|safety|responsible.?ai"
    r"|prohibited.content|blocklist",
    re.IGNORECASE,
)
"""In a refusal with status 403, and in a reply without choices. Others with that status refuse the
key."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0


class BusyError(Exception):
    """The server cannot answer now; the request may be sent again."""


class RefusedError(Exception):
    """The server refuses this request, and may answer others."""


AGAIN = (
    httpx2.RequestError,
    RecursionError,
    BusyError,
    KeyError,
    IndexError,
    TypeError,
    ValueError,
)
"""Errors of a try after which another one may succeed: of the server, and of an answer that cannot
be read."""


def refuse_key_in_the_clear(url: str, key_env: str | None) -> None:
    """Raise ValueError if requests to the URL would send a key unencrypted."""
    if key_env is not None and sends_in_the_clear(url):
        raise ValueError(
            f"url = {url!r} would send the key of {key_env} in the clear; use https, or leave"
            " key_env out"
        )


class Accepted:
    """Whether a server has accepted a request. One that has not may refuse the settings."""

    def __init__(self, title: str, check: str) -> None:
        """
        Args:
            check: what to look at if the server refuses all requests.
        """
        self.title, self._check = title, check
        self.any = False

    async def check(self, ask: Callable[[], Awaitable[object]]) -> None:
        """Tell settings from contents, after a call whose requests were all refused.

        Args:
            ask: sends an ordinary request. Requests that waited before it get their answers first.

        Raises:
            RuntimeError: the server refuses that as well, and has accepted none.
        """
        if self.any:
            return
        try:
            await ask()
        except RefusedError as why:
            if not self.any:
                raise RuntimeError(
                    f"{self.title} refuses every request, also one with 0 as its texts ({why});"
                    f" see {self._check}"
                ) from None
        except AGAIN:
            return


class Endpoint:
    """The connections to one address. Use it on one event loop."""

    def __init__(self, url: str, key_env: str | None, at_once: int, name: str, check: str) -> None:
        """
        Args:
            at_once: concurrent requests.
            name: setting that the fields belong to, such as `judge`.
            check: what to look at if the server refuses requests.

        Raises:
            ValueError: this process has no key.
        """
        headers = {}
        if key_env is not None:
            if not (key := os.environ.get(key_env)):
                raise ValueError(
                    f"{name}.key_env = {key_env!r}: this process has no such variable; set it on"
                    " every node, or leave key_env out"
                )
            headers["Authorization"] = f"Bearer {key}"
        limits = httpx2.Limits(max_connections=at_once, max_keepalive_connections=at_once)
        self.title = f"the {name.replace('_', ' ')} at {url}"
        self._url, self._check = url, check
        self.accepted = Accepted(self.title, check)
        # A proxy from the environment, or a redirect, could send the key elsewhere.
        self._client = httpx2.AsyncClient(
            headers=headers, limits=limits, timeout=None, trust_env=False, follow_redirects=False
        )
        self._room = asyncio.Semaphore(at_once)

    async def post(self, body: object) -> httpx2.Response:
        """The server's answer to a request that it accepts.

        Raises:
            BusyError: another try may succeed.
            RefusedError: the server refuses what is in the request.
            RuntimeError: it refuses the settings, such as the key or the model.
        """
        async with self._room:
            response = await self._client.post(self._url, json=body)
        code = response.status_code
        if response.is_success:
            self.accepted.any = True
            return response
        if code >= 500 or code in RETRIED:
            raise BusyError(f"status {code}")
        why = f"status {code}: {response.text[:200]!r}"
        if code in REFUSED or (code == 403 and ABOUT_CONTENT.search(response.text)):
            raise RefusedError(why)
        raise RuntimeError(f"{self.title} refuses requests with {why}; see {self._check}")


async def first_answer(
    ask: Callable[[], Awaitable[Answer]],
    title: str,
    retries: int,
    timeout_s: float,
    setting: str,
) -> Answer | None:
    """What `ask` returns; None if no try returns in time.

    Args:
        title: of the server, for the log.
        timeout_s: seconds for all tries, the value of `setting`.
        retries: how often `ask` is called again after errors in AGAIN. Others are raised.

    Raises:
        RefusedError: the server refuses the request. The log says so.
    """
    reason = "no answer"
    try:
        async with asyncio.timeout(timeout_s):
            for retry in range(retries + 1):
                if retry:
                    pause = min(FIRST_PAUSE_S * 2 ** (retry - 1), LONGEST_PAUSE_S)
                    await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                try:
                    return await ask()
                except AGAIN as error:
                    reason = f"{type(error).__name__}: {error}".splitlines()[0]
                except RefusedError as error:
                    logger.warning("%s refuses a request: %s", title, error)
                    raise
    except TimeoutError:
        reason = f"more than {setting} = {timeout_s:g} s (last: {reason})"
    logger.warning("%s gave no score: %s", title, reason)
    return None
