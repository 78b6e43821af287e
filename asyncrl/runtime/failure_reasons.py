"""Which reasons of failures are the same one. Pure."""

from __future__ import annotations

import re

HOME = re.compile(r"(?:/[^\s'\":]*)?/session_\w+")
"""The folder of one session."""
CHANGING = re.compile(
    r"\btmp\w{8}\b|0x[0-9a-f]+|\b(?=[a-f]*\d)[0-9a-f]{4,}\b|\d{4,}", re.IGNORECASE
)
"""Parts of a reason that differ from session to session: names of temporary files, addresses,
hexadecimal numbers, and numbers of at least 4 digits."""


def reason_key(reason: str) -> str:
    """The reason without what differs from session to session. Equal keys: the same reason."""
    return CHANGING.sub("…", HOME.sub("$HOME", reason))
