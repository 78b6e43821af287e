"""The parts that the answers of both OpenAI dialects share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from asyncrl.contracts.messages import StreamPiece
from asyncrl.serving.answers import Head
from asyncrl.serving.dialects.fields import Sampling
from asyncrl.web.answers import end_reason, usage


class TokenUsage:
    """Counts the tokens of one answer."""

    def __init__(self) -> None:
        self.prompt = self.completion = 0

    def of_prompts(self, prompts: Iterable[Sequence[int]]) -> None:
        self.prompt = sum(map(len, prompts))

    def shown(self) -> dict[str, int]:
        return usage(self.prompt, self.completion)

    def in_event(self, body: Sampling) -> dict[str, object]:
        """The field of an event before the last: null, if the client wants usage."""
        return {"usage": None} if body.stream_options.include_usage else {}

    def last_event(self, body: Sampling, event: dict[str, object]) -> dict[str, object] | None:
        """The last event, with the counts, if the client wants usage."""
        return {**event, "usage": self.shown()} if body.stream_options.include_usage else None


def envelope(head: Head, kind: str, choices: list[dict[str, object]]) -> dict[str, object]:
    """An answer or event with these choices."""
    return {
        "id": head.name,
        "object": kind,
        "created": head.created,
        "model": head.model.name,
        "choices": choices,
    }


def ending(piece: StreamPiece) -> dict[str, object]:
    """Finish reason and version spans of a choice; a null reason before its end.

    Weights may change during a completion, so each version has a half-open span of the
    completion's tokens.
    """
    if piece.finish_reason is None:
        return {"finish_reason": None}
    versions = [
        {"version": span.version, "start": span.start, "end": span.end} for span in piece.versions
    ]
    return {
        "finish_reason": end_reason(piece.finish_reason),
        "versions": versions,
    }
