"""What all prompts of a data set have in common, so that a person is shown what differs."""

from __future__ import annotations

from itertools import takewhile

__all__ = ["SharedText"]

BEFORE = ">:]}|"
AFTER = "<[{|"
"""Beside white space, where the shared beginning may end, and the shared end begin: no word or
number is cut in two."""


class SharedText:
    """The longest beginning and end of all prompts seen so far."""

    def __init__(self) -> None:
        self._first: str | None = None
        self._several = False
        self._start = self._end = ""

    def add(self, prompt: str) -> None:
        """One more prompt of the data."""
        if self._first is None:
            self._first = self._start = self._end = prompt
        self._several |= prompt != self._first
        self._start = _shared(self._start, prompt)
        self._end = _shared(self._end[::-1], prompt[::-1])[::-1]

    def without(self, prompt: str) -> str:
        """The prompt without what all prompts share; whole, as long as there is one prompt
        alone."""
        if not self._several:
            return prompt
        start, end = self._start, self._end
        while start and not (start[-1].isspace() or start[-1] in BEFORE):
            start = start[:-1]
        while end and not (end[0].isspace() or end[0] in AFTER):
            end = end[1:]
        rest = prompt.removeprefix(start).removesuffix(end).strip()
        if not rest or len(rest) == len(prompt):
            return prompt
        return f"{'…' if start.strip() else ''}{rest}{'…' if end.strip() else ''}"


def _shared(one: str, other: str) -> str:
    """The longest beginning of both."""
    return one[
        : sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    ]
