"""A fake of what answers chats in an environment."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncrl.sessions.answers import Answer, ChatRequest, ContextTooLongError

Chat = Sequence[Mapping[str, object]]


class FakeChatSession:
    """A `ChatSession` that answers with the messages of a function or of a list, and keeps the
    requests. A text stands for a message with this text.

    Args:
        answers: the answer to a chat, or the answers in their order.
        most_messages: a longer chat has no room for an answer.
    """

    def __init__(
        self, answers: Callable[[Chat], object] | Sequence[object], most_messages: int = 1000
    ) -> None:
        self._answers, self._most = answers, most_messages
        self.requests: list[tuple[Chat, Sequence[Mapping[str, object]] | None]] = []
        """The messages and the tools of each request."""

    async def chat(self, request: ChatRequest) -> list[Answer]:
        messages, n = request.messages, request.n
        if len(messages) > self._most:
            raise ContextTooLongError(f"{len(messages)} messages are too many")
        turn = len(self.requests)
        self.requests.append((list(messages), request.tools))
        given: Any = (
            self._answers(messages) if callable(self._answers) else list(self._answers)[turn]
        )
        message = {"role": "assistant", "content": given} if isinstance(given, str) else given
        return [Answer(message, "stop", 1, 1, turn * n + index) for index in range(n)]


def tool_call(name: str, arguments: object, call_id: str = "call_0") -> dict[str, object]:
    """A message with one tool call.

    Args:
        arguments: as values, or as a text that may be no JSON.
    """
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    function = {"name": name, "arguments": written}
    call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}
