"""Signs of gibberish in one completion: a loop of one n-gram, and characters that do not belong in
text. Pure. docs/how_to/metrics.md lists the healthy ranges."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

import numpy as np

__all__ = ["LOOP_NGRAM", "LOOP_TIMES", "LOOP_TOKENS", "has_loop", "unprintable"]

LOOP_NGRAM = 32
"""Longest n-gram that counts as a loop, in tokens."""
LOOP_TIMES, LOOP_TOKENS = 4, 32
"""A loop is at least LOOP_TIMES copies of an n-gram in a row, and at least LOOP_TOKENS tokens long.
So short answers and rows of dashes do not count."""

REPLACEMENT = "\ufffd"
"""What a tokenizer writes for bytes that are not valid text."""
NO_TEXT = frozenset({"Cc", "Cs", "Co", "Cn"})
"""Unicode categories: control, surrogate, private, unassigned."""
LINES = frozenset("\n\r\t")


def has_loop(token_ids: Sequence[int]) -> bool:
    """Whether the tokens contain a loop of at least LOOP_TOKENS tokens: LOOP_TIMES or more copies
    in a row of an n-gram. The n-gram has 1 to LOOP_NGRAM tokens."""
    ids = np.asarray(token_ids)
    for n in range(1, min(LOOP_NGRAM, len(ids) // LOOP_TIMES) + 1):
        # Over a stretch of s tokens with period n, s - n tokens in a row equal the one n places
        # before.
        wanted = max(LOOP_TIMES * n, LOOP_TOKENS) - n
        unequal = np.concatenate([[0], np.cumsum(ids[n:] != ids[:-n])])
        if len(unequal) > wanted and bool((unequal[wanted:] == unequal[:-wanted]).any()):
            return True
    return False


def unprintable(text: str) -> int:
    """Number of characters that do not belong in text: control characters except line ends and
    tabs, surrogates, private and unassigned characters, and U+FFFD."""
    if REPLACEMENT not in text and text.translate(dict.fromkeys(map(ord, LINES))).isprintable():
        return 0
    return sum(
        character == REPLACEMENT
        or (character not in LINES and unicodedata.category(character) in NO_TEXT)
        for character in text
    )
