"""Reads tool calls that transformers' content parsers cannot, or not strictly: several JSON values
in a row, calls in Python's syntax, a tag for each argument, and JSON with bare keys.

A reader begins at an offset of a turn, and finds where the call ends. So the text that ends a call
may also be in one of its arguments.

The text comes from a model, so nothing of it is ever run. It can also be long and pathological, so
patterns keep what they have matched, and no part of it is read again and again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

Calls: TypeAlias = list[dict[str, Any]]
"""`{"function": {"name": ..., "arguments": ...}}`, with an `id` if the model wrote one."""
Reads: TypeAlias = Callable[[str, int], tuple[Any, int]]
"""What begins at an offset of a text, and the offset after it. Raises ValueError. RecursionError:
JSON is nested too deeply."""
NAMES = ("name", "tool_name")
ARGUMENTS = ("arguments", "parameters")
IDS = ("id", "tool_call_id", "call_id")
LABELS = ("index", "id")
"""What may be an argument in a call that names no arguments."""
TYPES = ("function", "function_call", "tool_call", "tool_use")
MOST_ENCODINGS = 3
"""Times that arguments may be written as JSON text in JSON text."""
BETWEEN = re.compile(r"[\s;,]*")
HEAD = re.compile(
    r"\s*+(?:\[TOOL_CALLS\]\s*+)?(?P<name>[\w.-]{1,256}+)(?:\[CALL_ID\](?P<id>\w{1,256}+))?\s*+"
    r"(?:(?=\{)|\[ARGS\]\s*+)"
)
"""What Mistral's models write before the arguments of a call."""
LISTS = re.compile(r"\s*+\[?+\s*+\{")
"""How calls in JSON begin."""
CALLED = re.compile(r"[A-Za-z_][\w.-]{0,255}+\s*+\(")
SPACE = re.compile(r"\s*")
NAME = re.compile(r"[A-Za-z_][\w.-]*")
NUMBER = re.compile(r"-?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")
WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
ESCAPE = re.compile(r"\\(?:\n|[\\'\"ntr]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})")
ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "\n": ""}
AFTER_TEXT = re.compile(r"\s*(?:[,)\]}:]|\Z)")
"""What follows the end of a text. Some templates write texts without escapes, so that a quote may
also be a part of one."""
EVERY = re.compile("")
"""What follows the end of a text whose quotes are all escaped."""
NEXT_ARGUMENT = re.compile(r",\s*+[A-Za-z_]\w*+\s*+=")
BARE_KEY = re.compile(r"[^\s:,{}\[\]<>\"']{1,256}+")
BARE_VALUE = re.compile(r"[^\n,{}\[\]<>\"]{1,256}+")
QUOTED = re.compile(r"""(["'])([^"'\n]+)\1""")
DEEPEST = 32
"""Levels of nested values in Python's syntax, or with bare keys."""


class Raw(str):
    """An argument as a model wrote it between tags. Only the tool's schema says whether it is a
    text."""

    __slots__ = ()


def _entries(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The entries of an object. Raises ValueError if two have one key: the first would be lost."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("two entries of an object have the same key")
    return entries


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


JSON = json.JSONDecoder(object_pairs_hook=_entries, parse_constant=_no_number)


def whole(reads: Reads, text: str) -> Any:
    """What all of a text is, apart from spaces. Raises as `reads`, and ValueError for more text."""
    value, offset = reads(text, 0)
    if text[offset:].strip():
        raise ValueError(f"more text at character {offset} of a tool call")
    return value


def some_calls(reads: Reads, text: str) -> Calls:
    """The calls that all of a text is, at least one. Raises as `whole`."""
    calls: Calls = whole(reads, text)
    if not calls:
        raise ValueError("no tool call")
    return calls


def json_text(text: str) -> Any:
    """The value of JSON. Raises ValueError, also for two entries with the same key."""
    return JSON.decode(text)


def python_text(text: str) -> Any:
    """The value of a literal of Python or JSON. Raises ValueError."""
    return whole(python_value, text)


def python_value(text: str, offset: int) -> tuple[Any, int]:
    """The literal of Python or JSON at `offset`, and the offset after it. Raises ValueError."""
    return _value(text, _skipped(SPACE, text, offset), 0, EVERY)


def arguments_of(value: object) -> dict[str, Any]:
    """The arguments of a call. None and an empty text are none. A text is read as JSON.

    Raises:
        ValueError: they are something else.
    """
    for _ in range(MOST_ENCODINGS):
        if isinstance(value, str):
            value = JSON.decode(value) if value.strip() else None
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError("they are no JSON object")
    return dict(value)


def call_of(value: object) -> dict[str, Any]:
    """A call of a JSON object: `{name, arguments}`, in `function` or not, or `{name: arguments}`.

    Raises:
        ValueError: it is no call, or has an entry that is no part of one. That may be an argument
            in a wrong field, which would be lost.
    """
    if not isinstance(value, Mapping):
        raise ValueError("a tool call that is no object")
    inner = value.get("function")
    function = inner if isinstance(inner, Mapping) else value
    names = [key for key in (*NAMES, "function") if key in function]
    given = [key for key in ARGUMENTS if key in function]
    more = set(function) - {*names, *given, *IDS, *LABELS, "type"}
    if function is inner:
        more |= set(value) - {*IDS, *LABELS, "type", "function"}
    if not names and not given and len(value) == 1 == len(more):  # {name: arguments}, as Apertus
        ((name, arguments),) = value.items()
        return {"function": {"name": name, "arguments": arguments_of(arguments)}}
    if len(names) != 1 or len(given) > 1 or more:
        raise ValueError("a tool call with other entries than a name and arguments")
    if not given and set(LABELS) & set(function):
        raise ValueError("a tool call whose id may be an argument")
    if value.get("type", TYPES[0]) not in TYPES or function.get("type", TYPES[0]) not in TYPES:
        raise ValueError("a tool call of another type")
    call = {
        "function": {
            "name": _unquoted(function[names[0]]),
            "arguments": arguments_of(function[given[0]] if given else None),
        }
    }
    identity = next((value[key] for key in IDS if isinstance(value.get(key), str)), None)
    return call if identity is None else {"id": identity, **call}


def _unquoted(name: Any) -> Any:
    """A name without the quotes around it, which some models write in tags."""
    found = QUOTED.fullmatch(name) if isinstance(name, str) else None
    return found[2] if found else name


def json_value(text: str, offset: int) -> tuple[Any, int]:
    """The value of JSON that is an object, a list, a text or null. Without any, it is None."""
    offset = _skipped(SPACE, text, offset)
    if text[offset : offset + 1] not in ("{", "[", '"', "n"):
        return None, offset
    value: Any
    value, offset = JSON.raw_decode(text, offset)
    return value, offset


def json_arguments(text: str, offset: int) -> tuple[dict[str, Any], int]:
    """The arguments of a call as JSON. Without any JSON, there are none."""
    value, offset = json_value(text, offset)
    return arguments_of(value), offset


def json_calls(text: str, offset: int) -> tuple[Calls, int]:
    """The calls of JSON objects, or lists of them, with anything of `;`, `,` and spaces between."""
    calls: Calls = []
    offset = _skipped(BETWEEN, text, offset)
    while text.startswith(("{", "["), offset):
        value, offset = JSON.raw_decode(text, offset)
        calls += [call_of(one) for one in (value if isinstance(value, list) else [value])]
        offset = _skipped(BETWEEN, text, offset)
    return calls, offset


def named_calls(text: str, offset: int) -> tuple[Calls, int]:
    """The calls of `name[ARGS]{...}`, or of JSON, as Mistral's models write them."""
    if LISTS.match(text, offset):
        return json_calls(text, offset)
    calls: Calls = []
    while head := HEAD.match(text, offset):
        arguments, offset = json_arguments(text, head.end())
        identity = {} if head["id"] is None else {"id": head["id"]}
        calls.append({**identity, "function": {"name": head["name"], "arguments": arguments}})
        offset = _skipped(BETWEEN, text, offset)
    return calls, offset


def json_or_python_calls(text: str, offset: int) -> tuple[Calls, int]:
    """The calls of JSON, or of `[name(argument=value)]`."""
    return (json_calls if LISTS.match(text, offset) else python_calls)(text, offset)


def python_calls(text: str, offset: int) -> tuple[Calls, int]:
    """The calls of `name(argument=value)`, one or more of them, or a list of them. Values are
    Python's literals, or JSON's."""
    offset = _skipped(SPACE, text, offset)
    listed = text.startswith("[", offset)
    offset = _skipped(BETWEEN, text, offset + listed)
    calls: Calls = []
    while CALLED.match(text, offset):
        call, offset = _python_call(text, offset)
        calls.append(call)
        offset = _skipped(BETWEEN, text, offset)
    return calls, _expect(text, offset, "]") if listed else offset


def tagged_arguments(text: str, offset: int, tags: Mapping[str, str]) -> tuple[dict[str, Any], int]:
    """The arguments of a call that has a tag for each of them.

    Args:
        tags: `head`, a pattern from the start of a tag to the start of its value, with the group
            `key`, and `kind` if the tag says whether its value is a text; `mark`, a text in each
            head; `end`, the text after a value; `broken`, how an end begins, which no value has;
            and `trim`, a text that is dropped from the end of a value.

    Raises:
        ValueError: a tag has no end, which would change or hide an argument, or two have one key.
    """
    head, mark, broken, end = re.compile(tags["head"]), tags["mark"], tags["broken"], tags["end"]
    arguments: list[tuple[str, Any]] = []
    offset = _skipped(SPACE, text, offset)
    while found := head.match(text, offset):
        last = text.find(end, found.end())
        if last < 0 or any(text.find(one, found.end(), last) >= 0 for one in (mark, broken)):
            raise ValueError(f"no end of the argument at character {offset} of a tool call")
        written = text[found.end() : last].removesuffix(tags["trim"])
        kind = found.groupdict().get("kind")
        arguments.append((_unquoted(found["key"]), written if kind == "true" else Raw(written)))
        offset = _skipped(SPACE, text, last + len(end))
    return _entries(arguments), offset


def bare_arguments(text: str, offset: int, marks: Mapping[str, str]) -> tuple[dict[str, Any], int]:
    """The arguments of a call in JSON whose keys have no quotes, as Gemma's models write it. Texts
    are in quotes of their own. A text without quotes is read if it is one line without marks.

    Args:
        marks: `quote`, what is on both sides of a text.

    Raises:
        ValueError: that is no such JSON, or it is nested too deeply.
    """
    offset = _skipped(SPACE, text, offset)
    if not text.startswith("{", offset):
        return {}, offset
    return _bare(text, offset, marks["quote"], 0)


def _bare(text: str, offset: int, quote: str, depth: int) -> tuple[Any, int]:
    """The value with bare keys that begins at `offset`, and the offset after it."""
    if depth > DEEPEST:
        raise ValueError("the arguments of a tool call are nested too deeply")
    if text.startswith((quote, '"'), offset):
        return _quoted(text, offset, quote)
    first = text[offset : offset + 1]
    if first == "[":
        items: list[object] = []

        def item(offset: int) -> int:
            value, offset = _bare(text, offset, quote, depth + 1)
            items.append(value)
            return offset

        return items, _listed(text, offset + 1, "]", item)
    if first == "{":
        entries: list[tuple[str, object]] = []

        def entry(offset: int) -> int:
            key, offset = (
                _quoted(text, offset, quote)
                if text.startswith((quote, '"'), offset)
                else _matched(BARE_KEY, text, offset)
            )
            value, offset = _bare(text, _expect(text, offset, ":"), quote, depth + 1)
            entries.append((key, value))
            return offset

        offset = _listed(text, offset + 1, "}", entry)
        return _entries(entries), offset
    word, offset = _matched(BARE_VALUE, text, offset)
    if (word := word.strip()) in WORDS:
        return WORDS[word], offset
    try:
        return JSON.decode(word), offset
    except ValueError:
        return word, offset


def _quoted(text: str, offset: int, quote: str) -> tuple[str, int]:
    """The text that begins at `offset` with a quote of its own or of JSON, and the offset after."""
    if not text.startswith(quote, offset):
        value, offset = JSON.raw_decode(text, offset)
        return str(value), offset
    end = text.find(quote, offset + len(quote))
    if end < 0:
        raise ValueError("a text of a tool call without an end")
    return text[offset + len(quote) : end], end + len(quote)


def _matched(pattern: re.Pattern[str], text: str, offset: int) -> tuple[str, int]:
    found = pattern.match(text, offset)
    if found is None:
        raise ValueError(f"no name or value at character {offset} of a tool call")
    return found.group(), found.end()


def _skipped(pattern: re.Pattern[str], text: str, offset: int) -> int:
    """The offset after a match that may be empty."""
    found = pattern.match(text, offset)
    return offset if found is None else found.end()


def _expect(text: str, offset: int, mark: str) -> int:
    """The offset after `mark` and the spaces around it. Raises ValueError if it is not there."""
    offset = _skipped(SPACE, text, offset)
    if not text.startswith(mark, offset):
        raise ValueError(f"no {mark!r} at character {offset} of a tool call")
    return _skipped(SPACE, text, offset + len(mark))


def _name(text: str, offset: int) -> tuple[str, int]:
    return _matched(NAME, text, offset)


def _python_call(text: str, offset: int) -> tuple[dict[str, Any], int]:
    name, offset = _name(text, offset)
    offset = _expect(text, offset, "(")
    arguments: list[tuple[str, object]] = []

    def argument(offset: int) -> int:
        key, offset = _name(text, offset)
        value, offset = _value(text, _expect(text, offset, "="), 0)
        arguments.append((key, value))
        return offset

    offset = _listed(text, offset, ")", argument)
    return {"function": {"name": name, "arguments": _entries(arguments)}}, offset


def _listed(text: str, offset: int, end: str, item: Callable[[int], int]) -> int:
    """The offset after `end`. `item` reads each thing of the list before it."""
    offset = _skipped(SPACE, text, offset)
    while not text.startswith(end, offset):
        offset = _skipped(SPACE, text, item(offset))
        if not text.startswith(end, offset):
            offset = _expect(text, offset, ",")
    return offset + len(end)


def _value(
    text: str, offset: int, depth: int, after: re.Pattern[str] = AFTER_TEXT
) -> tuple[Any, int]:
    """The literal that begins at `offset`, and the offset after it.

    Args:
        after: what follows the end of a text.
    """
    if depth > DEEPEST:
        raise ValueError("the arguments of a tool call are nested too deeply")
    first = text[offset : offset + 1]
    if first in ("'", '"'):
        return _text(text, offset, after)
    if first in ("[", "("):
        items: list[object] = []

        def item(offset: int) -> int:
            value, offset = _value(text, offset, depth + 1, after)
            items.append(value)
            return offset

        return items, _listed(text, offset + 1, "]" if first == "[" else ")", item)
    if first == "{":
        entries: list[tuple[str, object]] = []

        def entry(offset: int) -> int:
            key, offset = _text(text, offset, EVERY)
            value, offset = _value(text, _expect(text, offset, ":"), depth + 1, after)
            entries.append((key, value))
            return offset

        offset = _listed(text, offset + 1, "}", entry)
        return _entries(entries), offset
    if found := NUMBER.match(text, offset):
        number = found.group()
        return (int(number) if number.lstrip("-").isdigit() else float(number)), found.end()
    word, end = _name(text, offset)
    if word not in WORDS:
        raise ValueError(f"{word!r} is no value of a tool call")
    return WORDS[word], end


def _text(text: str, offset: int, after: re.Pattern[str]) -> tuple[str, int]:
    """The text in quotes that begins at `offset`, and the offset after it. Raises ValueError if it
    may be two arguments, one of them without its quote."""
    mark = next((mark for mark in ("'''", '"""', "'", '"') if text.startswith(mark, offset)), None)
    if mark is None:
        raise ValueError(f"no text at character {offset} of a tool call")
    begin = end = offset + len(mark)
    inner = False
    while not (text.startswith(mark, end) and after.match(text, end + len(mark))):
        inner |= text.startswith(mark, end)
        end += 2 if text[end] == "\\" and end + 1 < len(text) else 1
        if end >= len(text):
            raise ValueError("a text of a tool call without an end")
    if inner and NEXT_ARGUMENT.search(text, begin, end):
        raise ValueError("a text of a tool call without an end")
    return ESCAPE.sub(_unescaped, text[begin:end]), end + len(mark)


def _unescaped(found: re.Match[str]) -> str:
    mark = found.group()[1:]
    if mark[0] in "xuU" and len(mark) > 1:
        return chr(int(mark[1:], 16))
    return ESCAPED.get(mark, mark)
