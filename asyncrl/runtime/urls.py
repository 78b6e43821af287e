"""What a URL says about the way to its server."""

from __future__ import annotations

from urllib.parse import urlsplit

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def sends_in_the_clear(url: str) -> bool:
    """Whether a request to the URL leaves this machine unencrypted."""
    parts = urlsplit(url)
    return parts.scheme != "https" and parts.hostname not in LOOPBACK
