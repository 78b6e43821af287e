"""The reward of the control that prefers shorter completions."""

from collections.abc import Sequence


def shorter(completions: Sequence[str], **_: object) -> list[float]:
    """Minus the length of each completion, in characters."""
    return [-float(len(completion)) for completion in completions]
