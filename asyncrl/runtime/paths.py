"""Paths as users write them, and what they may have meant."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

VARIABLE = re.compile(r"\$(?:\{(?P<braced>[^}]*)\}|(?P<plain>\w+))")
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
"""A URL, also with one slash: `file:/x` is a URL, and others are slips."""
WINDOWS = re.compile(r"(?:^|/)%(\w+)%(?:/|$)")


def written_path(text: str) -> str:
    """The path with `~` and environment variables (`$NAME`, `${NAME}`) replaced. A path that exists
    as it is written stays.

    Raises:
        ValueError: a variable or a home directory is unknown, or the text is a URL. The message is
            what follows the setting's name and value.
    """
    exists = os.path.lexists(text)
    if "$" in text and not exists:
        text = VARIABLE.sub(_value, text)
    if not exists and (found := WINDOWS.search(text)):
        raise ValueError(f"has %{found[1]}%, which is not replaced; write ${found[1]}")
    if not exists and URL.match(text):
        raise ValueError("is a URL, and asyncrl reads local files; download it, or mount it")
    if not text.startswith("~"):
        return text
    try:
        return str(Path(text).expanduser())
    except RuntimeError:
        raise ValueError(
            "begins with a home directory that is unknown; set HOME, or write it out"
        ) from None


def _value(match: re.Match[str]) -> str:
    name = match["braced"] if match["plain"] is None else match["plain"]
    value = os.environ.get(name)
    if not value:
        raise ValueError(
            f"has {match[0]}, and the environment has no variable {name!r} with a value; set it, or"
            " write the path"
        )
    return value


def meant(path: Path) -> str:
    """What a missing path may mean, as the end of a message: a similar name in its folder, or the
    first folder that is missing. Empty if there is no idea."""
    missing = path
    while not missing.parent.is_dir() and missing.parent != missing:
        missing = missing.parent
    try:
        names = os.listdir(missing.parent)
    except OSError:
        return ""
    by_lower = {name.lower(): name for name in names}
    close = difflib.get_close_matches(missing.name.lower(), by_lower, 1)
    if close:
        return f"; did you mean {str(missing.parent / by_lower[close[0]])!r}?"
    return f"; there is no folder {str(missing)!r}" if missing != path else ""
