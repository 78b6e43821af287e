"""The learning rate of each policy step."""

from __future__ import annotations

import math
from typing import Literal

__all__ = ["learning_rate_at"]


def learning_rate_at(
    applied: int,
    peak: float,
    warmup_steps: int,
    max_steps: int,
    kind: Literal["constant", "linear", "cosine"],
) -> float:
    """Learning rate of the step after `applied` steps. It rises linearly over `warmup_steps`. Then
    it is constant, or falls to 0 at `max_steps`."""
    warmup = min(1.0, (applied + 1) / max(1, warmup_steps))
    done = max(0.0, min(1.0, (applied - warmup_steps) / max(1, max_steps - warmup_steps)))
    decay = {
        "constant": 1.0,
        "linear": 1.0 - done,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
    }[kind]
    return peak * warmup * decay
