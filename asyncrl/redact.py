"""What must not be written anywhere: secrets. Taken out of config dumps, logs, metrics and errors before they leave the process."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["RedactingFormatter", "redact", "redact_tree", "shown"]

SECRET_NAME = re.compile(r"(^|[_.-])(api_?key|key|token|secret|password|passwd|credentials?)$", re.IGNORECASE)
"""Variables and settings whose values are secrets, by their names."""

SHORTEST_SECRET = 8
"""Characters. Shorter values of such variables stand in too many other texts."""

PATTERNS = (
    re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)"),
    re.compile(r"(?<=bearer )[\w.~+/=-]{4,}", re.IGNORECASE),
    re.compile(r"(?<![\w])(?:sk|hf|ghp|glpat|xoxb)[-_][A-Za-z0-9_-]{16,}"),
    re.compile(r"(?<=api_key=)[^\s&'\",;]+|(?<=token=)[^\s&'\",;]+|(?<=password=)[^\s&'\",;]+", re.IGNORECASE),
)
"""What looks like a secret wherever it stands: user and password of an address, a bearer token, keys of well-known services, `api_key=…`."""


def redact(text: str) -> str:
    """The text with `[redacted]` for every secret: the values of this process's secret variables, and what looks like one."""
    for name, value in os.environ.items():
        if len(value) >= SHORTEST_SECRET and SECRET_NAME.search(name):
            text = text.replace(value, f"[redacted {name}]")
    for pattern in PATTERNS:
        text = pattern.sub("[redacted]", text)
    return text


def redact_tree(tree: Any) -> Any:
    """`redact` in every string of nested mappings and lists; a text under a secret's name goes altogether."""
    if isinstance(tree, Mapping):
        return {name: "[redacted]" if isinstance(item, str) and SECRET_NAME.search(str(name)) else redact_tree(item) for name, item in tree.items()}
    if isinstance(tree, list | tuple):
        return [redact_tree(item) for item in tree]
    return redact(tree) if isinstance(tree, str) else tree


def shown(text: str) -> str:
    """The text as a terminal may show it: without secrets, and without control characters other than tab and newline. It may quote what a model wrote."""
    return "".join(character if character.isprintable() or character in "\n\t" else "�" for character in redact(text))


class RedactingFormatter(logging.Formatter):
    """`shown`, for a log."""

    def format(self, record: logging.LogRecord) -> str:
        return shown(super().format(record))
