"""What a process of `asyncrl.runtime.processes.pool` uses to talk to its pool. Messages to it are
pickles. Its own messages are JSON, because a process with a user's code is not trusted to send
pickles."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

HEADER = struct.Struct("!Q")
"""Before each message: its length in bytes."""


@dataclass(frozen=True, slots=True)
class Begin:
    """A message to a process: begin a call."""

    number: int
    work: Any


@dataclass(frozen=True, slots=True)
class Cancel:
    """A message to a process: end this call."""

    number: int


class MessageWriter:
    """Sends the messages of such a process, from any of its threads."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def __call__(self, message: object) -> None:
        """Send a message.

        Raises:
            TypeError, ValueError: JSON cannot represent it. Nothing was sent.
        """
        payload = json.dumps(message, allow_nan=False).encode()
        with self._sending:
            self._connection.sendall(HEADER.pack(len(payload)) + payload)


def receive(connection: socket.socket) -> Any:
    """The next message from the pool. Raises EOFError or OSError when the pool has closed."""
    size = HEADER.unpack(_exactly(connection, HEADER.size))[0]
    return ForkingPickler.loads(_exactly(connection, size))


def receive_on(
    loop: asyncio.AbstractEventLoop, connection: socket.socket, handle: Callable[[Any], None]
) -> None:
    """Handle the pool's messages on the loop. A thread reads them until the pool closes the
    connection, and then ends the process."""

    def read() -> None:
        while True:
            try:
                message = receive(connection)
            except (EOFError, OSError):
                os._exit(0)
            loop.call_soon_threadsafe(handle, message)

    threading.Thread(target=read, daemon=True).start()


def limit_memory(most: int) -> None:
    """Let this process have so many bytes of memory."""
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _exactly(connection: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        if not (some := connection.recv(min(size - len(received), 1 << 20))):
            raise EOFError
        received += some
    return bytes(received)
