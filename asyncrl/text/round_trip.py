"""Whether a tokenizer decodes what it encodes, and which parts of a text it has no token for.

A tokenizer need not cover all of Unicode. It must decode its own tokens: rewards and agents read
completions as text. The texts of a run decide, since the model sees those.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from asyncrl.text.tokenizer import (
    ROUND_TRIP_TEXTS,
    TokenizerError,
    decode_prompt,
    encoded,
    special_tokens,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOST = "\ufffd"
"""What decoding gives for bytes that are no character."""
TRIPS = 256
"""Texts of a file that are decoded again."""
SHOWN, LONGEST_SHOWN = 8, 24
"""Parts of texts that a note lists, and their length in characters."""


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
    changed: dict[str, str] = field(default_factory=dict)
    """Character of the first texts → what the normalizer makes of it."""

    def __post_init__(self) -> None:
        self._codec = _Codec(self.tokenizer, self.model)
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
        unknown = self._codec.has_unknown(text, ids)
        if self.texts > TRIPS and not (unknown and len(self.unseen) < SHOWN):
            self.unseen_in += unknown
            return
        trips = [self._codec.trip(piece) for piece in self._between_special(text, ids)]
        self.unseen_in += any(trip.unseen for trip in trips)
        for trip in trips:
            self.unseen |= dict.fromkeys(trip.unseen)
            self.changed |= trip.changed

    def _between_special(self, text: str, ids: Sequence[int]) -> list[str]:
        """The parts of a text between its special tokens."""
        found = [self._special[token] for token in set(ids) if token in self._special]
        if not found:
            return [text]
        longest_first = sorted(found, key=len, reverse=True)
        return list(filter(None, re.split("|".join(map(re.escape, longest_first)), text)))

    def notes(self) -> list[str]:
        """Lines about what the model does not see, or sees as something else."""
        found = []
        if self.unseen_in:
            parts = [repr(part[:LONGEST_SHOWN]) for part in self.unseen]
            found.append(
                f"the tokenizer has no token for parts of {self.unseen_in} of {self.texts} texts,"
                f" which the model does not see: {_some(parts)}"
            )
        if self.changed:
            parts = [
                f"{one!r} as {'something else' if form == one else repr(form)}"
                for one, form in self.changed.items()
            ]
            found.append(
                f"the tokenizer's normalizer changes characters: the model sees {_some(parts)}"
            )
        return found


def _some(parts: Sequence[str]) -> str:
    return ", ".join([*parts[:SHOWN], *(["…"] if len(parts) > SHOWN else [])])


def refuse_lossy(
    tokenizer: PreTrainedTokenizerBase, model: str, texts: Sequence[str] = ROUND_TRIP_TEXTS
) -> None:
    """Raise TokenizerError if the tokenizer has tokens for one of `texts`, and does not decode
    them to it. A text that it has no tokens for proves nothing."""
    codec = _Codec(tokenizer, model)
    for text in texts:
        codec.trip(text)


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


@dataclass(frozen=True, slots=True)
class _Trip:
    """What became of a text that was encoded and decoded."""

    unseen: list[str]
    """Parts without a token."""
    changed: dict[str, str]
    """Character → what the normalizer makes of it."""


class _Codec:
    """Encodes and decodes texts without special tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model: str) -> None:
        self._tokenizer, self._model = tokenizer, model
        self._unknown = unknown_token(tokenizer)
        written = [] if self._unknown is None else [self._unknown]
        self._unknown_text = decode_prompt(tokenizer, written).strip()
        # Some normalizers write a space as a letter.
        apart, joined = (Counter(self._normal(text)) for text in ("x x", "xx"))
        self._space = "".join(apart - joined)

    def has_unknown(self, text: str, ids: Sequence[int]) -> bool:
        """Whether a part of a text became the unknown token. That may also be a character of texts,
        or what begins or ends them."""
        if self._unknown not in ids:
            return False
        own = text.count(self._unknown_text) if self._unknown_text else 0
        around = [self._tokenizer.bos_token_id, self._tokenizer.eos_token_id]
        lacking = sum(token == self._unknown for token in ids)
        return lacking > own + around.count(self._unknown)

    def trip(self, text: str) -> _Trip:
        """Encode and decode a text. Case, accents and spaces may change.

        The decoded text must contain only characters of the text, or what the normalizer makes of
        them. If nothing is unseen, it must encode to the same tokens. Raises TokenizerError.
        """
        ids = encoded(self._tokenizer, text)
        known, parts = self._without_unknown(text, ids)
        back = decode_prompt(self._tokenizer, known)
        here, there, form = _characters(text), _characters(back), self._form(text)
        lost = [one for one in dict.fromkeys(text) if _characters(one) & (here - there)]
        changed = {one for one in lost if form <= there or self._form(one) <= there}
        unseen = parts or [one for one in lost if one not in changed]
        new = there - here - form
        if unseen or len(known) < len(ids) or LOST in new:
            wrong = bool(new - {LOST})
        else:
            # Some put a space before every text, and some take the first one away.
            ways = (back, back.removeprefix(" "), f" {back}")
            again = (encoded(self._tokenizer, one) for one in ways)
            wrong = bool(new) or ids not in again
        if wrong:
            raise TokenizerError(
                f"model.path = {self._model!r}: its tokenizer does not decode what it encodes:"
                f" {text!r} comes back as {back!r}; check pre_tokenizer and decoder in its"
                " tokenizer.json"
            )
        return _Trip(unseen, {one: self._shown_form(one) for one in lost if one in changed})

    def _without_unknown(self, text: str, ids: list[int]) -> tuple[list[int], list[str]]:
        """The known tokens of a text, and its parts that became the unknown token."""
        unknown, tokenizer = self._unknown, self._tokenizer
        if unknown not in ids:
            return ids, []
        if not tokenizer.is_fast:
            known = [token for token in ids if token != unknown]
            return known, [one for one in dict.fromkeys(text) if unknown in encoded(tokenizer, one)]
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        parts = [text[first:last] for first, last in found["offset_mapping"]]
        lacking = [
            token == unknown and part != self._unknown_text
            for token, part in zip(ids, parts, strict=True)
        ]
        known = [token for token, lacks in zip(ids, lacking, strict=True) if not lacks]
        return known, [part for part, lacks in zip(parts, lacking, strict=True) if part and lacks]

    def _form(self, text: str) -> set[str]:
        """The characters of the normalized text."""
        return _characters(self._normal(text)) - _characters(self._space)

    def _shown_form(self, one: str) -> str:
        """What the normalizer makes of a character within a text."""
        form = self._normal("x" + one).removeprefix(self._normal("x"))
        return form.replace(self._space, " ") if self._space else form

    def _normal(self, text: str) -> str:
        if not self._tokenizer.is_fast:
            return unicodedata.normalize("NFKC", text)
        normalizer = _backend(self._tokenizer).normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text))


def unknown_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token of everything that the vocabulary lacks; None if there is none. The model of
    tokenizer.json decides, since a checkpoint's settings may name none, or one without effect."""
    if not tokenizer.is_fast:
        return cast("int | None", tokenizer.unk_token_id)
    model = _backend(tokenizer).model
    if not hasattr(model, "unk_token"):  # Unigram
        return cast("int | None", json.loads(model.__getstate__())["unk_id"])
    text = model.unk_token
    return None if text is None else cast("int | None", model.token_to_id(text))


def _backend(tokenizer: PreTrainedTokenizerBase) -> Any:
    """The tokenizer of tokenizer.json."""
    return cast("Any", tokenizer).backend_tokenizer


def _characters(text: str) -> set[str]:
    """The set of characters, ignoring case, accents and spaces."""
    parts = unicodedata.normalize("NFD", unicodedata.normalize("NFD", text).casefold())
    return {one for one in parts if not one.isspace() and not unicodedata.combining(one)}
