"""Imports of libraries without the optional packages that they would load."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["hidden"]


@contextmanager
def hidden(package: str) -> Iterator[None]:
    """Within the context, an import of this package raises ImportError, as if it was not installed.
    A package that is imported already stays."""
    hides = package not in sys.modules
    if hides:
        sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hides and sys.modules.get(package, sys) is None:
            del sys.modules[package]
