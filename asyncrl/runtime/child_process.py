"""A process of its own for a user's code, as its pool sees it. Messages to it are pickles. Its own
messages are JSON, because it is not trusted to send pickles."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import psutil

from asyncrl.runtime.loopback import without_proxy_on_loopback
from asyncrl.runtime.serve_calls import cluster_environment
from asyncrl.runtime.supervisor import command

HEADER = struct.Struct("!Q")
"""Before each message: its length in bytes."""
END_S = 5.0
"""Seconds that a supervisor has to end everything."""


class ChildProcess:
    """One process and its supervisor. It can be started again after its end. Use it on one event
    loop only."""

    def __init__(self) -> None:
        self.killed = False
        """Whether the pool has killed it."""
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._lifeline: int | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def start(
        self,
        serve: str,
        setup: object,
        inherited: Sequence[int] = (),
        folder: str = "",
        output: int | None = None,
    ) -> None:
        """Start the process and send it its first message.

        Args:
            serve: `module:function`, which the process calls with its socket.
            inherited: further file descriptors that it has, under the same numbers.
            folder: kind of a temporary folder that ends with the process; "" = none.
            output: file descriptor to which it prints. None: to where this process prints.
        """
        ours, theirs = socket.socketpair()
        end, self._lifeline = os.pipe()
        try:
            # A new session: Ctrl-C in the terminal is for the driver only.
            self._supervisor = await asyncio.to_thread(
                subprocess.Popen,
                command(end, theirs.fileno(), serve, folder),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(end, theirs.fileno(), *inherited),
                env=without_proxy_on_loopback(cluster_environment() or os.environ),
                start_new_session=True,
            )
        finally:
            os.close(end)
            theirs.close()
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        self.send(setup)

    async def read(self) -> Any:
        """The next message. Raises EOFError or OSError when the process has ended."""
        assert self._reader is not None
        size = HEADER.unpack(await self._reader.readexactly(HEADER.size))[0]
        return json.loads(await self._reader.readexactly(size))

    def send(self, message: object) -> None:
        """Send a message. A process that has ended does not get it."""
        assert self._writer is not None
        payload = ForkingPickler.dumps(message)
        if not self._writer.is_closing():
            self._writer.write(HEADER.pack(len(payload)) + payload)

    def kill(self) -> None:
        """Have the supervisor end the process and everything that it has started."""
        self.killed = True
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    def has_started_others(self) -> bool:
        """Whether a process that this one has started is still alive."""
        assert self._supervisor is not None
        with contextlib.suppress(psutil.Error):
            return len(psutil.Process(self._supervisor.pid).children(recursive=True)) > 1
        return False

    async def end(self) -> int | None:
        """End the process. Returns its exit code, 128 + n after signal n; None if unknown."""
        killed = self.killed
        self.kill()
        self.killed = killed
        if self._writer is not None:
            self._writer.close()
        if self._supervisor is None:
            return None
        try:
            code = await asyncio.to_thread(self._supervisor.wait, END_S)
        except subprocess.TimeoutExpired:
            return None  # the supervisor keeps trying
        if code < 0:
            # The supervisor itself was killed. End at least what is still in its process group.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._supervisor.pid, signal.SIGKILL)
        return code


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


def _exactly(connection: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        if not (some := connection.recv(min(size - len(received), 1 << 20))):
            raise EOFError
        received += some
    return bytes(received)
