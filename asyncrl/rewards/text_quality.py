"""Signs of gibberish in one completion: a loop of one n-gram, characters that no text has. Pure;
docs/how_to/metrics.md has the healthy ranges."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

import numpy as np

__all__ = ["LOOP_NGRAM", "LOOP_TIMES", "LOOP_TOKENS", "has_loop", "unprintable"]

LOOP_NGRAM = 32
"""Longest n-gram that counts as a loop, in tokens."""
LOOP_TIMES, LOOP_TOKENS = 4, 32
"""A loop is an n-gram so many times in a row at least, over so many tokens at least: short answers
and rows of dashes are none."""

REPLACEMENT = "\ufffd"
"""What a tokenizer writes for bytes that are no text."""
NO_TEXT = frozenset({"Cc", "Cs", "Co", "Cn"})
"""Unicode categories: control, surrogate, private, unassigned."""
LINES = frozenset("\n\r\t")


def has_loop(token_ids: Sequence[int]) -> bool:
    """Whether the tokens somewhere hold one n-gram of 1 to LOOP_NGRAM tokens, LOOP_TIMES times in a
    row and over LOOP_TOKENS tokens at least."""
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
    """Characters that no text has: control characters but for line ends and tabs, surrogates,
    private and unassigned ones, U+FFFD."""
    if REPLACEMENT not in text and text.translate(dict.fromkeys(map(ord, LINES))).isprintable():
        return 0
    return sum(
        character == REPLACEMENT
        or (character not in LINES and unicodedata.category(character) in NO_TEXT)
        for character in text
    )
