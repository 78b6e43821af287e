"""What must not be written anywhere: secrets. Taken out of config dumps, logs, metrics and errors before they leave the process."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from typing import IO, Any
from urllib.parse import quote

import yaml

__all__ = ["RedactingFormatter", "print_shown", "redact", "redact_tree", "shown"]

SECRET_NAME = re.compile(
    r"(?:^|[_.-])(?:api_?key|key|token|credentials?|pat)(?:[_-]?\d+)?$"
    r"|[_.-](?:pwd|pass|pw)(?:[_-]?\d+)?$"
    r"|(?:secret|password|passwd|passphrase|apikey)(?:[_-]?\d+)?$",
    re.IGNORECASE,
)
"""Variables and settings whose values are secrets, by their names. PWD alone is the current directory."""

SHORT = 8
"""Characters. A shorter value is a secret only where it is a word of its own: its characters are part of many other words."""
FLAGS = frozenset({"true", "false", "yes", "no", "on", "off", "none", "null"})
"""Values that switch something and hide nothing. A single character hides nothing either."""

PATTERNS = (
    re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)"),
    re.compile(r"(?<=bearer )[\w.~+/=-]{4,}", re.IGNORECASE),
    re.compile(r"(?<![\w])(?:sk|hf|ghp|glpat|xoxb)[-_][A-Za-z0-9_-]{16,}"),
    re.compile(r"(?<=api_key=)[^\s&'\",;]+|(?<=token=)[^\s&'\",;]+|(?<=password=)[^\s&'\",;]+", re.IGNORECASE),
)
"""What looks like a secret wherever it stands: user and password of an address, a bearer token, keys of well-known services, `api_key=…`."""


def redact(text: str) -> str:
    """The text with `[redacted]` for every secret: the values of this process's secret variables, plain or escaped, and what looks like a secret."""
    for name, value in os.environ.items():
        if len(value) > 1 and SECRET_NAME.search(name) and value.lower() not in FLAGS:
            for form in _forms(value):
                if len(form) >= SHORT:
                    text = text.replace(form, f"[redacted {name}]")
                else:
                    text = re.sub(rf"(?<!\w){re.escape(form)}(?!\w)", f"[redacted {name}]", text)
    for pattern in PATTERNS:
        text = pattern.sub("[redacted]", text)
    return text


def _forms(value: str) -> Iterator[str]:
    """The value as it stands in texts, in JSON, in Python's repr, in quoted YAML and in an address; the longest first."""
    in_json = (json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1])
    in_yaml = (yaml.safe_dump(value, default_style='"', width=2 * len(value) + 80).strip()[1:-1], value.replace("'", "''"))
    yield from sorted({value, *in_json, *in_yaml, repr(value)[1:-1], quote(value, safe="")}, key=len, reverse=True)


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


def print_shown(text: str = "", file: IO[str] | None = None) -> None:
    """Print what `shown` makes of the text, at once. Column, file and run names may hold anything."""
    print(shown(text), file=file, flush=True)


class RedactingFormatter(logging.Formatter):
    """`shown`, for a log."""

    def format(self, record: logging.LogRecord) -> str:
        return shown(super().format(record))
