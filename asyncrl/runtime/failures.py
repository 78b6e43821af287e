"""The recorded text of an unexpected exception."""

from __future__ import annotations

import traceback

from asyncrl.contracts.outcomes import UNFORESEEN
from asyncrl.runtime.functions import short

CAUSE_LENGTH = 300
"""Characters of an error's message that a reason quotes, at most."""
STACK_LENGTH = 20_000
"""Characters of a traceback that are kept, at most. It repeats the message, which has no limit."""


def unforeseen(what: str, error: BaseException) -> str:
    """The record of an unexpected exception: one line with the prefix `UNFORESEEN`, then the
    traceback."""
    cause = short(" ".join(str(error).split()), CAUSE_LENGTH)
    return (
        f"{UNFORESEEN}{what}: {type(error).__name__}:"
        f" {cause}\n{short(''.join(traceback.format_exception(error)), STACK_LENGTH)}"
    )
