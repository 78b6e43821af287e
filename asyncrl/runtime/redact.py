"""Removes secrets from config dumps, logs, metrics and errors before they leave the process."""

from __future__ import annotations

import base64
import functools
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from typing import IO
from urllib.parse import quote, quote_plus

import yaml

SECRET_NAME = re.compile(
    r"(?:^|[_.-])(?:api_?key|key|token|credentials?|pat|auth|bearer|cookie|dsn|pem)(?:[_-]?\d+)?$"
    r"|[_.-](?:pwd|pass|pw)(?:[_-]?\d+)?$"
    r"|(?:secret|password|passwd|passphrase|apikey|authorization)(?:[_-]?\d+)?$"
    r"|(?:access_key_id|auth_config|connection_string|_jwt|webhook_url|database_url|redis_url)$"
    r"|(?-i:[a-z](?:Key|Token)(?:[_-]?\d+)?)$",
    re.IGNORECASE,
)
"""Names of variables and settings with secret values. PWD alone is the current directory."""

SHORT = 8
"""Characters. Shorter secrets are redacted only as whole words, because they occur within other
words."""
FLAGS = frozenset({"true", "false", "yes", "no", "on", "off", "none", "null"})
"""Values of switches, which are not secrets. Neither is a single character."""

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
"""Texts that look like secrets: user and password in a URL, bearer and basic tokens, keys of
well-known services, web tokens, `api_key=…`, `"password": "…"`, private keys. A group `kept` is not
redacted."""

BETWEEN_TEXTS = "\n\x00\n"
"""Separates texts that are redacted together."""


def redact(text: str) -> str:
    """Replace every secret in the text by `[redacted]`: values of this process's secret variables,
    plain or escaped, and texts that match `PATTERNS`."""
    for name in secret_names(os.environ):
        for form in _forms(os.environ[name]):
            if len(form) >= SHORT:
                text = text.replace(form, f"[redacted {name}]")
            else:
                text = re.sub(rf"(?<!\w){re.escape(form)}(?!\w)", f"[redacted {name}]", text)
    for pattern in PATTERNS:
        text = pattern.sub(lambda found: (found.groupdict().get("kept") or "") + "[redacted]", text)
    return text


def redact_all(texts: Sequence[str]) -> list[str]:
    """`redact` each text. One pass over all of them takes less time than one for each."""
    if not any("\x00" in text for text in texts):
        together = redact(BETWEEN_TEXTS.join(texts)).split(BETWEEN_TEXTS)
        # Fewer if a secret seemed to reach from one text into the next.
        if len(together) == len(texts):
            return together
    return [redact(text) for text in texts]


def secret_names(variables: Mapping[str, str]) -> list[str]:
    """Names of the variables whose values `redact` takes for secrets, sorted."""
    return sorted(
        name
        for name, value in variables.items()
        if len(value) > 1 and is_secret_name(name) and value.lower() not in FLAGS
    )


@functools.lru_cache(maxsize=1024)
def is_secret_name(name: str) -> bool:
    """Whether a variable or setting of this name has a secret value."""
    return SECRET_NAME.search(name) is not None


@functools.lru_cache(maxsize=256)
def _forms(value: str) -> tuple[str, ...]:
    """The forms in which a value may appear, longest first.

    They are: plain, in JSON and JSON within JSON, in Python's repr, in quoted YAML, in a URL, in
    hexadecimal, within base64, and each long line of the value.
    """
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
        # Base64 of a longer text depends on the value's offset within a group of three bytes.
        for before, start in enumerate((0, 2, 3)):
            end = (before + len(content)) * 8 // 6
            forms |= {
                encode(b"\0" * before + content).decode()[start:end]
                for encode in (base64.b64encode, base64.urlsafe_b64encode)
            }
    return tuple(sorted(forms, key=len, reverse=True))


def redact_tree(tree: Mapping[str, object]) -> dict[str, object]:
    """Apply `redact` to every string of nested mappings and lists. Strings under the name of a
    secret are replaced entirely."""
    return {
        redact(name): _hidden(item) if SECRET_NAME.search(name) else _redacted(item)
        for name, item in tree.items()
    }


def _redacted(value: object) -> object:
    if isinstance(value, Mapping):
        return {
            _name(name): _hidden(item) if SECRET_NAME.search(str(name)) else _redacted(item)
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_redacted(item) for item in value]
    return redact(value) if isinstance(value, str) else value


def _name(name: object) -> object:
    return redact(name) if isinstance(name, str) else name


def _hidden(tree: object) -> object:
    """Redact all strings of a value under a secret's name. Numbers stay: one may count tokens."""
    if isinstance(tree, Mapping):
        return {_name(name): _hidden(item) for name, item in tree.items()}
    if isinstance(tree, list | tuple):
        return [_hidden(item) for item in tree]
    return "[redacted]" if isinstance(tree, str) else tree


def shown(text: str) -> str:
    """Make a text safe for a terminal: no secrets, and no control characters except tab and
    newline. It may quote model output."""
    return "".join(
        character if character.isprintable() or character in "\n\t" else "�"
        for character in redact(text)
    )


class OutputError(OSError):
    """A standard stream cannot be written: its reader has left, or its disk is full."""


def print_shown(text: str = "", file: IO[str] | None = None) -> None:
    """Print `shown(text)` and flush. Names of columns, files and runs may contain anything.

    Raises:
        OutputError: it cannot be written.
    """
    try:
        print(shown(text), file=file, flush=True)
    except OSError as error:
        raise OutputError(error.errno, error.strerror) from error


class RedactingFormatter(logging.Formatter):
    """Applies `shown` to log records."""

    def format(self, record: logging.LogRecord) -> str:
        return shown(super().format(record))
