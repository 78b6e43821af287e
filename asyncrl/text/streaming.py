"""A completion's text while its tokens still come: the parts put together are the text that the
whole completion has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrl.text.stops import text_before
from asyncrl.text.tokenizer import decode

__all__ = ["TextStream"]

UNFINISHED = "\ufffd"
"""What a decoder writes for a character of which some bytes are still to come."""


class TextStream:
    """Text of tokens that come in pieces. It keeps back unfinished characters, and whatever may
    become a stop string."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._ids: list[int] = []
        self._window = self._read = 0
        """Tokens before `_read` have been read. Decoding begins at `_window`, since a token's text
        may depend on the one before it."""
        self._held = ""
        """Text that was read and may begin a stop string."""
        self._told = 0
        """Characters that were given."""
        self._stopped = False

    @property
    def tokens(self) -> int:
        """Tokens so far."""
        return len(self._ids)

    def add(self, ids: Sequence[int], last: bool = False) -> str:
        """The text that these tokens add; with `last` all that is left."""
        self._ids += ids
        if last:
            return text_before(decode(self._tokenizer, self._ids), self._stops)[self._told :]
        self._held += self._read_more()
        text = self._settled()
        self._told += len(text)
        return text

    def _read_more(self) -> str:
        before = decode(self._tokenizer, self._ids[self._window : self._read])
        after = decode(self._tokenizer, self._ids[self._window :])
        if after.endswith(UNFINISHED) or len(after) <= len(before):
            return ""
        self._window, self._read = self._read, len(self._ids)
        return after[len(before) :]

    def _settled(self) -> str:
        """Takes from `_held` what no further token can change."""
        if self._stopped:
            return ""
        text = text_before(self._held, self._stops)
        self._stopped = len(text) < len(self._held)
        kept = 0 if self._stopped else self._may_begin_a_stop()
        text, self._held = text[: len(text) - kept], self._held[len(self._held) - kept :]
        return text

    def _may_begin_a_stop(self) -> int:
        """Characters at the end of `_held` that some stop string begins with."""
        longest = min(max(map(len, self._stops), default=1) - 1, len(self._held))
        return next(
            (
                size
                for size in range(longest, 0, -1)
                if any(stop.startswith(self._held[-size:]) for stop in self._stops)
            ),
            0,
        )
