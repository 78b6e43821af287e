"""Signs of gibberish in completions: a loop of one n-gram, and characters that do not belong in
text. Pure. `asyncrl.observe.alarms` has the healthy ranges."""

from __future__ import annotations

import unicodedata
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
WITHOUT_LINES = dict.fromkeys(map(ord, LINES))


def looping(token_ids: NDArray[np.integer[Any]], starts: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[n] whether each of n completions contains a loop of at least LOOP_TOKENS tokens: LOOP_TIMES
    or more copies in a row of an n-gram. The n-gram has 1 to LOOP_NGRAM tokens.

    Args:
        token_ids: [T] the tokens of all completions, one after the other.
        starts: [n + 1] where each completion begins; the last item is T.
    """
    lengths = np.diff(starts)
    found = np.zeros(len(lengths), bool)
    long = lengths >= LOOP_TOKENS
    if not long.any():
        return found
    owners = np.repeat(np.arange(len(lengths)), lengths)
    kept = long[owners]
    ids, owners = token_ids[kept], owners[kept]
    for n in range(1, LOOP_NGRAM + 1):
        # Over a stretch of s tokens with period n, s - n tokens in a row equal the one n tokens
        # before. No stretch continues into the next completion.
        unequal = np.flatnonzero((ids[n:] != ids[:-n]) | (owners[n:] != owners[:-n]))
        edges = np.concatenate([[-1], unequal, [len(ids) - n]])
        wanted = max(LOOP_TIMES * n, LOOP_TOKENS) - n
        found[owners[edges[:-1][np.diff(edges) > wanted] + 1]] = True
    return found


def unprintable(text: str) -> int:
    """Number of characters that do not belong in text: control characters except line ends and
    tabs, surrogates, private and unassigned characters, and U+FFFD."""
    if REPLACEMENT not in text and text.translate(WITHOUT_LINES).isprintable():
        return 0
    return sum(
        character == REPLACEMENT
        or (character not in LINES and unicodedata.category(character) in NO_TEXT)
        for character in text
    )
