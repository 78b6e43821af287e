"""Paths, files and output in UTF-8, also where the locale has another encoding."""

from __future__ import annotations

import contextlib
import io
import locale
import os
import sys

ASCII = ("ascii", "us-ascii", "ansi_x3.4-1968", "646")
"""Encodings of the locale C. Terminals beside it usually show UTF-8, as Python assumes."""


def restart_in_utf8() -> None:
    """Start this command again in Python's UTF-8 mode if Python would write paths and files in
    another encoding. Ray, pyarrow and transformers always use UTF-8, so a path with a letter beyond
    ASCII would be two different paths. The processes that it starts have this mode too."""
    if sys.flags.utf8_mode or sys.getfilesystemencoding() == "utf-8":
        return
    os.environ["PYTHONUTF8"] = "1"
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def safe_output() -> None:
    """Let standard output and error escape what their encoding does not have, instead of raising
    UnicodeEncodeError. In UTF-8 mode, they have the encoding of the locale."""
    encoding = locale.getencoding()
    chosen = not sys.flags.utf8_mode or "PYTHONIOENCODING" in os.environ
    keeps = chosen or encoding.lower() in ASCII
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(LookupError):
                stream.reconfigure(encoding=None if keeps else encoding, errors="backslashreplace")
