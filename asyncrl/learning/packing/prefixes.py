"""Forms packing units of rows that begin with the same tokens, so that a micro-batch contains their
common prefix once. Pure and deterministic, so that every rank computes the same plan.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from asyncrl.learning.packing.strategies import Packing, Units, pack, pack_units
from asyncrl.models.forest import ROOT, Forest, shared_rows

PARTS_OF_RANK = (0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0)
"""With several ranks and few trees, a unit has at most 1 / part of a rank's tokens. Larger units
have fewer prefixes twice, and smaller ones can be balanced better. The fastest plan is used."""
MANY_TREES = 8
"""Trees of at most this part of a rank's tokens, 1 / MANY_TREES, can be balanced whole."""
SHORT_PREFIX = 8
"""Rows below a prefix that has at most 1 / SHORT_PREFIX of their tokens are a unit of their own, if
the tree is cut. Small units fill micro-batches better, and those of one micro-batch share the
prefix all the same."""


def pack_shared(
    rows: Sequence[np.ndarray],
    max_tokens: int,
    world_size: int = 1,
    quadratic: float = 0.0,
    units: Sequence[Sequence[int]] | None = None,
) -> Packing:
    """Pack rows into micro-batches, as `strategies.pack_units` does. Rows with a common prefix form
    a unit. A prefix with too many rows is computed once in each of several units.

    Args:
        rows: token ids of each trajectory.
        quadratic: a token that attends to l tokens costs 1 + 2 * quadratic * l
            (`balance.quadratic_cost`).
        units: indices of rows that must stay together.

    Raises:
        ValueError: the tokens of a row, or of `units`, are above `max_tokens`.
    """
    if not rows or not all(map(len, rows)):
        return pack([len(row) for row in rows], max_tokens, world_size)
    forest, room = shared_rows(rows), max_tokens
    while True:
        plan = _planned(rows, forest, room, max_tokens, world_size, quadratic, units)
        used = _used(rows, plan)
        if (above := max(used) - max_tokens) <= 0:
            tokens, number = sum(used), sum(map(len, plan.micro_batches))
            return replace(plan, tokens=tokens, fill=tokens / (number * max_tokens))
        # Rows of one micro-batch may lack a prefix that was worth a segment in the whole step.
        room = max(0, min(room - above, room * 7 // 8))


def _planned(
    rows: Sequence[np.ndarray],
    forest: Forest,
    room: int,
    max_tokens: int,
    world_size: int,
    quadratic: float,
    units: Sequence[Sequence[int]] | None,
) -> Packing:
    """The fastest plan whose micro-batches have at most `room` tokens, if no unit has more. Without
    room, each unit has a micro-batch of its own."""
    fair, limits = forest.tokens / world_size, {room}
    if world_size > 1 and max(_Sums.of(forest).tokens) > fair / MANY_TREES:
        limits = {min(room, ceil(fair / part)) for part in PARTS_OF_RANK}
    plans = []
    for limit in sorted(limits, reverse=True):
        found = shared_units(rows, forest, limit, quadratic, units)
        most = min(max_tokens, max(room, *found.tokens.tolist()))
        plans.append(pack_units(found, most, world_size, one_each=not room))
    return min(plans, key=lambda plan: plan.cost)


def _used(rows: Sequence[np.ndarray], plan: Packing) -> list[int]:
    """The tokens of each micro-batch that has rows. It shares more prefixes than its units."""
    return [
        row_tokens([rows[member] for member in members])
        for rank in plan.micro_batches
        for members in rank
        if members
    ]


def shared_units(
    rows: Sequence[np.ndarray],
    forest: Forest,
    limit: int,
    quadratic: float = 0.0,
    units: Sequence[Sequence[int]] | None = None,
) -> Units:
    """Put rows with a common prefix into one unit of at most `limit` tokens. Single rows and
    `units` may have more."""
    parts = _parts(forest, limit)
    if units is not None:
        joined = _joined([part.rows for part in parts], units)
        parts = [
            _part(rows, members)
            for chosen in joined
            for members in _fitting(rows, chosen, units, limit)
        ]
    return Units(
        [part.rows for part in parts],
        np.array([part.tokens for part in parts], dtype=np.int64),
        np.array([part.tokens + quadratic * part.squares for part in parts]),
    )


def row_tokens(rows: Sequence[np.ndarray]) -> int:
    """Return the tokens of a packed row with these rows, which contains common prefixes once. The
    last token of a row is no input, and without it another prefix may be worth a segment. So this
    is the larger count, with and without the last tokens."""
    inputs = [row[:-1] if len(row) > 1 else row for row in rows]
    return max(shared_rows(rows).tokens, shared_rows(inputs).tokens)


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows that are computed together."""

    rows: tuple[int, ...]
    tokens: int
    squares: int
    """The sum over its segments of own² + 2 * own * past. l² for a single row of l tokens."""


def _part(rows: Sequence[np.ndarray], members: tuple[int, ...]) -> _Part:
    chosen = [rows[member] for member in members]
    return _Part(members, row_tokens(chosen), sum(_squares(shared_rows(chosen))))


def _squares(forest: Forest) -> list[int]:
    return [own * (own + 2 * past) for own, past in zip(forest.lengths, forest.depths, strict=True)]


def _parts(forest: Forest, limit: int) -> list[_Part]:
    """Cut the forest into parts of at most `limit` tokens, if no single row has more. Trees that
    fit stay whole."""
    tree = _Sums.of(forest)
    own_squares, parts = _squares(forest), list[_Part]()
    # Siblings without a part, and the tokens and squares of what they continue.
    waiting = [([root], 0, 0) for root in tree.roots]
    while waiting:
        siblings, past, past_squares = waiting.pop()
        rows, used, used_squares = list[int](), past, past_squares
        for segment in siblings:
            needed = tree.tokens[segment]
            if past + needed > limit and tree.children[segment]:
                own = past + forest.lengths[segment], past_squares + own_squares[segment]
                waiting.append((tree.children[segment], *own))
                if tree.ending[segment]:
                    parts.append(_Part(tuple(tree.ending[segment]), *own))
                continue
            if needed >= SHORT_PREFIX * past > 0:
                own = past + needed, past_squares + tree.squares[segment]
                parts.append(_Part(tuple(sorted(tree.rows[segment])), *own))
                continue
            if rows and used + needed > limit:
                parts.append(_Part(tuple(sorted(rows)), used, used_squares))
                rows, used, used_squares = [], past, past_squares
            rows += tree.rows[segment]
            used, used_squares = used + needed, used_squares + tree.squares[segment]
        if rows:
            parts.append(_Part(tuple(sorted(rows)), used, used_squares))
    return sorted(parts, key=lambda part: part.rows)


@dataclass(frozen=True, slots=True)
class _Sums:
    """What each segment has together with all that continue it."""

    roots: list[int]
    children: list[list[int]]
    ending: list[list[int]]
    """The rows that end with the segment itself."""
    rows: list[list[int]]
    tokens: list[int]
    squares: list[int]

    @classmethod
    def of(cls, forest: Forest) -> _Sums:
        count = len(forest.lengths)
        ending: list[list[int]] = [[] for _ in range(count)]
        for row, segment in enumerate(forest.ends):
            ending[segment].append(row)
        rows, children = [list(own) for own in ending], [list[int]() for _ in range(count)]
        tokens, squares = list(forest.lengths), _squares(forest)
        for segment in reversed(range(count)):
            if (parent := forest.parents[segment]) != ROOT:
                children[parent].append(segment)
                rows[parent] += rows[segment]
                tokens[parent] += tokens[segment]
                squares[parent] += squares[segment]
        roots = [segment for segment in range(count) if forest.parents[segment] == ROOT]
        return cls(roots, children, ending, rows, tokens, squares)


def _joined(
    parts: Sequence[Sequence[int]], units: Sequence[Sequence[int]]
) -> list[tuple[int, ...]]:
    """Join the parts that have rows of one unit."""
    owner = {row: part for part, members in enumerate(parts) for row in members}
    first = list(range(len(parts)))

    def top(part: int) -> int:
        while first[part] != part:
            part = first[part]
        return part

    for unit in units:
        tops = {top(owner[row]) for row in unit}
        for part in tops:
            first[part] = min(tops)
    found: dict[int, list[int]] = {}
    for part, members in enumerate(parts):
        found.setdefault(top(part), []).extend(members)
    return [tuple(sorted(members)) for members in found.values()]


def _fitting(
    rows: Sequence[np.ndarray],
    members: tuple[int, ...],
    units: Sequence[Sequence[int]],
    limit: int,
) -> list[tuple[int, ...]]:
    """Return these rows as one unit, or as several of neighboring `units` if they are too many."""
    if row_tokens([rows[member] for member in members]) <= limit:
        return [members]
    inside, found = set(members), list[tuple[int, ...]]()
    left = sorted((unit for unit in units if unit[0] in inside), key=lambda one: _order(rows, one))

    def tokens(count: int) -> int:
        return row_tokens([rows[member] for unit in left[:count] for member in unit])

    while left:
        count = max(1, bisect_right(range(len(left) + 1), limit, lo=1, key=tokens) - 1)
        found.append(tuple(sorted(member for unit in left[:count] for member in unit)))
        left = left[count:]
    return sorted(found)


def _order(rows: Sequence[np.ndarray], unit: Sequence[int]) -> bytes:
    """Units that begin with the same tokens are neighbors in this order."""
    return rows[unit[0]].astype(">u4").tobytes()
