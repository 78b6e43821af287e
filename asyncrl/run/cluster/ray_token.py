"""Ray's token, with which anyone can run code on a cluster: only its owner may read it."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

ELSEWHERE = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""Variables with which Ray takes its token from elsewhere."""
OTHERS = stat.S_IRWXG | stat.S_IRWXO


def keep_token_private() -> None:
    """Take the permissions of others from `~/.ray/auth_token`, to which Ray gives those of any new
    file. Where Ray would make the file, an empty private one is made, which Ray fills."""
    with contextlib.suppress(OSError, RuntimeError):  # no home, or not ours: Ray has its own words
        path = Path.home() / ".ray" / "auth_token"
        if not path.exists():
            if any(os.environ.get(name) for name in ELSEWHERE):
                return
            path.parent.mkdir(mode=0o700, exist_ok=True)
            path.touch(mode=0o600, exist_ok=True)
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & OTHERS:
            path.chmod(mode & ~OTHERS)
