"""Whether a tokenizer decodes what it encodes, and which parts of a text it has no token for.

A tokenizer need not cover all of Unicode. It must decode its own tokens: rewards and agents read
completions as text. The texts of a run decide, since the model sees those.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from asyncrl.text.tokenizer import (
    ROUND_TRIP_TEXTS,
    TokenizerError,
    decode_prompt,
    encoded,
    special_tokens,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Coverage", "refuse_another_decoder", "refuse_lossy"]

RARE = ("\U00012000", "\U00013000")
"""Letters of two dead scripts. A tokenizer that gives both one token has it for what it lacks."""
LOST = "\ufffd"
"""What decoding gives for bytes that are no character."""
TRIPS = 256
"""Texts of a file that are decoded again."""
SHOWN, LONGEST_SHOWN = 8, 24
"""Unseen parts of texts that a note lists, and their length in characters."""


@dataclass
class Coverage:
    """What a tokenizer makes of the texts of a file."""

    tokenizer: PreTrainedTokenizerBase
    model: str
    """Value of model.path."""
    texts: int = 0
    unseen_in: int = 0
    """Texts with a part that the tokenizer has no token for."""
    unseen: dict[str, None] = field(default_factory=dict)
    """Such parts, in the order in which they came."""

    def __post_init__(self) -> None:
        self._unknown = unknown_token(self.tokenizer)
        self._special = {
            number: token for token, number in special_tokens(self.tokenizer).items() if token
        }

    def add(self, texts: Sequence[str], ids: Sequence[Sequence[int]]) -> None:
        """Look at texts with their tokens. Special tokens in them are not decoded.

        Raises:
            TokenizerError: the tokenizer does not decode what it encodes.
        """
        for text, row in zip(texts, ids, strict=True):
            self._add(text, row)

    def _add(self, text: str, ids: Sequence[int]) -> None:
        self.texts += 1
        unknown = self._unknown in ids
        if self.texts > TRIPS and not (unknown and len(self.unseen) < SHOWN):
            self.unseen_in += unknown
            return
        parts = [
            part
            for piece in self._between_special(text, ids)
            for part in _unseen(self.tokenizer, self.model, piece, self._unknown)
        ]
        self.unseen_in += unknown or bool(parts)
        self.unseen |= dict.fromkeys(parts)

    def _between_special(self, text: str, ids: Sequence[int]) -> list[str]:
        """The parts of a text between its special tokens."""
        found = [self._special[token] for token in set(ids) if token in self._special]
        if not found:
            return [text]
        longest_first = sorted(found, key=len, reverse=True)
        return list(filter(None, re.split("|".join(map(re.escape, longest_first)), text)))

    def notes(self) -> list[str]:
        """A line about what the model does not see; none if it sees everything."""
        if not self.unseen_in:
            return []
        shown = ", ".join(repr(part[:LONGEST_SHOWN]) for part in list(self.unseen)[:SHOWN])
        more = ", …" if len(self.unseen) > SHOWN else ""
        return [
            f"the tokenizer has no token for parts of {self.unseen_in} of {self.texts} texts, which"
            f" the model does not see: {shown}{more}"
        ]


def refuse_lossy(
    tokenizer: PreTrainedTokenizerBase, model: str, texts: Sequence[str] = ROUND_TRIP_TEXTS
) -> None:
    """Raise TokenizerError if the tokenizer has tokens for one of `texts`, and does not decode
    them to it. A text that it has no tokens for proves nothing."""
    unknown = unknown_token(tokenizer)
    for text in texts:
        _unseen(tokenizer, model, text, unknown)


def refuse_another_decoder(
    tokenizer: PreTrainedTokenizerBase, model: str, other: PreTrainedTokenizerBase
) -> None:
    """Raise TokenizerError unless the engine's tokenizer `other` decodes what `tokenizer` encodes
    as that does."""
    for text in ROUND_TRIP_TEXTS:
        ids = encoded(tokenizer, text)
        ours, theirs = (decode_prompt(one, ids) for one in (tokenizer, other))
        if ours != theirs:
            raise TokenizerError(
                f"model.path = {model!r}: the engine's tokenizer does not decode what the prompts'"
                f" tokenizer encodes: {text!r} comes back as {theirs!r}; give the engine the same"
                " tokenizer.json"
            )


def unknown_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token of everything that the vocabulary lacks; None if there is none. A checkpoint's
    settings need not name it."""
    declared = tokenizer.unk_token_id
    if declared is not None:
        return None if declared == tokenizer.eos_token_id else int(declared)
    first, second = (encoded(tokenizer, letter)[-1:] for letter in RARE)
    return first[0] if first and first == second else None


def _unseen(
    tokenizer: PreTrainedTokenizerBase, model: str, text: str, unknown: int | None
) -> list[str]:
    """The parts of a text without special tokens that the tokenizer has no token for.

    Normalization may change case, accents and spaces. A decoded text must not contain new
    characters. If nothing is lost, it must encode to the same tokens. Raises TokenizerError.
    """
    ids = encoded(tokenizer, text)
    back = decode_prompt(tokenizer, [token for token in ids if token != unknown])
    here, there = _characters(text), _characters(back)
    new, lost = there - here, here - there
    if unknown in ids or lost or LOST in new:
        wrong = bool(new - {LOST})
    else:
        wrong = bool(new) or encoded(tokenizer, back) != ids
    if wrong:
        raise TokenizerError(
            f"model.path = {model!r}: its tokenizer does not decode what it encodes: {text!r}"
            f" comes back as {back!r}; check pre_tokenizer and decoder in its tokenizer.json"
        )
    if unknown in ids and tokenizer.is_fast:
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        spans = zip(found["input_ids"], found["offset_mapping"], strict=True)
        return [text[first:last] for token, (first, last) in spans if token == unknown]
    return sorted(lost)


def _characters(text: str) -> set[str]:
    """The set of characters, ignoring case, accents and spaces."""
    parts = unicodedata.normalize("NFKD", text.casefold())
    return {one for one in parts if not one.isspace() and not unicodedata.combining(one)}
