"""What to record of an exception that nobody foresaw."""

from __future__ import annotations

import traceback

from asyncrl.contracts.outcomes import UNFORESEEN
from asyncrl.runtime.functions import short

__all__ = [
    "CAUSE_LENGTH",
    "STACK_LENGTH",
    "unforeseen",
]

CAUSE_LENGTH = 300
"""Characters of an error's message that a reason repeats."""
STACK_LENGTH = 20_000
"""Characters of a stack that are kept: an error's message may be of any length."""


def unforeseen(what: str, error: BaseException) -> str:
    """What to say of an exception that nobody foresaw: a line that begins with UNFORESEEN, then the
    stack."""
    cause = short(" ".join(str(error).split()), CAUSE_LENGTH)
    return (
        f"{UNFORESEEN}{what}: {type(error).__name__}:"
        f" {cause}\n{short(''.join(traceback.format_exception(error)), STACK_LENGTH)}"
    )
