"""What the answers of OpenAI's two forms have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from asyncrl.contracts.messages import Piece
from asyncrl.serving.answers import Head
from asyncrl.serving.dialects.fields import Sampling

__all__ = ["Usage", "ending", "envelope", "finite"]

LEAST = -9999.0
"""Written for a log-prob of minus infinity, which JSON does not have."""


class Usage:
    """Tokens of one answer."""

    def __init__(self) -> None:
        self.prompt = self.completion = 0

    def of_prompts(self, prompts: Iterable[Sequence[int]]) -> None:
        self.prompt = sum(map(len, prompts))

    def shown(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
        }

    def in_event(self, body: Sampling) -> dict[str, Any]:
        """What an event says of it before the end."""
        return {"usage": None} if body.stream_options.include_usage else {}

    def last_event(self, body: Sampling, event: dict[str, Any]) -> dict[str, Any] | None:
        """The event that tells it, if it was asked for."""
        return {**event, "usage": self.shown()} if body.stream_options.include_usage else None


def envelope(head: Head, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    """What surrounds choices, in an answer and in an event."""
    return {
        "id": head.name,
        "object": kind,
        "created": head.created,
        "model": head.model.name,
        "choices": choices,
    }


def ending(piece: Piece) -> dict[str, Any]:
    """How a choice ended; nulls before that. Version spans are per token, since weights may change
    under way: half-open, over the completion's tokens."""
    if piece.finish_reason is None:
        return {"finish_reason": None}
    versions = [
        {"version": span.version, "start": span.start, "end": span.end} for span in piece.versions
    ]
    return {
        "finish_reason": "stop" if piece.finish_reason == "stop" else "length",
        "versions": versions,
    }


def finite(logprob: float | None) -> float | None:
    """As JSON can write it."""
    return None if logprob is None else max(logprob, LEAST)
