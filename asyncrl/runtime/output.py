"""Standard output and error of a run: a reader that leaves or stops reading cannot end the run.

`print` raises if the terminal or the pipe is gone, and waits for as long as a full pipe is not
read. During a run, a thread writes instead. What cannot be written is left out.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import select
import stat
import sys
import threading
from collections import deque
from collections.abc import Iterator
from typing import IO, Any

logger = logging.getLogger("asyncrl")

MOST_WAITING = 1 << 20
"""Bytes that wait for a slow reader, at most. Further ones are left out."""
END_S = 2.0
"""Seconds without progress, at the end, after which the rest is left out: a reader may never go
on."""
FILE_END_S = 30.0
"""The same for a file. A disk that other programs write to stalls for seconds, and goes on."""
AT_ONCE = 4096
"""Bytes of one write, so that a slow reader shows progress."""
GONE = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO, errno.ENOTCONN, errno.ECONNRESET)
"""Errors after which nothing more can be written."""


class _Writer:
    """Writes bytes to one open file, in a thread."""

    def __init__(self, name: str, end_s: float) -> None:
        self._name, self._end_s = name, end_s
        self.descriptors: list[int] = []
        """Descriptors of the file."""
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._size = 0
        self._changed = threading.Condition()
        self._open, self._gone = True, False
        self._left_out = 0
        self._progress = 0
        self._thread = threading.Thread(target=self._work, name=f"asyncrl-{name}", daemon=True)
        self._thread.start()

    def put(self, descriptor: int, text: bytes) -> None:
        """Write this after everything before it, or leave it out if too much waits."""
        with self._changed:
            if self._gone or self._size + len(text) > MOST_WAITING:
                self._left_out += 1
                return
            self._waiting.append((descriptor, text))
            self._size += len(text)
            self._changed.notify()

    def flush(self) -> None:
        """Wait until all is written, as long as the reader takes it."""
        with self._changed:
            before = -1
            while self._size and not self._gone and before != self._progress:
                before = self._progress
                self._changed.wait_for(lambda: not self._size or self._gone, self._end_s)

    def close(self) -> None:
        """Write the rest, as long as the reader takes it. Nothing more is written after that."""
        with self._changed:
            self._open = False
            self._changed.notify()
        before = -1
        while self._thread.is_alive() and before != self._progress:
            before = self._progress
            self._thread.join(self._end_s)
        if not self._gone and (self._left_out or self._thread.is_alive()):
            logger.warning("%s was not read: some of it was left out", self._name)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or not self._open)
                if not self._waiting:
                    return
                descriptor, text = self._waiting.popleft()
            self._write(descriptor, text)
            with self._changed:
                self._size = max(0, self._size - len(text))
                self._changed.notify_all()

    def _write(self, descriptor: int, text: bytes) -> None:
        while text and not self._gone:
            try:
                written = os.write(descriptor, text[:AT_ONCE])
            except BlockingIOError:
                select.select([], [descriptor], [], 1.0)
                continue
            except OSError as error:
                if error.errno in GONE:
                    self._give_up(error)
                return  # such as a full disk, which may get room again
            text = text[written:]
            self._progress += 1

    def _give_up(self, error: OSError) -> None:
        logger.warning(
            "%s is gone (%s); the run goes on, and this log has what it does", self._name, error
        )
        with self._changed:
            self._gone = True
            self._waiting.clear()
            self._size = 0
            self._changed.notify_all()
        for descriptor in self.descriptors:  # what others print at the end must not fail either
            with contextlib.suppress(OSError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, descriptor)
                os.close(null)


class _Lasting(io.TextIOBase):
    """A stream of text whose writer neither waits nor fails."""

    def __init__(self, stream: io.TextIOWrapper, writer: _Writer, descriptor: int) -> None:
        self._stream, self.writer, self._descriptor = stream, writer, descriptor

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    @property
    def errors(self) -> str:  # type: ignore[override]
        return "backslashreplace"

    def write(self, text: str) -> int:
        self.writer.put(self._descriptor, text.encode(self.encoding, self.errors))
        return len(text)

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return self._stream.isatty()

    def writable(self) -> bool:
        return True


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Let `sys.stdout` and `sys.stderr` neither block nor fail in the body. Streams that are no
    files, such as those of Jupyter, stay as they are."""
    before = sys.stdout, sys.stderr
    writers: dict[tuple[int, int], _Writer] = {}
    sys.stdout = _lasting("standard output", sys.stdout, writers)
    sys.stderr = _lasting("standard error", sys.stderr, writers)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for writer in writers.values():
            writer.close()


def flush_output() -> None:
    """Write what `lasting_output` has to write by now."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, _Lasting):
            stream.writer.flush()


def drain_output() -> None:
    """Write what `lasting_output` still has to write, before the process ends at once."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, _Lasting):
            stream.writer.close()


def _lasting(name: str, stream: IO[str], writers: dict[tuple[int, int], _Writer]) -> Any:
    """The stream with a writer. Two streams to the same file share one, which keeps their order."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    try:
        descriptor = stream.fileno()
        found = os.fstat(descriptor)
    except (OSError, ValueError):
        return stream
    with contextlib.suppress(OSError):
        stream.flush()
    key = (found.st_dev, found.st_ino)
    if key not in writers:
        writers[key] = _Writer(name, FILE_END_S if stat.S_ISREG(found.st_mode) else END_S)
    writers[key].descriptors.append(descriptor)
    return _Lasting(stream, writers[key], descriptor)


class _Forgiving(io.TextIOBase):
    """A stream that leaves out what it cannot write."""

    def __init__(self, stream: io.TextIOWrapper) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def writable(self) -> bool:
        return True


def forgive_output() -> None:
    """Let `print` of a user's function in a process of its own never raise, without a thread."""
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            setattr(sys, name, _Forgiving(stream))


def open_missing_streams() -> None:
    """Open the null device for each standard stream that was closed when this process began.
    Otherwise the next file gets its number, and receives what others print."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", closefd=False))
