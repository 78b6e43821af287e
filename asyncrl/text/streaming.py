"""Decodes a completion while its tokens arrive. The parts, joined, equal the whole completion's
text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncrl.text.stops import text_before
from asyncrl.text.tokenizer import decode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"
"""What a decoder writes for a character whose last bytes are missing."""


class TextStream:
    """Decodes tokens that arrive in pieces. It holds back unfinished characters, and any text that
    may be the start of a stop string."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._ids: list[int] = []
        self._window = self._read = 0
        """Tokens before `_read` have been decoded. Decoding starts at `_window`, because a token's
        text may depend on the token before it."""
        self._held = ""
        """Decoded text that has not been returned, because it may be the start of a stop string."""
        self._returned = 0
        """Number of characters that `add` has returned."""
        self._stopped = False

    @property
    def tokens(self) -> int:
        """Number of tokens so far."""
        return len(self._ids)

    def add(self, ids: Sequence[int], last: bool = False) -> str:
        """The text that these tokens add. With `last`, all remaining text."""
        self._ids += ids
        if last:
            return text_before(decode(self._tokenizer, self._ids), self._stops)[self._returned :]
        self._held += self._read_more()
        text = self._settled()
        self._returned += len(text)
        return text

    def _read_more(self) -> str:
        before = decode(self._tokenizer, self._ids[self._window : self._read])
        after = decode(self._tokenizer, self._ids[self._window :])
        if after.endswith(UNFINISHED) or len(after) <= len(before):
            return ""
        self._window, self._read = self._read, len(self._ids)
        return after[len(before) :]

    def _settled(self) -> str:
        """Remove and return the part of `_held` that no further token can change."""
        if self._stopped:
            return ""
        text = text_before(self._held, self._stops)
        self._stopped = len(text) < len(self._held)
        kept = 0 if self._stopped else self._may_begin_a_stop()
        text, self._held = text[: len(text) - kept], self._held[len(self._held) - kept :]
        return text

    def _may_begin_a_stop(self) -> int:
        """Length of the longest end of `_held` that is the start of a stop string."""
        longest = min(max(map(len, self._stops), default=1) - 1, len(self._held))
        return next(
            (
                size
                for size in range(longest, 0, -1)
                if any(stop.startswith(self._held[-size:]) for stop in self._stops)
            ),
            0,
        )
