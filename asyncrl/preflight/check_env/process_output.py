"""What the processes of an environment print while it is checked. The beginning is shown."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

from asyncrl.preflight.check_env.findings import Finding

MOST_SHOWN = 4096
"""Bytes that are shown."""
LAST_S = 2.0
"""Seconds until the last output is read, after the processes have ended."""


class Printed:
    """A pipe for the output of processes. Use it as a context.

    Args:
        show: gets the beginning of the output, in parts.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._bytes = 0
        self._reading, self.descriptor = os.pipe()
        self._reader = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Printed:
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)
        self._reader.join(LAST_S)

    def _read(self) -> None:
        """Thread: read until all processes have closed the pipe, so that none waits to write."""
        with contextlib.closing(os.fdopen(self._reading, "rb", buffering=0)) as pipe:
            while part := pipe.read(1 << 16):
                room = MOST_SHOWN - self._bytes
                self._bytes += len(part)
                if room > 0:
                    self._show(part[:room].decode(errors="replace"))

    def findings(self) -> list[Finding]:
        """Says how much was not shown."""
        if self._bytes <= MOST_SHOWN:
            return []
        text = (
            f"the environment printed {self._bytes:,} bytes here, and {MOST_SHOWN:,} of them are"
            " shown; each session of a run prints as much, into Ray's logs"
        )
        return [Finding("warn", "output", text)]
