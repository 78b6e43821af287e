"""Messages of dataset rows, in the forms of public sets, as messages of a chat.

| in a row | becomes |
|---|---|
| JSON text of messages | the messages |
| `from` and `value` | `role` and `content` |
| roles such as human, gpt and model | user and assistant |
| the role function_call, or the key `function_call` | `tool_calls` |
| a content of text parts | one text |
| a key with the value null | absent |

A mark says whether a turn is trained, such as OpenAI's `weight`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from asyncrl.text.call_texts import python_value
from asyncrl.text.chat_messages import TEXT_PARTS, MessagesError, argument_values

Mark = tuple[str, bool]
"""A key that says whether a turn is trained, and what it says."""
MARKS: Final[Mapping[str, bool]] = {
    "weight": True,
    "train": True,
    "training": True,
    "trainable": True,
    "is_trainable": True,
    "trained": True,
    "train_on_turn": True,
    "loss": True,
    "loss_mask": True,
    "loss_weight": True,
    "step_loss_mask": True,
    "masked": False,
    "ignore_loss": False,
    "no_loss": False,
}
"""Key of a message → whether 1 means that the turn is trained. They are those of OpenAI, axolotl,
verl, slime and ms-swift, and their kin."""
MARKED_PARTS: Final = ("train_detail", "training_detail")
"""axolotl's keys for characters that are trained, which no mark of a turn can say."""
MEDIA_COLUMNS: Final = (
    "image", "images", "audio", "audios", "video", "videos", "pixel_values", "multi_modal_data",
)  # fmt: skip
"""Columns with what a placeholder in the text stands for. Only text reaches the model."""
TEXT_COLUMNS: Final = ("system", "system_prompt", "history", "functions")
"""Columns in which public sets keep a part of the chat."""
ALPACA: Final = {"instruction": "input", "input": "instruction"}
"""A column with a part of a prompt → the column with its other part."""

ROLES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(
        ("gpt", "chatgpt", "model", "bot", "chatbot", "ai", "bing", "bard", "claude", "llm"),
        "assistant",
    ),
    **dict.fromkeys(("tool_response", "tool_result", "function_response"), "tool"),
}
"""Role of public sets → the role that it means. Others stay, in small letters."""
CALL_ROLES: Final = ("function_call", "tool_call", "tool_calls")
"""Roles of a message whose content is a tool call as JSON."""
ROLE_KEYS: Final = (("role", "content"), ("from", "value"))
SAYS: Final = ("content", "value", "tool_calls", "function_call")
"""Keys of what a message says."""
WRAPPERS: Final = ("messages", "conversations", "conversation")
"""Keys of an object around the messages of a chat."""
KNOWN: Final = frozenset(
    {*ROLES, *CALL_ROLES, "user", "assistant", "system", "tool", "developer", "function"}
    | {"observation", "ipython"}
)
"""Roles by which JSON is recognized as a chat. Other JSON with such keys is text."""
CHAT_START: Final = re.compile(
    r"""(?:[\s"[]|\\+["nrt])*\{(?:\s|\\+[nrt])*\\*["']\w{1,32}\\*["']\s*:"""
)
"""How a text begins that may be a chat, or one message. Either may be JSON inside JSON."""
LIST_START: Final = re.compile(r"""\[\s*\{\s*["'](?:role|content|from|value)["']\s*:""")
"""How a text begins that is taken for a chat although it is no JSON, if it soon names a role."""
NAMED_SOON: Final = 200
"""Characters within which it names one."""
BYTE_ORDER_MARK: Final = "\ufeff"
NAMED_ROLE: Final = re.compile(
    rf"""["'](role|from)["']\s*:\s*["']({"|".join(sorted(KNOWN))})["']""", re.IGNORECASE
)
TRUE: Final = {"1": True, "1.0": True, "true": True, "0": False, "0.0": False, "false": False}


class UnusedError(MessagesError):
    """A key or a part of a chat does not reach the text."""


class MarkError(MessagesError):
    """A mark does not say whether a whole turn is trained."""


def chat_value(value: object) -> object:
    """A row's value: messages instead of JSON text of them, or of one message. Other values stay.

    Raises:
        MessagesError: the text is a chat that JSON cannot read, or one within another object.
    """
    if not isinstance(value, str):
        return [value] if isinstance(value, Mapping) and _is_message(value) else value
    text = _trimmed(value)
    if CHAT_START.match(text) is None:
        return value
    try:
        found = _decoded(text)
    except (ValueError, RecursionError):
        if not _is_broken_chat(text):
            return value
        raise MessagesError(
            f"{value[:60]!r} begins like a chat, and is not JSON; write the chat as JSON, or as a"
            " list of messages"
        ) from None
    inner = found if isinstance(found, list) else [found]
    if inner and all(_is_message(item, known=True) for item in inner):
        return inner
    for key in WRAPPERS:
        within = found.get(key) if isinstance(found, Mapping) else None
        if isinstance(within, list) and within and _is_message(within[0], known=True):
            raise MessagesError(
                f"{value[:60]!r} is JSON with a chat under {key!r}; put its messages into the"
                " column"
            )
    return value


def _trimmed(text: str) -> str:
    return text.strip().strip(BYTE_ORDER_MARK).strip()


def _decoded(text: str) -> object:
    """The value of JSON text, also if that or its items are JSON text again. Raises ValueError."""
    found = json.loads(text)
    if isinstance(found, str) and CHAT_START.match(inner := _trimmed(found)):
        return _decoded(inner)
    items = found if isinstance(found, list) else []
    if items and all(isinstance(item, str) and CHAT_START.match(item) for item in items):
        return [json.loads(item) for item in items]
    return found


def _is_broken_chat(text: str) -> bool:
    """Whether a text that is no JSON begins a list of messages, and has nothing after it."""
    if text.startswith('"'):  # JSON inside JSON
        text = text[1:].replace('\\"', '"')
    if LIST_START.match(text) is None or NAMED_ROLE.search(text, 0, NAMED_SOON) is None:
        return False
    for read in (json.JSONDecoder().raw_decode, python_value):
        try:
            return not text[read(text, 0)[1] :].strip()
        except (ValueError, IndexError, RecursionError):
            continue
    return True


def _is_message(item: object, known: bool = False) -> bool:
    """Whether a value is a message; with `known`: of a known role, and with what it says."""
    if not isinstance(item, Mapping):
        return False
    role = next((item[key] for key, _ in ROLE_KEYS if key in item), None)
    says = not known or any(key in item for key in SAYS)
    return isinstance(role, str) and says and (not known or role.strip().lower() in KNOWN)


def row_messages(value: object, dropped: Counter[str] | None = None) -> object:
    """The messages of a row as messages of a chat. A value that is no list of messages stays.

    Args:
        dropped: counts the parts that are left out; None: they are refused.

    Raises:
        UnusedError: a part is no text, or has a key besides its text.
        MessagesError: a message cannot be read.
    """
    if not isinstance(value, list) or not value or not all(map(_is_message, value)):
        return value
    return [_message(message, index, dropped) for index, message in enumerate(value)]


def _message(
    given: Mapping[str, object], index: int, dropped: Counter[str] | None
) -> dict[str, object]:
    message = {key: item for key, item in given.items() if item is not None or key == "content"}
    if "role" not in message:
        if "content" not in message and "value" in message:
            message["content"] = message.pop("value")
        message = {"role": message.pop("from"), **message}
    role = str(message["role"]).strip().lower()
    message["role"] = ROLES.get(role, role)
    if role in CALL_ROLES:
        calls = _calls(message.get("content"), index)
        message |= {"role": "assistant", "content": "", "tool_calls": calls}
    if legacy := message.pop("function_call", None):
        if message.get("tool_calls"):
            raise MessagesError(
                f"message {index} has both tool_calls and function_call; leave one out"
            )
        message["tool_calls"] = _calls(legacy, index)
    if "tool_calls" in message:
        message["tool_calls"] = _call_list(message["tool_calls"], index)
    if "content" in message:
        parts = message["content"]
        message["content"] = _text(parts, index, dropped)
        others = [item for key, item in message.items() if key not in ("role", "content", *MARKS)]
        if not message["content"] and not any(others):
            _refuse_silent(parts, index)
    return message


def _refuse_silent(content: object, index: int) -> None:
    """Refuse a message that says nothing: a turn of the model would only end. The empty text is
    allowed."""
    if content is None:
        raise MessagesError(f"message {index} has no content; write its text, or leave it out")
    if isinstance(content, list) and content:
        raise UnusedError(f"message {index} has no part that is text; leave the row out")


def _call_list(given: object, index: int) -> object:
    """The value of `tool_calls`, which may be JSON text, as a list. The arguments of each call must
    be an object, or JSON text of one."""
    calls = given
    if isinstance(given, str):
        try:
            calls = json.loads(given or "[]") or []
        except (ValueError, RecursionError):
            calls = None
    calls = [calls] if isinstance(calls, Mapping) else calls
    if not isinstance(calls, list):
        raise MessagesError(
            f"message {index} has the tool_calls {str(given)[:80]!r}; give a list of calls, or JSON"
            " of one"
        )
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if arguments is not None and not isinstance(argument_values(arguments), Mapping):
            raise MessagesError(
                f"message {index} has a call with the arguments {str(arguments)[:80]!r}, which are"
                " no JSON object; correct them, or leave the row out"
            )
    return calls


def _calls(given: object, index: int) -> list[dict[str, object]]:
    """Tool calls from one call, or a list of calls, with name and arguments. They may be JSON."""
    try:
        value = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        value = None
    calls = value if isinstance(value, list) else [value]
    functions = [
        call.get("function", call) if isinstance(call, Mapping) else None for call in calls
    ]
    found: list[dict[str, object]] = []
    for function in functions:
        named = isinstance(function, Mapping) and isinstance(function.get("name"), str)
        rest = set(function) - {"name"} if isinstance(function, Mapping) else set()
        if not named or len(rest) > 1 or not rest <= {"arguments", "parameters"}:
            raise MessagesError(
                f"message {index} has the function call {str(given)[:80]!r}; give JSON with name"
                " and arguments"
            )
        assert isinstance(function, Mapping)
        arguments = argument_values(function[rest.pop()]) if rest else {}
        call = {"name": function["name"], "arguments": arguments}
        found.append({"type": "function", "function": call})
    return found


def _text(content: object, index: int, dropped: Counter[str] | None) -> object:
    """The text of a content: text parts, joined with line breaks."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise MessagesError(
            f"message {index} has the content {str(content)[:60]!r}; give text, or a list of text"
            " parts"
        )
    texts = []
    for part in content:
        if not isinstance(part, Mapping):
            raise MessagesError(
                f"message {index} has the part {str(part)[:60]!r}; give parts with type and text"
            )
        part = {key: item for key, item in part.items() if item is not None}
        kind = part.get("type", "text" if "text" in part else next(iter(part), "of no kind"))
        text = part.get("text")
        if kind not in TEXT_PARTS or not isinstance(text, str):
            _unused(f"a part of type {kind!r}", index, dropped)
            continue
        texts.append(text)
        for key, item in part.items():
            if key not in ("type", "text", "cache_control") and item not in ("", [], {}, False):
                _unused(f"a text part with {key!r}", index, dropped)
    return "\n".join(texts)


def _unused(what: str, index: int, dropped: Counter[str] | None) -> None:
    """Count a part that is left out, or refuse it."""
    if dropped is None:
        raise UnusedError(
            f"message {index} has {what}, and only text reaches the model; write it as text, or"
            " set data.unused_keys: drop"
        )
    dropped[what] += 1


def without_marks(
    messages: Sequence[Mapping[str, object]],
) -> tuple[list[Mapping[str, object]], dict[int, Mark]]:
    """The messages without marks, and the marks by the message's index.

    Raises:
        MarkError: a mark is neither 0 nor 1, marks contradict each other, or one is of
            characters.
    """
    marks = {
        index: mark
        for index, message in enumerate(messages)
        if (mark := _mark(message, index)) is not None
    }
    plain: list[Mapping[str, object]] = [
        {key: item for key, item in message.items() if key not in MARKS}
        if index in marks
        else message
        for index, message in enumerate(messages)
    ]
    return plain, marks


def _mark(message: Mapping[str, object], index: int) -> Mark | None:
    found: list[Mark] = []
    if len(message) <= 2:  # only role and content
        return None
    for key in MARKED_PARTS:
        if message.get(key):
            raise MarkError(
                f"message {index} has {key!r}, which marks characters; asyncrl trains whole turns:"
                " remove it, or split the turn into messages"
            )
    for key, trained in MARKS.items():
        if key not in message:
            continue
        given = TRUE.get(str(message[key]).strip().lower())
        if given is None:
            raise MarkError(
                f"message {index} has {key} = {repr(message[key])[:40]}; a turn is trained or not:"
                " write 1 or 0"
            )
        found.append((key, given == trained))
    if len({trains for _, trains in found}) > 1:
        names = " and ".join(key for key, _ in found)
        raise MarkError(f"message {index} has {names}, which contradict each other")
    return found[0] if found else None
