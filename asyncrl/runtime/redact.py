"""What must not be written anywhere: secrets. Taken out of config dumps, logs, metrics and errors
before they leave the process."""

from __future__ import annotations

import base64
import functools
import json
import logging
import os
import re
from collections.abc import Mapping
from typing import IO, Any
from urllib.parse import quote, quote_plus

import yaml

__all__ = ["RedactingFormatter", "print_shown", "redact", "redact_tree", "shown"]

SECRET_NAME = re.compile(
    r"(?:^|[_.-])(?:api_?key|key|token|credentials?|pat|auth|bearer|cookie|dsn|pem)(?:[_-]?\d+)?$"
    r"|[_.-](?:pwd|pass|pw)(?:[_-]?\d+)?$"
    r"|(?:secret|password|passwd|passphrase|apikey|authorization)(?:[_-]?\d+)?$"
    r"|(?-i:[a-z](?:Key|Token)(?:[_-]?\d+)?)$",
    re.IGNORECASE,
)
"""Variables and settings whose values are secrets, by their names. PWD alone is the current
directory."""

SHORT = 8
"""Characters. A shorter value is a secret only where it is a word of its own: its characters are
part of many other words."""
FLAGS = frozenset({"true", "false", "yes", "no", "on", "off", "none", "null"})
"""Values that switch something and hide nothing. A single character hides nothing either."""

PATTERNS = (
    re.compile(r"(?<=://)[^/\s'\"<>]+(?=@)"),
    re.compile(
        r"(?P<kept>\bbearer[ \t]+|authorization[\"']?: ?[\"']?basic +)[\w.~+/=-]{4,}", re.IGNORECASE
    ),
    re.compile(
        r"(?<![\w])(?:sk|hf|gh[pousr]|github_pat|glpat|nvapi|xox[a-z])[-_][A-Za-z0-9_-]{16,}"
    ),
    re.compile(
        r"(?<![\w])(?:AKIA|ASIA)[A-Z0-9]{16}(?![\w])|(?<![\w])AIza[\w-]{35}|(?<![\w])eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{8,}"
    ),
    re.compile(
        r"(?P<kept>(?:api[_-]?key|token|password|secret)[\"']?(?:=|:"
        r" ?(?=[\"']))[\"']?)[^\s&'\",;]+",
        re.IGNORECASE,
    ),
    re.compile(r"(?P<kept>x-api-key: ?)\S+", re.IGNORECASE),
    re.compile(r"(?P<kept>-----BEGIN [A-Z ]*PRIVATE KEY-----)[^-]+(?=-----END)"),
)
"""What looks like a secret in any place: user and password of an address, a bearer or basic
token, keys of well-known services, web tokens, `api_key=…`, `"password": "…"`, private keys. A
group `kept` stays."""


def redact(text: str) -> str:
    """The text with `[redacted]` for every secret: the values of this process's secret variables,
    plain or escaped, and what looks like a secret."""
    for name, value in os.environ.items():
        if len(value) > 1 and SECRET_NAME.search(name) and value.lower() not in FLAGS:
            for form in _forms(value):
                if len(form) >= SHORT:
                    text = text.replace(form, f"[redacted {name}]")
                else:
                    text = re.sub(rf"(?<!\w){re.escape(form)}(?!\w)", f"[redacted {name}]", text)
    for pattern in PATTERNS:
        text = pattern.sub(lambda found: (found.groupdict().get("kept") or "") + "[redacted]", text)
    return text


@functools.lru_cache(maxsize=256)
def _forms(value: str) -> tuple[str, ...]:
    """The value as it appears in texts, in JSON and JSON within JSON, in Python's repr, in quoted
    YAML, in an address, in hexadecimal digits and within base64; and each long line of it. The
    longest first."""
    in_json = {json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}
    in_yaml = (
        yaml.safe_dump(value, default_style='"', width=2 * len(value) + 80).strip()[1:-1],
        value.replace("'", "''"),
    )
    in_address = {quote(value, safe=""), quote(value), quote_plus(value)}
    lower = {re.sub("%..", lambda found: found[0].lower(), form) for form in in_address}
    forms = {
        value,
        *in_json,
        *(json.dumps(form)[1:-1] for form in in_json),
        *in_yaml,
        repr(value)[1:-1],
        *in_address,
        *lower,
    }
    if len(value) >= SHORT:
        content = value.encode(errors="surrogateescape")
        forms |= {
            content.hex(),
            content.hex().upper(),
            *(line for line in value.splitlines() if len(line) >= SHORT and "-----" not in line),
        }
        for before, start in enumerate(
            (0, 2, 3)
        ):  # base64 of a longer text: by where in three bytes the value begins
            end = (before + len(content)) * 8 // 6
            forms |= {
                encode(b"\0" * before + content).decode()[start:end]
                for encode in (base64.b64encode, base64.urlsafe_b64encode)
            }
    return tuple(sorted(forms, key=len, reverse=True))


def redact_tree(tree: Any) -> Any:
    """`redact` in every string of nested mappings and lists; a text under a secret's name goes
    altogether."""
    if isinstance(tree, Mapping):
        return {
            _name(name): _hidden(item) if SECRET_NAME.search(str(name)) else redact_tree(item)
            for name, item in tree.items()
        }
    if isinstance(tree, list | tuple):
        return [redact_tree(item) for item in tree]
    return redact(tree) if isinstance(tree, str) else tree


def _name(name: Any) -> Any:
    return redact(name) if isinstance(name, str) else name


def _hidden(tree: Any) -> Any:
    """Values under a secret's name: texts go at every depth; a number may be a count of
    tokens."""
    if isinstance(tree, Mapping):
        return {_name(name): _hidden(item) for name, item in tree.items()}
    if isinstance(tree, list | tuple):
        return [_hidden(item) for item in tree]
    return "[redacted]" if isinstance(tree, str) else tree


def shown(text: str) -> str:
    """The text as a terminal may show it: without secrets, and without control characters other
    than tab and newline. It may quote what a model wrote."""
    return "".join(
        character if character.isprintable() or character in "\n\t" else "�"
        for character in redact(text)
    )


def print_shown(text: str = "", file: IO[str] | None = None) -> None:
    """Print what `shown` makes of the text, at once. Column, file and run names may hold
    anything."""
    print(shown(text), file=file, flush=True)


class RedactingFormatter(logging.Formatter):
    """`shown`, for a log."""

    def format(self, record: logging.LogRecord) -> str:
        return shown(super().format(record))
