"""Built-in rewards. Each follows the contract of `asyncrl.rewards.contract`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["exact_match", "reasoning_gym_score"]  # noqa: F822


def exact_match(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """1.0 where the completion, stripped, equals column `answer`, else 0.0."""
    return [float(completion.strip() == str(expected).strip()) for completion, expected in zip(completions, answer, strict=True)]


def __getattr__(name: str) -> Any:
    """`reasoning_gym_score`, whose package takes seconds to import: paid when a reward process starts, and only if it is named."""
    if name == "reasoning_gym_score":
        from asyncrl.rewards.reasoning import reasoning_gym_score

        return reasoning_gym_score
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
