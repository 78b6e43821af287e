"""Opens a page in this machine's browser."""

from __future__ import annotations

import contextlib
import html
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from asyncrl.runtime.files.temporary import temporary_folder

SCREENS = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
"""Variables of a machine where a browser has a window, or that name one."""


def has_screen(variables: Mapping[str, str] = os.environ) -> bool:
    """Whether a browser can show a window. Without one, Python would start a browser in the
    terminal, over the output."""
    return sys.platform == "darwin" or any(variables.get(name) for name in SCREENS)


@contextlib.contextmanager
def open_page(address: str) -> Iterator[None]:
    """Open the address, where there is a screen. A file that only this user can read leads there:
    the address has a secret, and all users see the arguments of a browser."""
    if not has_screen():
        yield
        return
    with temporary_folder("page") as folder:
        file = Path(folder) / "open.html"
        target = html.escape(address, quote=True)
        file.write_text(
            f'<!doctype html><meta http-equiv="refresh" content="0; url={target}">'
            f'<a href="{target}">The run</a>\n'
        )
        # A browser that is new keeps the files that it gets, such as a pipe of this process.
        subprocess.Popen(
            [sys.executable, "-P", "-m", "webbrowser", file.as_uri()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        yield
