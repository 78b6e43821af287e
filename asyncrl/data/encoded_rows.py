"""Encoded rows of a dataset: single sequences, and pairs with one prompt, within a length limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from asyncrl.contracts.offline_rows import IDS
from asyncrl.data.conversations import Tokens
from asyncrl.data.form_rows import MalformedError
from asyncrl.data.length_limits import LengthLimits, Limit, Side, cut, truncate


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """One row of a token table: two sides of a pair (chosen first), or one."""

    row: int
    """Number of the row in the data, over all sources."""
    sides: tuple[Tokens, ...]
    label: bool | None = None
    """Whether a single completion is desirable (KTO)."""

    @property
    def length(self) -> int:
        """Tokens of the longer side."""
        return max(len(side.ids) for side in self.sides)

    @property
    def tokens(self) -> int:
        """Tokens of all sides."""
        return sum(len(side.ids) for side in self.sides)


def lists(arrays: Sequence[np.ndarray], kind: pa.ListType = IDS) -> pa.ListArray:
    """A list column with one row for each array."""
    offsets = np.concatenate([[0], np.cumsum([len(array) for array in arrays])]).astype(np.int32)
    values = np.concatenate(arrays) if arrays else np.zeros(0)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, kind.value_type), kind)


def paired(chosen: Tokens, rejected: Tokens, implicit: bool) -> tuple[Tokens, Tokens]:
    """Two sides with the same prompt.

    Args:
        implicit: the prompt is the tokens that both sides begin with. Both sides give these the
            same log-probs, which cancel in a difference of sums.

    Raises:
        MalformedError: the prompts differ, or there is none.
    """
    if implicit:
        shared = _common_length(chosen.ids, rejected.ids)
        chosen, rejected = _after(chosen, shared), _after(rejected, shared)
    count = chosen.prompt
    if rejected.prompt != count or (chosen.ids[:count] != rejected.ids[:count]).any():
        raise MalformedError("not_a_prefix", "its sides have different prompts")
    return chosen, rejected


def checked(example: EncodedRow, reason: str = "no_target") -> EncodedRow:
    """The example with masks that leave the first token out, which nothing predicts.

    Raises:
        MalformedError: a side has no token to train (`reason`), a compared one has no prompt, or
            both sides are equal.
    """
    sides = tuple(replace(side, mask=_without_first(side.mask)) for side in example.sides)
    compared = len(sides) == 2 or example.label is not None
    if compared and not all(side.prompt for side in sides):
        raise MalformedError("no_prompt" if reason == "no_target" else reason)
    if not all(side.mask.any() for side in sides):
        raise MalformedError(reason)
    if len(sides) == 2 and np.array_equal(sides[0].ids, sides[1].ids):
        raise MalformedError("equal")
    return replace(example, sides=sides)


def truncated(examples: Sequence[EncodedRow], tokens: int, side: Side) -> list[EncodedRow | None]:
    """Examples with the same number of sides, each cut to at most `tokens` tokens.

    A single sequence keeps its first or last tokens, and no longer knows its prompt. Sides that are
    compared keep the same prompt: see `length_limits.truncate`. None where no prompt or no
    completion is left.
    """
    if not examples:
        return []
    found: list[EncodedRow | None] = [None] * len(examples)
    if len(examples[0].sides) == 1 and examples[0].label is None:
        wholes = lists([_coded(example.sides[0]) for example in examples])
        for index, values in enumerate(cut(wholes, tokens, side)):
            whole = _decoded(values.values.to_numpy(), 0)
            found[index] = replace(examples[index], sides=(whole,))
        return found
    limit = Limit(tokens, "truncate", side, "data.max_length", "data.length_policy")
    cuts = truncate(
        lists([_coded(e.sides[0])[: e.sides[0].prompt] for e in examples]),
        {
            str(number): lists([_coded(s)[s.prompt :] for s in column])
            for number, column in enumerate(zip(*(e.sides for e in examples), strict=True))
        },
        LengthLimits(whole=limit),
    )
    for index, row in enumerate(cuts.kept):
        prompt = cuts.prompts[index].values.to_numpy()
        answers = (column[index].values.to_numpy() for column in cuts.completions.values())
        sides = tuple(_decoded(np.concatenate([prompt, one]), len(prompt)) for one in answers)
        found[row] = replace(examples[row], sides=sides)
    return found


def _coded(tokens: Tokens) -> np.ndarray:
    """[T] int32: token ids with the mask in the lowest bit, so that one cut applies to both."""
    coded: np.ndarray = (tokens.ids << 1) | tokens.mask
    return coded


def _decoded(coded: np.ndarray, prompt: int) -> Tokens:
    return Tokens(coded >> 1, (coded & 1).astype(bool), prompt)


def _without_first(mask: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(min(1, len(mask)), bool), mask[1:]])


def _after(side: Tokens, prompt: int) -> Tokens:
    """The side with another number of prompt tokens, which are not trained."""
    mask = np.arange(len(side.ids)) >= prompt
    return Tokens(side.ids, side.mask & mask, prompt)


def _common_length(left: np.ndarray, right: np.ndarray) -> int:
    shortest = min(len(left), len(right))
    differs = left[:shortest] != right[:shortest]
    return int(differs.argmax()) if differs.any() else shortest
