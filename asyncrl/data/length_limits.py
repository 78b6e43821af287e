"""Length limits: rows that are too long are truncated, dropped or refused, on Arrow columns before
batching.

The three limits apply in TRL's order: the prompt (its end is kept), the completion (its start is
kept), and the two together. One function handles prompts without completions, supervised rows and
preference pairs. It never adds tokens: a completion that loses its end also loses its EOS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

import numpy as np
import pyarrow as pa

Policy = Literal["truncate", "drop", "error"]
"""What happens to a row above a limit: truncate it, drop and count it, or raise an error."""
Side = Literal["keep_start", "keep_end"]
Column: TypeAlias = "pa.Array | pa.ChunkedArray"
"""[R] list<int32> or large_list: the token ids of R rows. A null counts as empty."""

TO_GENERATE = "first generated token"
"""Stands for the completion of a row that has none yet. The row needs room for one token."""


class TooLongError(ValueError):
    """A row is above a limit with policy `error`. The message gives row, length, limit and fixes in
    one line."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit of `tokens` tokens, the side that is kept, and the names of its settings for
    messages."""

    tokens: int
    policy: Policy
    side: Side
    setting: str
    policy_setting: str
    side_setting: str = ""
    """Name of the setting for the side, if there is one."""


@dataclass(frozen=True, slots=True)
class LengthLimits:
    """The limits of a row; None = no limit. `whole` bounds prompt plus completion. In a pair, it
    applies to each completion with the prompt."""

    prompt: Limit | None = None
    completion: Limit | None = None
    whole: Limit | None = None


@dataclass(frozen=True, slots=True)
class Cuts:
    """What one limit did: rows used with fewer tokens, the tokens removed from them, and rows
    dropped."""

    rows: int = 0
    tokens: int = 0
    dropped: int = 0

    def __add__(self, other: Cuts) -> Cuts:
        return Cuts(
            self.rows + other.rows, self.tokens + other.tokens, self.dropped + other.dropped
        )


@dataclass(frozen=True, slots=True)
class LengthReport:
    """What the limits did to `rows` rows. Reports of blocks can be added. A row that is left out
    counts once, at the first limit that it fails, and its cuts do not count."""

    rows: int = 0
    prompt: Cuts = Cuts()
    completion: Cuts = Cuts()
    whole: Cuts = Cuts()
    no_completion: int = 0
    """Rows refused because no token to learn from or to generate is left."""
    no_prompt: int = 0
    """Rows refused because no prompt is left. The first completion token needs a token before
    it."""

    @property
    def dropped(self) -> int:
        """Rows dropped as too long (policy drop)."""
        return self.prompt.dropped + self.completion.dropped + self.whole.dropped

    @property
    def refused(self) -> int:
        """Rows left out because nothing to learn from, or no prompt, is left."""
        return self.no_completion + self.no_prompt

    @property
    def used(self) -> int:
        """Rows that are used."""
        return self.rows - self.dropped - self.refused

    def __add__(self, other: LengthReport) -> LengthReport:
        return LengthReport(
            self.rows + other.rows,
            self.prompt + other.prompt,
            self.completion + other.completion,
            self.whole + other.whole,
            self.no_completion + other.no_completion,
            self.no_prompt + other.no_prompt,
        )

    def metrics(self) -> dict[str, int]:
        """The counts by name: `rows`, `used`, `no_completion`, `no_prompt`, and `<limit>_rows`,
        `<limit>_tokens`, `<limit>_dropped` for each limit."""
        limits = {"prompt": self.prompt, "completion": self.completion, "whole": self.whole}
        by_limit = {
            f"{name}_{field.name}": getattr(cuts, field.name)
            for name, cuts in limits.items()
            for field in fields(cuts)
        }
        return {
            "rows": self.rows,
            "used": self.used,
            "no_completion": self.no_completion,
            "no_prompt": self.no_prompt,
            **by_limit,
        }

    def text(self) -> str:
        """One line: the rows used, and for each limit the rows and tokens cut and the rows
        dropped."""
        parts = [f"{self.used} of {_counted(self.rows, 'row')} used"]
        for name, cuts in (
            ("max_prompt_length", self.prompt),
            ("max_completion_length", self.completion),
            ("max_length", self.whole),
        ):
            done = (
                [f"{_counted(cuts.rows, 'row')} cut by {_counted(cuts.tokens, 'token')}"]
                if cuts.rows
                else []
            )
            done += [f"{_counted(cuts.dropped, 'row')} dropped"] if cuts.dropped else []
            parts += [f"{name}: {', '.join(done)}"] if done else []
        parts += (
            [f"{_counted(self.no_completion, 'row')} refused: no completion token is left"]
            if self.no_completion
            else []
        )
        parts += (
            [f"{_counted(self.no_prompt, 'row')} refused: no prompt token is left"]
            if self.no_prompt
            else []
        )
        return "; ".join(parts if len(parts) > 1 else [*parts, "none cut, none dropped"])


@dataclass(frozen=True, slots=True)
class Truncated:
    """The K of R rows that are used."""

    prompts: pa.Array
    """[K] with the type of the given prompts."""
    completions: dict[str, pa.Array]
    """Name → [K]."""
    kept: np.ndarray
    """[K] int64: their indices among the R rows."""
    cut: np.ndarray
    """[K] bool: whether the row lost a token."""
    report: LengthReport


@dataclass(frozen=True, slots=True)
class _Parts:
    """The part of each list that is kept. starts: [R] int64, its start in the column's values.
    lengths: [R] int64."""

    starts: np.ndarray
    lengths: np.ndarray

    def cut(self, limit: int | np.ndarray, side: Side) -> _Parts:
        """At most `limit` tokens, given as one number or as [R]."""
        lengths = np.minimum(self.lengths, limit)
        return _Parts(
            self.starts if side == "keep_start" else self.starts + self.lengths - lengths, lengths
        )


def cut(column: Column, limit: int, side: Side) -> pa.Array:
    """The first (keep_start) or last (keep_end) `limit` tokens of each row of `column` [R]. Returns
    [R] of the same type."""
    array = _as_array(column)
    return _gather(array, _parts(array).cut(limit, side), np.arange(len(array)))


def truncate(
    prompts: Column, completions: Mapping[str, Column], limits: LengthLimits, first_row: int = 0
) -> Truncated:
    """Apply the limits to R rows in this order: prompt, completion, whole.

    A row is used or left out as a whole. It is refused, and counted, if its prompt or one of its
    completions is empty afterwards. No Python loop runs over rows.

    Args:
        completions: name → column [R]. Without any, the prompts are still to be completed, and the
            whole is the prompt plus one token. Two are a preference pair. `whole` then cuts both
            completions to the room after the prompt (keep_start), or the prompt to the room that
            the longer completion leaves (keep_end). So both still have the same prompt.
        first_row: number of the first row, for messages.

    Raises:
        TooLongError: a row is above a limit whose policy is `error`.
        ValueError: the columns are not list columns of the same length.
    """
    prompt_array = _as_array(prompts)
    arrays = {name: _as_array(column) for name, column in completions.items()}
    rows = len(prompt_array)
    found = {name: len(array) for name, array in arrays.items()}
    if any(count != rows for count in found.values()):
        raise ValueError(f"{rows} prompts do not match completions with {found} rows")
    parts = {name: _parts(array) for name, array in arrays.items()} or {
        TO_GENERATE: _Parts(np.zeros(rows, np.int64), np.ones(rows, np.int64))
    }
    prompt, answers, effects = _apply_all(limits, _parts(prompt_array), parts, first_row)
    alive = ~np.logical_or.reduce([effect.dropped for effect in effects])
    empty = [part.lengths == 0 for part in answers.values()]
    without_completion = alive & np.logical_or.reduce(empty)
    without_prompt = alive & ~without_completion & (prompt.lengths == 0)
    used = alive & ~without_completion & ~without_prompt
    by_prompt, by_completion, by_whole = (effect.cuts(used) for effect in effects)
    kept = np.flatnonzero(used)
    return Truncated(
        prompts=_gather(prompt_array, prompt, kept),
        completions={name: _gather(array, answers[name], kept) for name, array in arrays.items()},
        kept=kept,
        cut=np.sum([effect.tokens for effect in effects], axis=0)[kept] > 0,
        report=LengthReport(
            rows,
            by_prompt,
            by_completion,
            by_whole,
            int(without_completion.sum()),
            int(without_prompt.sum()),
        ),
    )


def _apply_all(
    limits: LengthLimits, prompt: _Parts, answers: dict[str, _Parts], first_row: int
) -> tuple[_Parts, dict[str, _Parts], list[_Effect]]:
    """Apply the limits in order. Returns the remaining parts and the effect of each limit."""
    alive = np.ones(len(prompt.lengths), dtype=bool)
    effects: list[_Effect] = []
    for limit, stage in (
        (limits.prompt, _cut_prompt),
        (limits.completion, _cut_completions),
        (limits.whole, _cut_whole),
    ):
        prompt, answers, effect = _apply(limit, stage, prompt, answers, alive, first_row)
        alive = alive & ~effect.dropped
        effects.append(effect)
    return prompt, answers, effects


@dataclass(frozen=True, slots=True)
class _Effect:
    """What one limit did to R rows."""

    tokens: np.ndarray
    """[R] int64: tokens that each row lost."""
    dropped: np.ndarray
    """[R] bool: rows that the limit dropped."""

    def cuts(self, used: np.ndarray) -> Cuts:
        """The counts over the rows that are used."""
        tokens = self.tokens[used]
        return Cuts(int((tokens > 0).sum()), int(tokens.sum()), int(self.dropped.sum()))


def _apply(
    limit: Limit | None,
    stage: Callable[[_Parts, dict[str, _Parts], Limit], Stage],
    prompt: _Parts,
    answers: dict[str, _Parts],
    alive: np.ndarray,
    first_row: int,
) -> tuple[_Parts, dict[str, _Parts], _Effect]:
    """Apply one limit to the rows that are still `alive` [R]. Returns prompt, completions and the
    effect."""
    before, nothing = _tokens(prompt, answers), np.zeros(len(alive), dtype=bool)
    if limit is None:
        return prompt, answers, _Effect(np.zeros_like(before), nothing)
    lengths, cut_prompt, cut_answers = stage(prompt, answers, limit)
    over = alive & np.logical_or.reduce([length > limit.tokens for length in lengths.values()])
    match limit.policy:
        case "error" if over.any():
            row = int(over.argmax())
            raise TooLongError(_too_long(lengths, limit, row, first_row, prompt.lengths))
        case "drop":
            return prompt, answers, _Effect(np.zeros_like(before), over)
        case "truncate":
            prompt, answers = cut_prompt, cut_answers
    return prompt, answers, _Effect(before - _tokens(prompt, answers), nothing)


Stage = tuple[dict[str, np.ndarray], _Parts, dict[str, _Parts]]
"""What a limit bounds (name → lengths [R]), and the prompt and completions after truncation."""


def _cut_prompt(prompt: _Parts, answers: dict[str, _Parts], limit: Limit) -> Stage:
    return {"the prompt": prompt.lengths}, prompt.cut(limit.tokens, limit.side), answers


def _cut_completions(prompt: _Parts, answers: dict[str, _Parts], limit: Limit) -> Stage:
    lengths = {f"the {_display_name(name)}": part.lengths for name, part in answers.items()}
    return (
        lengths,
        prompt,
        {name: part.cut(limit.tokens, limit.side) for name, part in answers.items()},
    )


def _cut_whole(prompt: _Parts, answers: dict[str, _Parts], limit: Limit) -> Stage:
    lengths = {
        f"prompt and {_display_name(name)} together": prompt.lengths + part.lengths
        for name, part in answers.items()
    }
    if limit.side == "keep_start":
        room = np.maximum(limit.tokens - prompt.lengths, 0)
        return (
            lengths,
            prompt.cut(limit.tokens, "keep_start"),
            {name: part.cut(room, "keep_start") for name, part in answers.items()},
        )
    answers = {name: part.cut(limit.tokens, "keep_end") for name, part in answers.items()}
    longest = np.maximum.reduce([part.lengths for part in answers.values()])
    return lengths, prompt.cut(limit.tokens - longest, "keep_end"), answers


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _display_name(name: str) -> str:
    return name if name in ("completion", TO_GENERATE) else f"{name} completion"


def _too_long(
    lengths: Mapping[str, np.ndarray], limit: Limit, row: int, first_row: int, prompts: np.ndarray
) -> str:
    what, length = max(
        ((what, int(length[row])) for what, length in lengths.items()), key=lambda item: item[1]
    )
    subject = what.removesuffix(" together")
    # If the start is kept, a prompt that fills the limit alone leaves no completion.
    full = limit.side_setting and limit.side == "keep_start" and prompts[row] >= limit.tokens
    ways = f"drop, or truncate with {limit.side_setting}: keep_end" if full else "drop or truncate"
    return (
        f"{subject} of row {first_row + row} {'has' if subject == what else 'together have'}"
        f" {length} tokens, above {limit.setting} = {limit.tokens}; raise that, or set"
        f" {limit.policy_setting}: {ways}"
    )


def _tokens(prompt: _Parts, answers: Mapping[str, _Parts]) -> np.ndarray:
    """[R] tokens of each row."""
    tokens: np.ndarray = np.add.reduce(
        [prompt.lengths, *(part.lengths for part in answers.values())]
    )
    return tokens


def _as_array(column: Column) -> pa.Array:
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if not (pa.types.is_list(array.type) or pa.types.is_large_list(array.type)):
        raise ValueError(f"token ids must be lists, such as list<int32>, not {array.type}")
    return array


def _parts(array: pa.Array) -> _Parts:
    """The whole of every list. `offsets` belong to the slice and count in the unsliced values."""
    offsets = array.offsets.to_numpy().astype(np.int64)
    lengths = np.diff(offsets)
    return _Parts(
        offsets[:-1],
        (
            np.where(array.is_null().to_numpy(zero_copy_only=False), 0, lengths)
            if array.null_count
            else lengths
        ),
    )


def _gather(array: pa.Array, parts: _Parts, rows: np.ndarray) -> pa.Array:
    """[K] lists of the same type with the kept part of each of these rows. Values are copied in
    runs, or not at all if they are contiguous."""
    large = pa.types.is_large_list(array.type)
    width, views, lists = (
        (np.int64, pa.LargeListViewArray, pa.LargeListArray)
        if large
        else (np.int32, pa.ListViewArray, pa.ListArray)
    )
    starts, lengths = parts.starts[rows], parts.lengths[rows]
    values = views.from_arrays(starts.astype(width), lengths.astype(width), array.values).flatten()
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(width)
    return lists.from_arrays(pa.array(offsets), values, type=array.type)
