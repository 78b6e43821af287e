"""What a session answers to its agent. Imports nothing heavy: environment processes need it."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.text.template import Message

__all__ = ["Answer", "ContextTooLongError", "SessionClosedError"]


class SessionClosedError(RuntimeError):
    """A request came after the end of its session. The message says why it ended."""


class ContextTooLongError(ValueError):
    """A request leaves no room for a token of its answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A turn, as the agent gets it."""

    message: Message
    finish_reason: str
    completion_tokens: int
    prompt_tokens: int
    """Tokens before it."""
    node: int
    """Its index among the session's nodes."""
