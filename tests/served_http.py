"""Serves routes with a real HTTP server on a free port, for real clients."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn


@contextlib.contextmanager
def listening(app: Any) -> Iterator[str]:
    """Start a server of the application, and yield its base address."""
    started = threading.Event()

    class Server(uvicorn.Server):
        """Ends at once when it is asked to, and not at its next tick."""

        async def main_loop(self) -> None:
            self.loop, self.asked_to_end = asyncio.get_running_loop(), asyncio.Event()
            await self.on_tick(0)
            started.set()
            await self.asked_to_end.wait()

    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        server = Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [own]}, daemon=True)
        thread.start()
        assert started.wait(30)
        try:
            yield f"http://127.0.0.1:{own.getsockname()[1]}"
        finally:
            server.loop.call_soon_threadsafe(server.asked_to_end.set)
            thread.join(30)
            assert not thread.is_alive()
