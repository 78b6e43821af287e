"""Which tokens share a packed row: best-fit decreasing, and what happens to rows that are too long
for it. Pure and deterministic, so that every rank computes the same plan.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from asyncrl.packing.balance import balanced_rounds, imbalance_of

__all__ = ["Packing", "Pieces", "Strategy", "best_fit_decreasing", "pack", "pack_rows"]

Strategy = Literal["bfd", "bfd_split", "wrapped"]

DIGIT = 16
"""Bits that one pass of the radix sort orders by: numpy sorts uint16 stably by radix."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Micro-batches by rank: `micro_batches[rank][i]` holds indices of trajectories, longest first.
    All ranks have equally many; one may be empty."""

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    fill: float
    """Tokens placed / (micro-batches x cap), in 0..1."""
    imbalance: float
    """How much longer the rounds take than if every rank had the same cost in each: sum of the
    largest costs / sum of the mean costs - 1; 0 = even."""


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Packed rows: bin b holds pieces `offsets[b]` to `offsets[b + 1]`. Piece p is tokens [start,
    end) of a row, and a segment of its own."""

    row: np.ndarray
    """[P] int64."""
    start: np.ndarray
    """[P] int64."""
    end: np.ndarray
    """[P] int64."""
    offsets: np.ndarray
    """[bins + 1] int64, from 0 to P."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each piece, [P] int64."""
        lengths: np.ndarray = self.end - self.start
        return lengths


def pack(
    lengths: Sequence[int],
    max_tokens: int,
    world_size: int = 1,
    quadratic: float = 0.0,
    one_each: bool = False,
) -> Packing:
    """Place every trajectory exactly once, at most `max_tokens` tokens in a micro-batch, equally
    many micro-batches for each rank.

    Best-fit decreasing gives the micro-batches; `balance.balanced_rounds` makes them a multiple of
    the ranks and evens out what the ranks do at the same time.

    Args:
        lengths: tokens of each trajectory.
        quadratic: a trajectory of l tokens costs l + quadratic * l² (`balance.quadratic_cost`).
        one_each: a micro-batch holds one trajectory, or none.

    Raises:
        ValueError: a length is below 1 or above `max_tokens`.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    wrong = np.flatnonzero((tokens < 1) | (tokens > max_tokens))
    if wrong.size:
        raise ValueError(
            f"trajectory {wrong[0]} has {tokens[wrong[0]]} tokens, not 1 to {max_tokens}; raise"
            " learner.max_tokens_per_gpu or shorten the trajectory"
        )
    order, offsets = (
        (np.arange(len(tokens)), np.arange(len(tokens) + 1))
        if one_each
        else best_fit_decreasing(tokens, max_tokens)
    )
    bins = [items.tolist() for items in np.split(order, offsets[1:-1])] if order.size else []
    costs = (tokens + quadratic * tokens**2).tolist()
    rounds = balanced_rounds(bins, tokens.tolist(), costs, max_tokens, world_size)
    micro_batches = tuple(
        tuple(tuple(items[rank]) for items in rounds) for rank in range(world_size)
    )
    return Packing(
        micro_batches,
        int(tokens.sum()) / (len(rounds) * world_size * max_tokens),
        imbalance_of(rounds, costs),
    )


def pack_rows(
    lengths: Sequence[int] | np.ndarray,
    capacity: int,
    strategy: Strategy = "bfd",
    first_row: int = 0,
) -> Pieces:
    """Pack rows of these lengths into bins of at most `capacity` tokens. Every token is in exactly
    one piece.

    Strategies, named as TRL names them:
        bfd: best-fit decreasing of whole rows. A row above the capacity is refused: truncation is a
            stage of its own, before this one.
        bfd_split: rows above the capacity are first cut into pieces of `capacity` tokens and a
            rest, then best-fit decreasing.
        wrapped: the rows one after the other, cut at every multiple of the capacity, wherever in a
            row that falls. Only the last bin has room left. Unlike TRL's, the pieces of a bin stay
            apart: each is a segment whose positions start at 0 and which sees no other.

    The two that cut rows are for supervised rows only: a trajectory's loss needs all of it.

    Args:
        first_row: number of the first row, for errors.

    Raises:
        ValueError: a row is empty, or under `bfd` longer than the capacity.
    """
    tokens = _checked(lengths, capacity, strategy, first_row)
    if strategy == "wrapped":
        ends = np.cumsum(tokens)
        row, start, end, bins = _cut(ends - tokens, ends, capacity)
        return Pieces(row, start, end, _offsets(np.bincount(bins)))
    row, start, end, _ = _cut(np.zeros_like(tokens), tokens, capacity)
    order, offsets = best_fit_decreasing(end - start, capacity)
    return Pieces(row[order], start[order], end[order], offsets)


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows longest first, each into the fullest bin that still has room for it, else into a new
    one. Ties by index.

    Rows of one length are placed together, see `_fills`: for B rows the arrays take O(B), and
    Python's part, O(L log L) steps for capacity L, does not grow with B.

    Args:
        lengths: [B] integers in 1..capacity.

    Returns:
        Rows in the order of their bins [B] int64, longest first in each, and where each bin begins
        in it [bins + 1] int64.
    """
    counts = np.bincount(lengths)
    present = np.flatnonzero(counts)[::-1]
    fills = np.array(
        _fills(zip(present.tolist(), counts[present].tolist(), strict=True), capacity),
        dtype=np.int64,
    ).reshape(-1, 4)
    first, bins, each, held = fills.T
    placed = bins * each
    fill = np.repeat(np.arange(len(fills)), placed)
    number, place = np.divmod(
        np.arange(len(lengths)) - np.repeat(np.cumsum(placed) - placed, placed), each[fill]
    )
    bin_of = first[fill] + number
    offsets = _offsets(np.bincount(bin_of))
    order = np.empty(len(lengths), dtype=np.int64)
    order[offsets[bin_of] + held[fill] + place] = _longest_first(lengths, capacity)
    return order, offsets


class _Rooms:
    """Bins by the room they have left, as runs of consecutive bins that hold alike: (first bin,
    bins, rows that each holds)."""

    def __init__(self) -> None:
        self._runs: dict[int, list[tuple[int, int, int]]] = {}
        self._rooms: list[int] = []

    def put(self, room: int, first: int, bins: int, held: int) -> None:
        if not room or not bins:
            return
        if room not in self._runs:
            insort(self._rooms, room)
            self._runs[room] = []
        self._runs[room].append((first, bins, held))

    def take(self, length: int) -> tuple[int, int, int, int] | None:
        """A run of the smallest room of at least `length`, with that room; None if there is
        none."""
        at = bisect_left(self._rooms, length)
        if at == len(self._rooms):
            return None
        room = self._rooms[at]
        run = self._runs[room].pop()
        if not self._runs[room]:
            del self._runs[room], self._rooms[at]
        return room, *run


def _fills(classes: Iterable[tuple[int, int]], capacity: int) -> list[tuple[int, int, int, int]]:
    """Best fit of `count` rows of each `length`, longest first, as (first bin, bins, rows for each
    of them, rows that each held before).

    A bin of the smallest room r that takes one row is the fullest thereafter, so it goes on to take
    r // length rows before the next bin of that room has its turn: a run of alike bins moves as a
    whole. Only the last run that a length meets is split. A run that is met is left with less than
    half its room, so it is met at most log2(capacity) times.
    """
    rooms, fills, opened = _Rooms(), list[tuple[int, int, int, int]](), 0
    for length, count in classes:
        while count:
            run = rooms.take(length)
            if run is None:
                run = capacity, opened, -(-count // (capacity // length)), 0
                opened += run[2]
            room, first, bins, held = run
            each = room // length
            full, rest = divmod(min(count, bins * each), each)
            for at, alike, rows in ((first, full, each), (first + full, min(rest, 1), rest)):
                if alike:
                    fills.append((at, alike, rows, held))
                    rooms.put(room - rows * length, at, alike, held + rows)
            used = full + min(rest, 1)
            rooms.put(room, first + used, bins - used, held)
            count -= full * each + rest
    return fills


def _longest_first(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Indices [B] by falling length, ties by index: a radix sort, one pass for every 16 bits of the
    capacity."""
    shorter = capacity - lengths
    order = np.arange(len(lengths))
    for shift in range(0, capacity.bit_length(), DIGIT):
        digit = (shorter[order] >> shift & (1 << DIGIT) - 1).astype(np.uint16)
        order = order[np.argsort(digit, kind="stable")]
    return order


def _cut(
    begin: np.ndarray, end: np.ndarray, capacity: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The ranges [begin, end) cut at the multiples of the capacity: (range, start and end in it,
    multiple) of each piece, in order."""
    first = begin // capacity
    counts = (end - 1) // capacity - first + 1
    row = np.repeat(np.arange(len(begin)), counts)
    cell = first[row] + np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    start, stop = (
        np.maximum(begin[row], cell * capacity),
        np.minimum(end[row], (cell + 1) * capacity),
    )
    return row, start - begin[row], stop - begin[row], cell


def _offsets(counts: np.ndarray) -> np.ndarray:
    """Where each of so many things begins, and the end: [n + 1] int64."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def _checked(
    lengths: Sequence[int] | np.ndarray, capacity: int, strategy: Strategy, first_row: int
) -> np.ndarray:
    """The lengths [B] int64. Raises ValueError for one that cannot be packed."""
    if capacity < 1:
        raise ValueError(f"a capacity of {capacity} holds no token; give at least 1")
    tokens = np.asarray(lengths, dtype=np.int64)
    if (empty := np.flatnonzero(tokens < 1)).size:
        raise ValueError(f"row {first_row + empty[0]} has {tokens[empty[0]]} tokens; leave it out")
    if strategy == "bfd" and (long := np.flatnonzero(tokens > capacity)).size:
        raise ValueError(
            f"row {first_row + long[0]} has {tokens[long[0]]} tokens, above the capacity of"
            f" {capacity}; truncate it, raise the capacity (learner.max_tokens_per_gpu), or cut it"
            " with packing_strategy: bfd_split"
        )
    return tokens
