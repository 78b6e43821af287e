"""Messages of chats as clients send them, and as chat templates read them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TypeGuard

Message = Mapping[str, object]
"""A chat message, with `role` and `content`."""
Schema = Mapping[str, object]
"""JSON schema of a function that the model may call."""
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Names of a message's reasoning."""
TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of the parts of a content that are text."""
CACHE_MARKS = ("cache_control", "prompt_cache_breakpoint")
"""Fields that mark where a prompt could be cached. They change no answer."""


class MessagesError(ValueError):
    """The template refuses a chat, or a variable is not one of a template. The message is one
    line."""


def plain_text(content: object) -> object:
    """The text of a message's content: text parts, joined with line breaks. None is the empty text.
    Content with other parts stays as it is."""
    if content is None:
        return ""
    if isinstance(content, str) or not isinstance(content, Sequence):
        return content
    texts = [
        part["text"]
        for part in content
        if isinstance(part, Mapping)
        and part.get("type") in TEXT_PARTS
        and isinstance(part.get("text"), str)
    ]
    if len(texts) == len(content):
        return "\n".join(texts)
    return [
        {name: value for name, value in part.items() if name not in CACHE_MARKS}
        if isinstance(part, Mapping)
        else part
        for part in content
    ]


def argument_values(arguments: object) -> object:
    """The arguments of a tool call as values. Clients send them as JSON text; what is not JSON
    stays text, and an empty text means that there are none."""
    if not isinstance(arguments, str):
        return arguments
    if not arguments.strip():
        return {}
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def template_messages(
    messages: Sequence[Mapping[str, object]], values: bool = True, reasoning: Sequence[str] = ()
) -> list[dict[str, object]]:
    """The messages as chat templates read them: text instead of parts, and no empty list of tool
    calls.

    Args:
        values: whether the arguments of tool calls are values. A few templates need JSON text.
        reasoning: names under which the template reads a message's reasoning. Empty: it stays
            under the names that the message has.
    """
    return [_template_message(message, values, reasoning) for message in messages]


def _template_message(
    message: Mapping[str, object], values: bool, reasoning: Sequence[str]
) -> dict[str, object]:
    kept = {**message, "content": plain_text(message.get("content"))}
    thought = next((message[name] for name in REASONING_FIELDS if message.get(name)), None)
    if reasoning and thought is not None:
        kept = {name: value for name, value in kept.items() if name not in REASONING_FIELDS}
        kept |= dict.fromkeys(reasoning, thought)
    calls = kept.pop("tool_calls", None)
    if isinstance(calls, Sequence) and not isinstance(calls, str) and calls:
        kept["tool_calls"] = [_template_call(call, values) for call in calls]
    return kept


def _template_call(call: object, values: bool) -> object:
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        return call
    arguments = argument_values(function.get("arguments"))
    if not values and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _call_values(messages: Sequence[Mapping[str, object]]) -> list[object]:
    """The arguments of all tool calls as values: JSON text can hide half of a surrogate pair."""
    calls = [call for message in messages for call in message.get("tool_calls") or ()]  # type: ignore[attr-defined]
    functions = [call.get("function") for call in calls if isinstance(call, Mapping)]
    return [argument_values(one.get("arguments")) for one in functions if isinstance(one, Mapping)]


def refuse_unencodable(
    messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]] | None
) -> None:
    """Raise MessagesError for text that no tokenizer reads: surrogates, as of file names that are
    not UTF-8."""
    try:
        json.dumps(
            [messages, tools, _call_values(messages)], ensure_ascii=False, default=str
        ).encode()
    except (UnicodeEncodeError, RecursionError, ValueError) as error:
        raise MessagesError(f"the messages are no text: {error}") from None


def are_messages(value: object) -> TypeGuard[list[Message]]:
    """Whether the value is a list of messages, with at least one."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(message, Mapping)
            and isinstance(message.get("role"), str)
            and ("content" in message or "tool_calls" in message)
            for message in value
        )
    )
