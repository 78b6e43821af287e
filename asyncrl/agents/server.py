"""The HTTP server of sessions, on this process's event loop and its loopback address."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Generator, Iterator

import uvicorn

from asyncrl.agents.app import agent_app
from asyncrl.agents.served import ServedSession, ServedSessions

HOST = "127.0.0.1"
IDLE_S = 75
"""Seconds after which an idle connection is closed. A tool may run between two turns."""
CLOSE_S = 2
"""Seconds that requests get to end when the server closes."""


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals to the process."""
        yield


class AgentServer:
    """Serves sessions to agents that speak HTTP. Use it on one event loop."""

    def __init__(self) -> None:
        self._sessions = ServedSessions()
        self._socket: socket.socket | None = None
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """Such as `http://127.0.0.1:4000`, once it has started."""
        assert self._socket is not None
        return f"http://{HOST}:{self._socket.getsockname()[1]}"

    async def start(self) -> None:
        """Listen on a free port."""
        if self._socket is not None:
            return
        self._socket = socket.create_server((HOST, 0), backlog=1024)
        # Connections inherit it. Without it, an answer of two packets waits 40 ms for the client's
        # acknowledgment.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        settings = uvicorn.Config(
            agent_app(self._sessions),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=CLOSE_S,
        )
        self._server = _Server(settings)
        self._serving = asyncio.create_task(self._server.serve([self._socket]))

    @contextlib.contextmanager
    def serving(self, session: ServedSession) -> Iterator[str]:
        """Serve a session while the context is open. Gives its key. Later requests with it are
        refused, and learn `session.end`."""
        key = self._sessions.open(session)
        try:
            yield key
        finally:
            self._sessions.close(key)

    async def close(self) -> None:
        """End the server."""
        if self._server is None or self._serving is None or self._socket is None:
            return
        self._server.should_exit = True
        await self._serving
        self._socket.close()
        self._server = None
