"""Finds the text that all prompts of a data set share, to show a person only what differs."""

from __future__ import annotations

from itertools import takewhile

BEFORE = ">:]}|"
AFTER = "<[{|"
"""The shared text ends after white space or BEFORE, and begins at white space or AFTER. So no word
and no number is cut in two."""


class SharedText:
    """The longest common prefix and suffix of all prompts so far."""

    def __init__(self) -> None:
        self._first: str | None = None
        self._several = False
        self._start = self._end = ""

    def add(self, prompt: str) -> None:
        """Add a prompt of the data."""
        if self._first is None:
            self._first = self._start = self._end = prompt
        self._several |= prompt != self._first
        self._start = _shared(self._start, prompt)
        self._end = _shared(self._end[::-1], prompt[::-1])[::-1]

    def without(self, prompt: str) -> str:
        """The prompt without the text that all prompts share. With only one prompt so far, it is
        returned whole."""
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


def _shared(first: str, second: str) -> str:
    """The longest common prefix."""
    equal = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return first[: sum(1 for _ in equal)]
