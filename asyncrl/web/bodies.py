"""Values that clients write in more than one way in a JSON body."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import BeforeValidator


def whole(value: object) -> object:
    """1 for 1.0, which is the same number in JSON."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole: TypeAlias = Annotated[int, BeforeValidator(whole)]
"""A whole number, which a client may write as 1.0."""
