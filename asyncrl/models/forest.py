"""Rows of tokens as a forest: tokens that several rows begin with are computed once.

The n completions of a group continue one prompt, both sides of a pair continue one context, and the
branches of a session continue their common turns. A causal model gives a token the same hidden
state in each of these rows. So a packed row contains each common prefix once, as a segment that
other segments continue. Compare Prefix Grouper (arXiv:2506.05433).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

ROOT = -1
"""Parent of a segment that continues no other."""

LEAST_SAVED = 1 / 32
"""A common prefix becomes its own segment if this saves at least this part of the tokens of its
rows. Less, such as the first token of all chats, is not worth the further segment."""


@dataclass(frozen=True, slots=True)
class Forest:
    """S segments that contain the tokens of R rows. A segment's parent is before it, and all
    segments that continue it follow it directly."""

    lengths: tuple[int, ...]
    """[S] tokens of each segment."""
    parents: tuple[int, ...]
    """[S] the segment that each one continues, or ROOT."""
    origins: tuple[tuple[int, int], ...]
    """[S] a row with the segment's tokens, and the segment's first token in it."""
    ends: tuple[int, ...]
    """[R] the segment with which each row ends. Equal rows have the same one."""
    starts: tuple[int, ...]
    """[S] the first token of each segment in the packed row."""

    @property
    def tokens(self) -> int:
        """Tokens of the packed row."""
        return sum(self.lengths)

    @property
    def depths(self) -> tuple[int, ...]:
        """[S] the tokens before each segment, in the rows that contain it."""
        return tuple(start for _, start in self.origins)

    def positions(self, row: int, first: int) -> np.ndarray:
        """Return where in the packed row the tokens of this row are, from its token `first` on,
        int64."""
        parts, segment = [], self.ends[row]
        while segment != ROOT:
            depth, length = self.origins[segment][1], self.lengths[segment]
            begin = max(first - depth, 0)
            if begin < length:
                parts.append(np.arange(begin, length) + self.starts[segment])
            if depth <= first:
                break
            segment = self.parents[segment]
        return np.concatenate(parts[::-1]) if parts else np.zeros(0, dtype=np.int64)


def separate_rows(rows: Sequence[np.ndarray]) -> Forest:
    """Make a forest in which each row is a segment of its own, longest first."""
    order = sorted(range(len(rows)), key=lambda row: (-len(rows[row]), row))
    prefixes = [_Prefix(len(rows[row]), row, ends=[row]) for row in order]
    return _laid_out(prefixes, len(rows))


def shared_rows(rows: Sequence[np.ndarray]) -> Forest:
    """Make a forest in which the rows share their common prefixes. Subtrees with the most tokens
    come first, so that rows without a common prefix are ordered as by `separate_rows`.

    Args:
        rows: token ids of each row, at least one.
    """
    root = _common_prefixes(rows)
    _count_tokens(root)
    _drop_small_prefixes(root)
    _count_tokens(root)
    for prefix in _parents_first(root):
        prefix.children.sort(key=lambda child: (-child.tokens, child.row))
    return _laid_out(root.children, len(rows))


@dataclass(slots=True, eq=False)
class _Prefix:
    """Tokens that some rows have in common: those up to `depth` that the parent does not have."""

    depth: int
    row: int
    """A row that contains them."""
    ends: list[int] = field(default_factory=list)
    """The rows that end here."""
    children: list[_Prefix] = field(default_factory=list)
    start: int = 0
    """The depth of its parent."""
    tokens: int = 0
    """Tokens of the prefix and of all below it."""

    @property
    def saves(self) -> int:
        """Tokens that its rows would have in addition without it."""
        branches = len(self.children) + bool(self.ends)
        return (self.depth - self.start) * (branches - 1)


def _common_prefixes(rows: Sequence[np.ndarray]) -> _Prefix:
    """Make the tree of all common prefixes, whose root has no token.

    In sorted order, a row has its longest common prefix with one of its neighbors. So only the path
    to the row before can branch.
    """
    # The bytes of big-endian numbers sort as the numbers do.
    order = sorted(range(len(rows)), key=lambda row: rows[row].astype(">u4").tobytes())
    root = _Prefix(0, order[0])
    path = [root]
    before = rows[order[0]][:0]
    for row in order:
        tokens, last = rows[row], None
        common = _common_length(before, tokens)
        while path[-1].depth > common:
            last = path.pop()
        if last is not None and path[-1].depth < common:
            branching = _Prefix(common, row, children=[last])
            path[-1].children[-1] = branching
            path.append(branching)
        if len(tokens) > path[-1].depth:
            leaf = _Prefix(len(tokens), row)
            path[-1].children.append(leaf)
            path.append(leaf)
        path[-1].ends.append(row)
        before = tokens
    return root


def _common_length(first: np.ndarray, second: np.ndarray) -> int:
    """Return how many tokens both rows begin with."""
    shorter = min(len(first), len(second))
    differing = first[:shorter] != second[:shorter]
    at = int(differing.argmax()) if shorter else 0
    return at if shorter and differing[at] else shorter


def _parents_first(root: _Prefix) -> list[_Prefix]:
    """Return all prefixes below the root, and the root, each before its children."""
    found, waiting = list[_Prefix](), [root]
    while waiting:
        prefix = waiting.pop()
        found.append(prefix)
        waiting += reversed(prefix.children)
    return found


def _count_tokens(root: _Prefix) -> None:
    """Set `start` and `tokens` of each prefix."""
    prefixes = _parents_first(root)
    for prefix in prefixes:
        for child in prefix.children:
            child.start = prefix.depth
    for prefix in reversed(prefixes):
        prefix.tokens = prefix.depth - prefix.start + sum(child.tokens for child in prefix.children)


def _drop_small_prefixes(root: _Prefix) -> None:
    """Give the children of each prefix that is not worth a segment to its parent."""
    waiting = [root]
    while waiting:
        prefix = waiting.pop()
        prefix.children = _kept_children(prefix)
        waiting += prefix.children


def _kept_children(prefix: _Prefix) -> list[_Prefix]:
    waiting, kept = list(prefix.children), list[_Prefix]()
    while waiting:
        child = waiting.pop()
        child.start = prefix.depth
        if not child.children or child.saves >= LEAST_SAVED * child.tokens:
            kept.append(child)
            continue
        if child.ends:
            kept.append(_Prefix(child.depth, child.row, child.ends))
        waiting += child.children
    return kept


def _laid_out(trees: Sequence[_Prefix], rows: int) -> Forest:
    """Give each prefix of these trees its segment."""
    lengths, parents, origins = list[int](), list[int](), list[tuple[int, int]]()
    ends = [ROOT] * rows
    waiting = [(prefix, ROOT) for prefix in reversed(trees)]
    while waiting:
        prefix, parent = waiting.pop()
        segment = len(lengths)
        lengths.append(prefix.depth - prefix.start)
        parents.append(parent)
        origins.append((prefix.row, prefix.start))
        for row in prefix.ends:
            ends[row] = segment
        waiting += [(child, segment) for child in reversed(prefix.children)]
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(int).tolist()
    return Forest(tuple(lengths), tuple(parents), tuple(origins), tuple(ends), tuple(starts))
