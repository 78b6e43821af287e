"""The messages of a session as text, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from asyncrl.text.chat_messages import plain_text


def transcript(messages: Sequence[Mapping[str, object]]) -> str:
    """A line for each message, such as `user: 31..93` and `assistant: guess({"number": 51})`."""
    return "\n".join(_line(message) for message in messages)


def _line(message: Mapping[str, object]) -> str:
    calls = message.get("tool_calls")
    parts = [
        f"({message['reasoning']})" if message.get("reasoning") else "",
        str(plain_text(message.get("content"))),
        *(_call(call) for call in (calls if isinstance(calls, Sequence) else ())),
    ]
    return f"{message.get('role')}: {' '.join(part for part in parts if part)}"


def _call(call: object) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return str(call)
    return f"{function.get('name')}({function.get('arguments')})"
