"""`--watch`: a process of `asyncrl watch` beside the run. It reads the run directory alone."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

END_S, READ_S = 10.0, 1.0
"""Seconds that the process gets to end, and that its last lines get to be read."""


class PageProcess:
    """Serves and opens the page of a run until `end`. The process also ends if this one dies: it
    has the other end of a pipe. Ctrl-C does not reach it, since a run goes on after that."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """
        Args:
            say: gets each line of the process, the first with the page's address.
        """
        self._say = say
        self._process: subprocess.Popen[str] | None = None
        self._reads: threading.Thread | None = None

    def begin(self, directory: Path) -> None:
        """Start the process. Does nothing if it was started before."""
        if self._process is not None:
            return
        command = [sys.executable, "-P", "-m", "asyncrl.cli", "watch"]
        try:
            self._process = subprocess.Popen(
                [*command, str(directory), "--open", "--attached"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:  # a page is not worth a run
            self._say(f"it could not be started: {error}")
            return
        self._reads = threading.Thread(target=self._read, name="page", daemon=True)
        self._reads.start()

    def end(self) -> None:
        """End the process, and wait for that."""
        if self._process is None or self._reads is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reads.join(READ_S)

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            self._say(line.rstrip("\n"))
