"""Fields that answers have in more than one API."""

from __future__ import annotations

from typing import Literal, overload

MOST_CHOICES = 128
"""Most answers of one HTTP request."""

LEAST = -9999.0
"""Replaces a log-prob of minus infinity, which JSON cannot represent."""


def end_reason(reason: str) -> Literal["stop", "length"]:
    """Why a completion ended, in OpenAI's words.

    Args:
        reason: the engine's finish reason.
    """
    return "stop" if reason == "stop" else "length"


@overload
def finite(logprob: float) -> float: ...
@overload
def finite(logprob: float | None) -> float | None: ...
def finite(logprob: float | None) -> float | None:
    """Replace minus infinity with a number that JSON can represent."""
    return None if logprob is None else max(logprob, LEAST)


def usage(prompt: int, completion: int) -> dict[str, int]:
    """The numbers of tokens of an answer, in the form of OpenAI's completions."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
