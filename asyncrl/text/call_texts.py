"""Parses tool calls that transformers' content parsers cannot, or not strictly: several JSON values
in a row, calls in Python's syntax, a tag for each argument, and JSON with bare keys.

The text comes from a model, so nothing of it is ever run. It can also be long and pathological, so
patterns keep what they have matched, and no part of it is read again and again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

__all__ = [
    "Calls",
    "bare_arguments",
    "json_calls",
    "json_or_python_calls",
    "named_calls",
    "python_calls",
    "tagged_arguments",
]

Calls: TypeAlias = list[dict[str, Any]]
"""`{"function": {"name": ..., "arguments": ...}}`, with an `id` if the model wrote one."""
NAMES = ("name", "tool_name")
ARGUMENTS = ("arguments", "parameters")
IDS = ("id", "tool_call_id")
BETWEEN = re.compile(r"[\s;,]*")
HEAD = re.compile(
    r"\s*+(?:\[TOOL_CALLS\]\s*+)?(?P<name>[\w.-]{1,256}+)(?:\[CALL_ID\](?P<id>\w{1,256}+))?"
    r"(?:\[ARGS\])?\s*+(?=\{)"
)
"""What Mistral's models write before the arguments of a call."""
SPACE = re.compile(r"\s*")
NAME = re.compile(r"[A-Za-z_][\w.-]*")
NUMBER = re.compile(r"-?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")
WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
ESCAPE = re.compile(r"\\(?:\n|[\\'\"ntr]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})")
ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "\n": ""}
AFTER_TEXT = re.compile(r"\s*(?:[,)\]}:]|\Z)")
"""What follows the end of a text. Some templates write texts without escapes, so that a quote may
also be a part of one."""
BARE_KEY = re.compile(r"[^\s:,{}\[\]<>\"']{1,256}+")
BARE_VALUE = re.compile(r"[^\n,{}\[\]<>\"]{1,256}+")
DEEPEST = 32
"""Levels of nested values in Python's syntax, or with bare keys."""


def json_calls(text: str) -> Calls:
    """The calls of JSON objects, or lists of them, with anything of `;`, `,` and spaces between.

    Raises:
        ValueError: that is no call.
        RecursionError: the JSON is nested too deeply.
    """
    decoder = json.JSONDecoder()
    calls: Calls = []
    place = _skipped(BETWEEN, text, 0)
    while place < len(text):
        value, place = decoder.raw_decode(text, place)
        calls += [_call(one) for one in (value if isinstance(value, list) else [value])]
        place = _skipped(BETWEEN, text, place)
    return _some(calls)


def named_calls(text: str) -> Calls:
    """The calls of `name[ARGS]{...}`, or of JSON, as Mistral's models write them.

    Raises:
        As `json_calls`.
    """
    if text.lstrip().startswith(("[{", "{")):
        return json_calls(text)
    decoder = json.JSONDecoder()
    calls: Calls = []
    place = 0
    while place < len(text):
        head = HEAD.match(text, place)
        if head is None:
            raise ValueError("no name before the arguments of a tool call")
        arguments, place = decoder.raw_decode(text, head.end())
        identity = {} if head["id"] is None else {"id": head["id"]}
        calls.append({**identity, "function": {"name": head["name"], "arguments": arguments}})
        place = _skipped(BETWEEN, text, place)
    return _some(calls)


def json_or_python_calls(text: str) -> Calls:
    """The calls of JSON, or of `[name(argument=value)]`. Raises as `json_calls`."""
    return (json_calls if text.lstrip().startswith(("[{", "{")) else python_calls)(text)


def python_calls(text: str) -> Calls:
    """The calls of `name(argument=value)`, one or more of them, or a list of them. Values are
    Python's literals, or JSON's.

    Raises:
        ValueError: that is no call, or its values are nested too deeply.
    """
    place = _skipped(SPACE, text, 0)
    listed = text.startswith("[", place)
    place = _skipped(BETWEEN, text, place + listed)
    calls: Calls = []
    while place < len(text) and not (listed and text[place] == "]"):
        call, place = _python_call(text, place)
        calls.append(call)
        place = _skipped(BETWEEN, text, place)
    if listed and text[place:].strip() != "]":
        raise ValueError("a list of tool calls without an end, or with more after it")
    return _some(calls)


def tagged_arguments(text: str, tags: Mapping[str, str]) -> dict[str, str]:
    """The arguments of a call that has a tag for each of them. All of the text must be tags, apart
    from spaces: otherwise a tag without its end would change or hide an argument.

    Args:
        tags: `head`, a pattern from the start of a tag to the start of its value, with the group
            `key`; `mark`, a text in each head; `end`, the text after a value; and `trim`, a text
            that is dropped from the end of a value.

    Raises:
        ValueError: there is anything else.
    """
    head, mark, end = re.compile(tags["head"]), tags["mark"], tags["end"]
    arguments: dict[str, str] = {}
    place = _skipped(SPACE, text, 0)
    while place < len(text):
        found = head.match(text, place)
        last = -1 if found is None else text.find(end, found.end())
        if found is None or last < 0 or text.find(mark, found.end(), last) >= 0:
            raise ValueError(f"no argument in tags at character {place} of a tool call")
        arguments[found["key"]] = text[found.end() : last].removesuffix(tags["trim"])
        place = _skipped(SPACE, text, last + len(end))
    return arguments


def bare_arguments(text: str, marks: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of a call in JSON whose keys have no quotes, as Gemma's models write it. Texts
    are in quotes of their own. A text without quotes is read if it is one line without marks.

    Args:
        marks: `quote`, what is on both sides of a text.

    Raises:
        ValueError: that is no such JSON, or it is nested too deeply.
    """
    value, place = _bare(text, _skipped(SPACE, text, 0), marks["quote"], 0)
    if not isinstance(value, dict) or text[place:].strip():
        raise ValueError("the arguments of a tool call are no object, or more follows")
    return value


def _bare(text: str, place: int, quote: str, depth: int) -> tuple[Any, int]:
    """The value with bare keys that begins at `place`, and the place after it."""
    if depth > DEEPEST:
        raise ValueError("the arguments of a tool call are nested too deeply")
    if text.startswith((quote, '"'), place):
        return _quoted(text, place, quote)
    first = text[place : place + 1]
    if first == "[":
        items: list[object] = []

        def item(place: int) -> int:
            value, place = _bare(text, place, quote, depth + 1)
            items.append(value)
            return place

        return items, _listed(text, place + 1, "]", item)
    if first == "{":
        entries: dict[str, object] = {}

        def entry(place: int) -> int:
            key, place = (
                _quoted(text, place, quote)
                if text.startswith((quote, '"'), place)
                else _matched(BARE_KEY, text, place)
            )
            entries[key], place = _bare(text, _expect(text, place, ":"), quote, depth + 1)
            return place

        return entries, _listed(text, place + 1, "}", entry)
    word, place = _matched(BARE_VALUE, text, place)
    try:
        return json.loads(word), place
    except ValueError:
        return word.strip(), place


def _quoted(text: str, place: int, quote: str) -> tuple[str, int]:
    """The text that begins at `place` with a quote of its own or of JSON, and the place after."""
    if not text.startswith(quote, place):
        value, place = json.JSONDecoder().raw_decode(text, place)
        return str(value), place
    end = text.find(quote, place + len(quote))
    if end < 0:
        raise ValueError("a text of a tool call without an end")
    return text[place + len(quote) : end], end + len(quote)


def _matched(pattern: re.Pattern[str], text: str, place: int) -> tuple[str, int]:
    found = pattern.match(text, place)
    if found is None:
        raise ValueError(f"no name or value at character {place} of a tool call")
    return found.group(), found.end()


def _some(calls: Calls) -> Calls:
    if not calls:
        raise ValueError("no tool call")
    return calls


def _call(value: object) -> dict[str, Any]:
    """A call of a JSON object. Raises ValueError."""
    if not isinstance(value, Mapping):
        raise ValueError("a tool call that is no object")
    function = value["function"] if isinstance(value.get("function"), Mapping) else value
    if len(function) == 1 and not set(NAMES) & set(function):  # {name: arguments}, as Apertus
        ((name, arguments),) = function.items()
        return {"function": {"name": name, "arguments": arguments}}
    name = next((function[key] for key in NAMES if key in function), None)
    arguments = next((function[key] for key in ARGUMENTS if key in function), None)
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    identity = next((value[key] for key in IDS if isinstance(value.get(key), str)), None)
    call = {"function": {"name": name, "arguments": arguments}}
    return call if identity is None else {"id": identity, **call}


def _skipped(pattern: re.Pattern[str], text: str, place: int) -> int:
    """The place after a match that may be empty."""
    found = pattern.match(text, place)
    return place if found is None else found.end()


def _expect(text: str, place: int, mark: str) -> int:
    """The place after `mark` and the spaces around it. Raises ValueError if it is not there."""
    place = _skipped(SPACE, text, place)
    if not text.startswith(mark, place):
        raise ValueError(f"no {mark!r} at character {place} of a tool call")
    return _skipped(SPACE, text, place + len(mark))


def _name(text: str, place: int) -> tuple[str, int]:
    return _matched(NAME, text, place)


def _python_call(text: str, place: int) -> tuple[dict[str, Any], int]:
    name, place = _name(text, place)
    place = _expect(text, place, "(")
    arguments: dict[str, object] = {}

    def argument(place: int) -> int:
        key, place = _name(text, place)
        arguments[key], place = _value(text, _expect(text, place, "="), 0)
        return place

    place = _listed(text, place, ")", argument)
    return {"function": {"name": name, "arguments": arguments}}, place


def _listed(text: str, place: int, end: str, item: Callable[[int], int]) -> int:
    """The place after `end`. `item` reads each thing of the list before it."""
    place = _skipped(SPACE, text, place)
    while not text.startswith(end, place):
        place = _skipped(SPACE, text, item(place))
        if not text.startswith(end, place):
            place = _expect(text, place, ",")
    return place + len(end)


def _value(text: str, place: int, depth: int) -> tuple[Any, int]:
    """The literal that begins at `place`, and the place after it."""
    if depth > DEEPEST:
        raise ValueError("the arguments of a tool call are nested too deeply")
    first = text[place : place + 1]
    if first in ("'", '"'):
        return _text(text, place)
    if first in ("[", "("):
        items: list[object] = []

        def item(place: int) -> int:
            value, place = _value(text, place, depth + 1)
            items.append(value)
            return place

        return items, _listed(text, place + 1, "]" if first == "[" else ")", item)
    if first == "{":
        entries: dict[str, object] = {}

        def entry(place: int) -> int:
            key, place = _text(text, place)
            entries[key], place = _value(text, _expect(text, place, ":"), depth + 1)
            return place

        return entries, _listed(text, place + 1, "}", entry)
    if found := NUMBER.match(text, place):
        number = found.group()
        return (int(number) if number.lstrip("-").isdigit() else float(number)), found.end()
    word, end = _name(text, place)
    if word not in WORDS:
        raise ValueError(f"{word!r} is no value of a tool call")
    return WORDS[word], end


def _text(text: str, place: int) -> tuple[str, int]:
    """The text in quotes that begins at `place`, and the place after it."""
    mark = next((mark for mark in ("'''", '"""', "'", '"') if text.startswith(mark, place)), None)
    if mark is None:
        raise ValueError(f"no text at character {place} of a tool call")
    begin = end = place + len(mark)
    while not (text.startswith(mark, end) and AFTER_TEXT.match(text, end + len(mark))):
        end += 2 if text[end] == "\\" and end + 1 < len(text) else 1
        if end >= len(text):
            raise ValueError("a text of a tool call without an end")
    return ESCAPE.sub(_unescaped, text[begin:end]), end + len(mark)


def _unescaped(found: re.Match[str]) -> str:
    mark = found.group()[1:]
    if mark[0] in "xuU" and len(mark) > 1:
        return chr(int(mark[1:], 16))
    return ESCAPED.get(mark, mark)
