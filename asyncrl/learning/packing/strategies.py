"""Decides which tokens share a packed row: by best-fit decreasing, or by cutting rows. Pure and
deterministic, so that every rank computes the same plan.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Literal

import numpy as np

from asyncrl.learning.packing.balance import balanced_rounds, imbalance_of

Strategy = Literal["bfd", "bfd_split", "wrapped"]

DIGIT = 16
"""Bits in each pass of the radix sort: numpy's stable sort of uint16 is a radix sort."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Micro-batches by rank. `micro_batches[rank][i]` lists the indices of trajectories, longest
    unit first. All ranks have the same number of micro-batches. A micro-batch may be empty."""

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    tokens: int
    """Tokens placed. A common prefix of a unit counts once."""
    cost: float
    """Sum of the rounds' largest costs."""
    fill: float
    """Tokens placed / (micro-batches x cap), in 0..1."""
    imbalance: float
    """The extra time that unequal costs cause: (sum of the rounds' largest costs) / (sum of their
    mean costs) - 1. 0 = perfectly balanced."""


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """Trajectories that stay together: U units."""

    members: Sequence[tuple[int, ...]]
    """[U] the trajectories of each."""
    tokens: np.ndarray
    """[U] int64: tokens of each in a micro-batch."""
    costs: np.ndarray
    """[U] float64: the cost of each, relative to a token without attention."""


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Packed rows. Bin b contains pieces `offsets[b]` to `offsets[b + 1]`. Piece p is tokens
    [start, end) of a row, and its own segment."""

    row: np.ndarray
    """[P] int64: the row of each piece."""
    start: np.ndarray
    """[P] int64: its first token."""
    end: np.ndarray
    """[P] int64: the token after its last one."""
    offsets: np.ndarray
    """[bins + 1] int64, from 0 to P."""

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each piece, [P] int64."""
        lengths: np.ndarray = self.end - self.start
        return lengths


def pack(
    lengths: Sequence[int],
    max_tokens: int,
    world_size: int = 1,
    quadratic: float = 0.0,
    one_each: bool = False,
) -> Packing:
    """Pack every trajectory into one micro-batch. Each is its own unit: see `pack_units`.

    Args:
        lengths: tokens of each trajectory.
        quadratic: a trajectory of l tokens costs l + quadratic * l² (`balance.quadratic_cost`).
    """
    each = np.asarray(lengths, dtype=np.int64)
    units = Units([(index,) for index in range(len(each))], each, each + quadratic * each**2)
    return pack_units(units, max_tokens, world_size, one_each)


def pack_units(
    units: Units, max_tokens: int, world_size: int = 1, one_each: bool = False
) -> Packing:
    """Pack every unit into one micro-batch, with at most `max_tokens` tokens in each and the same
    number of micro-batches for each rank.

    Best-fit decreasing forms the micro-batches. `balance.balanced_rounds` makes their number a
    multiple of `world_size`, and balances the costs of micro-batches that run at the same time.

    Args:
        one_each: put at most one unit into a micro-batch.

    Raises:
        ValueError: the tokens of a unit are below 1 or above `max_tokens`.
    """
    tokens, costs = units.tokens, units.costs.tolist()
    wrong = np.flatnonzero((tokens < 1) | (tokens > max_tokens))
    if wrong.size:
        members = units.members[wrong[0]]
        name = f"trajectory {members[0]}"
        if len(members) > 1:
            name = f"the unit of trajectories {', '.join(map(str, members))}"
        raise ValueError(
            f"{name} has {tokens[wrong[0]]} tokens, not 1 to {max_tokens}; raise"
            " learner.max_tokens_per_gpu or shorten the trajectory"
        )
    order, offsets = (
        (np.arange(len(tokens)), np.arange(len(tokens) + 1))
        if one_each
        else best_fit_decreasing(tokens, max_tokens)
    )
    bins = [items.tolist() for items in np.split(order, offsets[1:-1])] if order.size else []
    rounds = balanced_rounds(bins, tokens.tolist(), costs, max_tokens, world_size)
    micro_batches = tuple(
        tuple(
            tuple(member for item in items[rank] for member in units.members[item])
            for items in rounds
        )
        for rank in range(world_size)
    )
    placed = int(tokens.sum())
    return Packing(
        micro_batches,
        placed,
        fsum(max(fsum(costs[item] for item in items) for items in group) for group in rounds),
        placed / (len(rounds) * world_size * max_tokens),
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

    The strategies have TRL's names:
        bfd: best-fit decreasing of whole rows. A row above the capacity is an error. Truncation is
            an earlier stage.
        bfd_split: a row above the capacity is first cut into pieces of `capacity` tokens and a
            remainder. Best-fit decreasing then packs the pieces.
        wrapped: the rows are concatenated and cut at every multiple of the capacity. Only the last
            bin has room left. Unlike in TRL, each piece of a bin is its own segment. Its positions
            start at 0, and it does not attend to other pieces.

    `bfd_split` and `wrapped` cut rows, so they are for supervised rows only. A trajectory's loss
    needs the whole trajectory.

    Args:
        first_row: number of the first row, for errors.

    Raises:
        ValueError: a row is empty, or with `bfd` longer than the capacity.
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
    """Place the rows into bins, longest first. Each row goes into the fullest bin that has room for
    it, or else into a new bin. Ties are broken by index.

    Rows of one length are placed together (see `_fills`). For B rows, the numpy operations take
    O(B). The Python loop takes O(L log L) steps for capacity L, and does not grow with B.

    Args:
        lengths: [B] integers in 1..capacity.

    Returns:
        The rows in the order of their bins [B] int64, longest first in each bin. The offset of each
        bin in that order [bins + 1] int64.
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
    number, index = np.divmod(
        np.arange(len(lengths)) - np.repeat(np.cumsum(placed) - placed, placed), each[fill]
    )
    bin_of = first[fill] + number
    offsets = _offsets(np.bincount(bin_of))
    order = np.empty(len(lengths), dtype=np.int64)
    order[offsets[bin_of] + held[fill] + index] = _longest_first(lengths, capacity)
    return order, offsets


class _Rooms:
    """Bins by the room that they have left. A run is a range of consecutive bins with equal
    contents: (first bin, bins, rows in each bin)."""

    def __init__(self) -> None:
        self._runs: dict[int, list[tuple[int, int, int]]] = {}
        self._rooms: list[int] = []

    def put(self, room: int, first: int, bins: int, held: int) -> None:
        """Add a run of bins with this room, unless they are full or there are none."""
        if not room or not bins:
            return
        if room not in self._runs:
            insort(self._rooms, room)
            self._runs[room] = []
        self._runs[room].append((first, bins, held))

    def take(self, length: int) -> tuple[int, int, int, int] | None:
        """Remove and return a run with the smallest room of at least `length`, preceded by its
        room. None if there is none."""
        at = bisect_left(self._rooms, length)
        if at == len(self._rooms):
            return None
        room = self._rooms[at]
        run = self._runs[room].pop()
        if not self._runs[room]:
            del self._runs[room], self._rooms[at]
        return room, *run


def _fills(classes: Iterable[tuple[int, int]], capacity: int) -> list[tuple[int, int, int, int]]:
    """Best fit of `count` rows of each `length`, longest first. Each result is (first bin, bins,
    rows added to each bin, rows in each bin before).

    A bin with the smallest sufficient room r becomes the fullest bin once it takes a row. So it
    takes r // length rows before the next bin with the same room takes any. A run of equal bins can
    therefore be filled at once. Only the last run that a length uses is split. Each use leaves a
    run with less than half its room, so a run is used at most log2(capacity) times.
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
            for at, equal, rows in ((first, full, each), (first + full, min(rest, 1), rest)):
                if equal:
                    fills.append((at, equal, rows, held))
                    rooms.put(room - rows * length, at, equal, held + rows)
            used = full + min(rest, 1)
            rooms.put(room, first + used, bins - used, held)
            count -= full * each + rest
    return fills


def _longest_first(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Return the indices [B] from the longest row to the shortest, ties by index. This is a radix
    sort with one pass for every 16 bits of the capacity."""
    shorter = capacity - lengths
    order = np.arange(len(lengths))
    for shift in range(0, capacity.bit_length(), DIGIT):
        digit = (shorter[order] >> shift & (1 << DIGIT) - 1).astype(np.uint16)
        order = order[np.argsort(digit, kind="stable")]
    return order


def _cut(
    begin: np.ndarray, end: np.ndarray, capacity: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cut the ranges [begin, end) at the multiples of the capacity. Returns, for each piece in
    order, its range, its start and end in that range, and the multiple of the capacity before
    it."""
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
    """Return the offset of each of n groups of these sizes, and the end: [n + 1] int64."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def _checked(
    lengths: Sequence[int] | np.ndarray, capacity: int, strategy: Strategy, first_row: int
) -> np.ndarray:
    """Return the lengths [B] int64. Raises ValueError for a row that cannot be packed."""
    if capacity < 1:
        raise ValueError(f"a capacity of {capacity} tokens is too small; use at least 1")
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
