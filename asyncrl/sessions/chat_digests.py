"""Compares the chats of requests: which of them begin with the messages of an earlier one."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from asyncrl.sessions.answers import ChatRequest
from asyncrl.text.chat_messages import argument_values, plain_text

REASONING = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)
"""Reasoning that a client has as a part of an answer's text."""
BYTES = 16
"""Bytes of a digest. Chats of one session collide with a probability below 1e-30."""


HASH_LENGTH = 16
"""Characters of a request's hash."""


class Chat(NamedTuple):
    """The digests of a chat, and what those of further messages depend on."""

    digests: list[bytes]
    """Digests of the chat's first message, of its first two messages, and so on."""
    ids: dict[object, int]
    """Number of each tool call id."""
    exact: bytes
    """Digest of the whole chat with its reasoning, which the other digests leave out."""
    thoughts: list[str]
    """The reasoning of each message, wherever a client has put it."""

    def with_answer(self, message: Mapping[str, object]) -> tuple[bytes, str]:
        """The digest of the chat with an answer, and the answer's reasoning."""
        return _digest(self.digests[-1], _compared(message, dict(self.ids))), _thought(message)


class ChatDigests:
    """The digests of the chats of one session. A chat that continues the one before it costs only
    its new messages.

    Two chats have the same digest where they begin with the same messages. Two messages are the
    same if they have the same role, text, tool calls and `tool_call_id`. The `name` counts too,
    except an assistant's. Clients add other fields to an answer and send it back in their own
    way: text as a list of parts, arguments with other spaces, without reasoning. They may also give
    tool calls other ids, so ids count by their order in the chat.
    """

    def __init__(self) -> None:
        self._messages = 0
        self._known: bytes | None = None
        """Digest of the messages and the head of the last chat."""
        self._chat = Chat([], {}, b"", [])

    def of(self, messages: Sequence[Mapping[str, object]], head: object = None) -> Chat:
        """The digests of a chat. Its messages must not be changed afterwards.

        Args:
            head: what decides what the template writes around the messages: the tools and all
                variables. It must be JSON.
        """
        known = self._messages
        if not known or self._known is None or _frozen(messages[:known], head) != self._known:
            chat, known = Chat([], {}, b"", []), 0
        else:
            digests, ids, _, thoughts = self._chat
            chat = self._chat._replace(
                digests=list(digests), ids=dict(ids), thoughts=list(thoughts)
            )
        digest, exact = chat.digests[-1] if known else _digest(b"", head), chat.exact
        for message in messages[known:]:
            compared = _compared(message, chat.ids)
            digest = _digest(digest, compared)
            exact = _digest(exact, [digest.hex(), _reasoning(message)])
            chat.digests.append(digest)
            chat.thoughts.append(_thought(message))
        chat = chat._replace(exact=exact)
        self._messages, self._known, self._chat = len(messages), _frozen(messages, head), chat
        return chat


def chat_digests(messages: Sequence[Mapping[str, object]], head: object = None) -> list[bytes]:
    """The digests of the beginnings of one chat, as `ChatDigests.of` gives them."""
    return ChatDigests().of(messages, head).digests


def message_digest(message: Mapping[str, object]) -> bytes:
    """The digest of one message. It leaves out what `ChatDigests` leaves out."""
    return _digest(b"message", _compared(message, {}))


def prompt_digest(prompt: str) -> bytes:
    """The digest of a text to continue. It differs from those of chats."""
    return _digest(b"prompt", prompt)


def request_hash(chat: bytes, request: ChatRequest) -> str:
    """A name of a request. Equal bodies have the same one, in every session and process.

    Args:
        chat: `Chat.exact`, or the digest of the text to continue.
    """
    options = (request.n, request.max_tokens, request.stop, request.schema, request.calls)
    return _digest(chat, [*options, request.logprobs]).hex()[:HASH_LENGTH]


def _frozen(messages: Sequence[Mapping[str, object]], head: object) -> bytes | None:
    """A digest of a chat that tells True from 1; None if it is nested too deep."""
    try:
        text = repr([list(messages), head])
    except RecursionError:
        return None
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=BYTES).digest()


def _thought(message: Mapping[str, object]) -> str:
    """The reasoning of a message, in a field of its own or in its text."""
    for name in ("reasoning", "reasoning_content", "thinking"):
        if isinstance(given := message.get(name), str) and given.strip():
            return given.strip()
    text = plain_text(message.get("content"))
    found = REASONING.match(text) if isinstance(text, str) else None
    if found is None:
        return ""
    return found.group().strip().removeprefix("<think>").removesuffix("</think>").strip()


def _reasoning(message: Mapping[str, object]) -> list[object]:
    """What a message has of reasoning: in fields of its own, and in its text."""
    text = plain_text(message.get("content"))
    found = REASONING.match(text) if isinstance(text, str) else None
    fields = [message.get(name) for name in ("reasoning", "reasoning_content", "thinking")]
    return [*fields, found and found.group()]


def _compared(message: Mapping[str, object], ids: dict[object, int]) -> dict[str, object]:
    """What counts of a message.

    Args:
        ids: the number of each tool call id so far. New ones are added.
    """
    text = plain_text(message.get("content"))
    assistant = message.get("role") == "assistant"
    if assistant and isinstance(text, str):
        # Parsers of reasoning and of tool calls leave line ends or remove them.
        text = REASONING.sub("", text).strip()
    kept: dict[str, object] = {"role": message.get("role"), "content": text or ""}
    if not assistant and message.get("name") is not None:
        kept["name"] = message["name"]
    calls = message.get("tool_calls")
    if isinstance(calls, Sequence) and not isinstance(calls, str) and calls:
        kept["tool_calls"] = [_call(call, ids) for call in calls]
    if (answered := message.get("tool_call_id")) is not None:
        kept["tool_call_id"] = ids.get(str(answered), str(answered))
    return kept


def _call(call: object, ids: dict[object, int]) -> object:
    """What counts of a tool call."""
    if not isinstance(call, Mapping):
        return call
    number = ids.setdefault(str(call.get("id")), len(ids))
    function = call.get("function")
    if not isinstance(function, Mapping):
        return {name: value for name, value in call.items() if name not in ("id", "index")}
    given = argument_values(function.get("arguments"))
    try:
        arguments = _whole_numbers(given)
    except RecursionError:
        arguments = str(function.get("arguments"))
    return {"id": number, "name": function.get("name"), "arguments": arguments}


def _whole_numbers(value: object) -> object:
    """The value with 1 for 1.0, at any depth."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {name: _whole_numbers(item) for name, item in value.items()}
    return [_whole_numbers(item) for item in value] if isinstance(value, list) else value


def _digest(before: bytes, value: object) -> bytes:
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    except (TypeError, ValueError, RecursionError):  # keys of several types, cycles, deep nesting
        text = ascii(type(value))
    return hashlib.blake2b(before + text.encode(), digest_size=BYTES).digest()
