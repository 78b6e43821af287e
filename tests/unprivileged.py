"""Permissions of files that also hold for root."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

VERSION = 0x20080522
"""_LINUX_CAPABILITY_VERSION_3."""
OVERRIDES = 1 << 1 | 1 << 2
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH."""


@contextlib.contextmanager
def without_permission(path: Path) -> Iterator[None]:
    """A context in which this thread may not read the path, not even as root."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, before = (ctypes.c_uint32 * 2)(VERSION, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, before) == 0
    fewer = (ctypes.c_uint32 * 6)(*before)
    fewer[0] &= ~OVERRIDES & 0xFFFFFFFF
    mode = path.stat().st_mode
    path.chmod(0)
    try:
        assert libc.capset(header, fewer) == 0
        yield
    finally:
        assert libc.capset(header, before) == 0
        path.chmod(mode)
