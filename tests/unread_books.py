"""The books of a run that has no files, for single checks of the audit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from asyncrl.run.audit.books import Books


@dataclass
class FakeRun:
    """What checks of groups read of a `Run`."""

    config: Any


def unread_books(config: Any = None, **fields: Any) -> Books:
    """Books with these attributes."""
    books = object.__new__(Books)
    books.run = FakeRun(config)  # type: ignore[assignment]
    vars(books).update(fields)
    return books
