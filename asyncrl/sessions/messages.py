"""Compares the chats of requests: which of them begin with the messages of an earlier one."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence

__all__ = ["chat_digests", "same_message"]

UNREAD = ("annotations", "audio", "cache_control", "function_call", "reasoning_content", "refusal")
"""Fields of a message that clients leave out, or add, when they send an answer back. `reasoning`
is another name of `reasoning_content`."""
BYTES = 16
"""Bytes of a digest. Chats of one session collide with a probability below 1e-30."""


def chat_digests(messages: Sequence[Mapping[str, object]], head: object = None) -> list[bytes]:
    """The digests of a chat's beginnings: of the first message, of the first two, and so on. Two
    chats have the same digest where they begin with the same messages.

    Two messages are the same if they have the same role, text, tool calls, `tool_call_id` and
    `name`. A client may write an answer in its own way when it sends it back: text as a list of
    parts, arguments of tools with other spaces, null fields, without reasoning.

    Args:
        head: what the template writes before the messages, such as the tools. It must be JSON.
    """
    digest = _digest(b"", head)
    digests = []
    for message in messages:
        digest = _digest(digest, same_message(message))
        digests.append(digest)
    return digests


def same_message(message: Mapping[str, object]) -> dict[str, object]:
    """The message in the form in which two messages that are the same are equal."""
    kept: dict[str, object] = {
        name: value
        for name, value in message.items()
        if value is not None and name not in (*UNREAD, "reasoning", "content", "tool_calls")
    }
    text = _text(message.get("content"))
    if message.get("role") == "assistant" and isinstance(text, str):
        text = text.strip()  # parsers of reasoning and of tool calls leave line ends or remove them
    kept["content"] = text
    calls = message.get("tool_calls")
    if isinstance(calls, Sequence) and calls:
        kept["tool_calls"] = [_call(call) for call in calls]
    return kept


def _text(content: object) -> object:
    """The text of a message's content. Content with other parts than text stays as it is."""
    if content is None:
        return ""
    if isinstance(content, str) or not isinstance(content, Sequence):
        return content
    texts = [
        part.get("text")
        for part in content
        if isinstance(part, Mapping) and part.get("type") == "text"
    ]
    if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
        return "".join(str(text) for text in texts)
    return [
        {name: value for name, value in part.items() if name != "cache_control"}
        if isinstance(part, Mapping)
        else part
        for part in content
    ]


def _call(call: object) -> object:
    """A tool call whose arguments are values, not JSON text."""
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments)
    return {"id": call.get("id"), "name": function.get("name"), "arguments": arguments}


def _digest(before: bytes, value: object) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.blake2b(before + text.encode(), digest_size=BYTES).digest()
