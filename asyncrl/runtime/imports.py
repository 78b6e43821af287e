"""Where modules are imported from: the user's folder last, and libraries without the optional
packages that they would load."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SAFE_PATH, SAFE = "PYTHONSAFEPATH", "asyncrl"
"""Variable with which Python does not put the folder of a script, or the current one, before its
own modules, and the value by which we know ours."""


def import_path() -> list[str]:
    """`sys.path` with the user's folder, the current one, at its end. A user's `types.py` or
    `tokenizers.py` then hides no module of Python or of a library."""
    kept = [entry for entry in sys.path if entry]  # "" is the current folder, first
    here = current_folder()
    return kept if here is None or here in kept else [*kept, here]


def current_folder() -> str | None:
    """The current folder; None if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def user_folder_last() -> None:
    """Import from `import_path()` here, and keep the current folder from the beginning of the path
    of processes that this one starts. `for_users_programs` undoes the latter."""
    if sys.path and not sys.flags.safe_path and sys.path[0] == current_folder():
        del sys.path[0]  # `python -m` puts it there
    sys.path[:] = import_path()
    os.environ.setdefault(SAFE_PATH, SAFE)


def for_users_programs() -> None:
    """Give what this process starts Python's usual path again, because it runs a user's code."""
    if os.environ.get(SAFE_PATH) == SAFE:
        del os.environ[SAFE_PATH]


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
