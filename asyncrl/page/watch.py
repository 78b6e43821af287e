"""Serves the page of a run that grows, to this machine's browsers.

The server reads the run directory alone, so it works beside a run on another machine that shares
its storage, and neither side notices when the other ends. Everyone who knows the address may read
prompts and completions. So the address contains a secret, and a server that other machines reach
needs one of the user's.
"""

from __future__ import annotations

import asyncio
import gzip
import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from asyncrl.config import ConfigError
from asyncrl.page.contents import contents
from asyncrl.page.growing import GrowingRun
from asyncrl.page.report import html
from asyncrl.runtime.loopback import LOOPBACK

TOKEN_VARIABLE = "ASYNCRL_WATCH_TOKEN"
SHORTEST_TOKEN = 16
EVERYWHERE = ("0.0.0.0", "::")
"""Addresses to listen on that are no addresses to open."""
LOOK_S = 1.0
"""Seconds between two looks at the files."""
SHARE, LONGEST_REST_S = 10, 60.0
"""The server rests for this many times the CPU seconds that the values took, but not longer."""
WAIT_S = 20.0
"""Seconds for which an answer waits for something new."""
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class UnreadableRunError(Exception):
    """The run cannot be read, and could not be before."""


class Watched:
    """The values of a run's page, made again when its files change."""

    def __init__(self, run: GrowingRun, ends: Callable[[], bool]) -> None:
        """
        Args:
            ends: whether the server is about to end, so that nobody may wait.
        """
        self._run, self._ends = run, ends
        self._making = asyncio.Lock()
        self._stamp: tuple[object, ...] = ()
        self._rests_until = 0.0
        self.number = 0
        """How often the values were made."""
        self.values: dict[str, Any] = {}

    async def newer(self, have: int, wait_s: float = WAIT_S) -> bool:
        """Wait until there are other values than those of number `have`, at most `wait_s` seconds.
        Returns whether there are."""
        until = time.monotonic() + wait_s
        while True:
            await self._look()
            if self.number != have:
                return True
            if time.monotonic() >= until or self._ends():
                return False
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> None:
        async with self._making:
            if self.number and time.monotonic() < self._rests_until:
                return
            stamp = self._run.stamp()
            if stamp == self._stamp:
                return
            used = 0.0
            try:
                values, used = await asyncio.to_thread(_made, self._run)
            except Exception as error:
                # A file that is half written is whole at one of the next looks. The files are not
                # ours alone, so anything may be in them.
                said = " ".join(f"{type(error).__name__}: {error}".split())
                if not self.values:
                    raise UnreadableRunError(said) from error
                values = self.values | {"damaged": [said]}
            else:
                self._stamp = stamp
                self._run.forget_removed()
            self._rests_until = time.monotonic() + min(SHARE * used, LONGEST_REST_S)
            if values | {"live": self.number} != self.values:
                self.number += 1
                self.values = values | {"live": self.number}


def _made(run: GrowingRun) -> tuple[dict[str, Any], float]:
    """The values, and the CPU seconds that they took."""
    began = time.thread_time()
    return contents(run), time.thread_time() - began


def watch_app(
    run: GrowingRun, token: str, host: str, ends: Callable[[], bool] = lambda: False
) -> Starlette:
    """The server's answers. Each needs the token in its path. On loopback it also needs a name of
    loopback as its host: a page of another site may send requests here, under a name of its own.

    Args:
        ends: see `Watched`.
    """
    watched = Watched(run, ends)

    def refused(request: Request) -> Response | None:
        given, named = request.path_params["token"], request.headers.get("host", "")
        if not hmac.compare_digest(given.encode(), token.encode()):
            return PlainTextResponse("There is no such page.", 404, HEADERS)
        if host in LOOPBACK and _host(f"//{named}") not in LOOPBACK:
            return PlainTextResponse("Open this as localhost.", 403, HEADERS)
        origin = request.headers.get("origin")
        if origin is not None and origin.lower() != f"{request.url.scheme}://{named}".lower():
            return PlainTextResponse("Another site may not read this.", 403, HEADERS)
        return None

    async def page(request: Request) -> Response:
        if (answer := refused(request)) is not None:
            return answer
        try:
            await watched.newer(-1, 0.0)
        except UnreadableRunError as error:
            return PlainTextResponse(f"The run cannot be read: {error}", 503, HEADERS)
        return HTMLResponse(await asyncio.to_thread(html, watched.values), headers=HEADERS)

    async def values(request: Request) -> Response:
        if (answer := refused(request)) is not None:
            return answer
        have = request.query_params.get("have", "")
        known = int(have) if have.isdecimal() and len(have) < 10 else -1
        try:
            if not await watched.newer(known):
                return Response(status_code=204, headers=HEADERS)
        except UnreadableRunError as error:
            return PlainTextResponse(f"The run cannot be read: {error}", 503, HEADERS)
        text = json.dumps(watched.values, ensure_ascii=False, allow_nan=False)
        body = await asyncio.to_thread(gzip.compress, text.encode("utf-8", "replace"), 1)
        coded = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        return Response(body, headers=HEADERS | coded)

    routes = [Route("/{token}/", page), Route("/{token}/values", values)]
    app = Starlette(routes=routes)
    app.router.redirect_slashes = False  # it would answer before the token is compared
    return app


def _host(address: str) -> str | None:
    """The name of a host in lower case, without its port; None if there is none."""
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None


def chosen_token(host: str) -> str:
    """The user's token, or a new one.

    Raises:
        ConfigError: the server would be open to other machines without a token of the user's, or
            the token is too short.
    """
    given = os.environ.get(TOKEN_VARIABLE, "")
    if not given and host not in LOOPBACK:
        raise ConfigError(
            f"--host {host}: other machines could read the run's texts; set {TOKEN_VARIABLE} to a"
            f" secret of at least {SHORTEST_TOKEN} letters and digits, or leave --host out"
        )
    if given and (len(given) < SHORTEST_TOKEN or not given.isascii() or not given.isalnum()):
        raise ConfigError(
            f"{TOKEN_VARIABLE} is too short or has other characters; give at least"
            f" {SHORTEST_TOKEN} letters and digits"
        )
    return given or secrets.token_hex(16)


def listening(host: str, port: int) -> socket.socket:
    """A socket at this address; port 0 is a free one.

    Raises:
        ConfigError: the address cannot be used.
    """
    try:
        kind = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=kind, backlog=64)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--host {host} --port {port} cannot be used: {error}; name another, or leave it out"
        ) from None


def serve(run: GrowingRun, host: str, port: int, say: Callable[[str, str], None]) -> None:
    """Serve the page until the process is interrupted.

    Args:
        say: called once the page can be opened, with its address as people may see it, and with
            the whole address.
    """
    token = chosen_token(host)
    with listening(host, port) as server:
        port = server.getsockname()[1]
        name = socket.gethostname() if host in EVERYWHERE else host
        name = f"[{name}]" if ":" in name else name
        # Whoever reads the output need not learn a secret of the user's.
        path = f"${TOKEN_VARIABLE}" if os.environ.get(TOKEN_VARIABLE) else token
        at = f"http://{name}:{port}"
        _Server(run, token, host, lambda: say(f"{at}/{path}/", f"{at}/{token}/")).run([server])


class _Server(uvicorn.Server):
    def __init__(self, run: GrowingRun, token: str, host: str, started: Callable[[], None]) -> None:
        app = watch_app(run, token, host, lambda: self.should_exit)
        patience = 3 * round(LOOK_S)  # for those who wait for something new
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=patience,
            )
        )
        self._told = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._told()
