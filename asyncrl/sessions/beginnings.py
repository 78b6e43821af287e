"""Tells a chat that another agent of the session begins from one that its agent has rewritten."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from asyncrl.sessions.chat_digests import chat_digests, message_digest


class Beginnings:
    """The chats of one session that continue none of its turns."""

    def __init__(self) -> None:
        self._answers: set[bytes] = set()
        """What the model has said."""
        self._texts: set[str] = set()
        """What the model has said, as texts for prompts."""
        self._given: set[bytes] = set()
        """Other messages of an assistant in these chats, such as examples."""
        self._systems: set[bytes] = set()
        self._tools: set[bytes] = set()
        self._firsts: set[bytes] = set()
        """System messages, tools, and first messages of these chats."""

    def said(self, message: Mapping[str, object]) -> None:
        """Note an answer of the model."""
        self._answers.add(message_digest(message))
        if text := str(message.get("content") or "").strip():
            self._texts.add(text)

    def is_separate(self, messages: Sequence[Mapping[str, object]], tools: object) -> bool:
        """Whether a chat that continues no turn is one of its own, and not a rewritten one.

        Either it has no answer of this session, or both its system messages and its tools are new,
        as after a handoff. A chat that begins as another one and has other answers counts as
        rewritten: its agent has changed the answers.
        """
        system = message_digest(
            {"content": [one.get("content") for one in messages if one.get("role") == "system"]}
        )
        (head,), (first,) = chat_digests([{}], tools), chat_digests(messages[:1])
        answers = {message_digest(one) for one in messages if one.get("role") == "assistant"}
        answers -= self._given
        another = system not in self._systems and head not in self._tools
        own = not answers & self._answers and not (answers and first in self._firsts)
        if own:
            self._given |= answers
        self._systems.add(system)
        self._tools.add(head)
        self._firsts.add(first)
        return another or own

    def is_separate_text(self, prompt: str) -> bool:
        """Whether a text to continue begins a chat of its own."""
        return not any(text in prompt for text in self._texts)
