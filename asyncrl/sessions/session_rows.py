"""The learner's rows of a session: one token sequence for each leaf of its tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from asyncrl.contracts.nodes import Node, check_nodes

NOT_SAMPLED = -1
"""The version of a context token."""
NO_POSITION = -1
"""The position of a context token."""


@dataclass(frozen=True, slots=True, eq=False)
class SessionRow:
    """The path from a first node to a turn that is trained: T tokens."""

    leaf: int
    """Index of this turn's node among the session's nodes."""
    token_ids: np.ndarray
    """[T] int64."""
    trained: np.ndarray
    """[T] bool. The first token is never trained."""
    logprobs: np.ndarray
    """[T] float32, nats, by the behavior policy. 0 at context tokens."""
    versions: np.ndarray
    """[T] int32. NOT_SAMPLED at context tokens."""
    nodes: np.ndarray
    """[T] int32: index of each token's node among the session's nodes."""
    positions: np.ndarray
    """[T] int64: index of each token among the session's sampled tokens, turn after turn, as
    `asyncrl.contracts.session_table.flat_completion` has them. NO_POSITION at context tokens."""

    @property
    def prompt_length(self) -> int:
        """Tokens before the first trained one."""
        return int(np.flatnonzero(self.trained)[0])


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """What became of the sampled tokens of a session. `sampled` = `trained` + all of `masked`."""

    sampled: int
    """Sampled tokens, each counted once."""
    trained: int
    masked: Mapping[str, int]
    """Sampled tokens that are not trained, by reason."""
    repeated: int
    """Tokens that a row has as context, because an earlier row trains them."""


@dataclass(frozen=True, slots=True)
class SessionRows:
    """The rows of a session, by leaf, and its token counts."""

    rows: tuple[SessionRow, ...]
    counts: TokenCounts


def session_rows(nodes: Sequence[Node], reason: str | None = None) -> SessionRows:
    """Derive the learner's rows from the nodes of a session.

    A row leads to each trained turn that no other trained turn continues. A turn that several rows
    share is trained in the first of them, and is context in the others. So every sampled token is
    trained exactly once, or masked for a reason: the session's, else the status of its turn.

    Args:
        reason: why no token of the session is trained, such as an error of its agent. None: its
            tokens are trained.

    Raises:
        ValueError: a parent does not come before its node, or a first node is not context.
    """
    check_nodes(nodes)
    masked: Counter[str] = Counter()
    trained = 0
    trains: set[int] = set()
    for index, node in enumerate(nodes):
        if not node.sampled or not node.token_ids:
            continue
        if reason is None and node.status == "ok":
            trains.add(index)
            trained += len(node.token_ids)
        else:
            masked[reason or node.status] += len(node.token_ids)
    begins = _begins(nodes)
    rows: list[SessionRow] = []
    left = set(trains)
    for leaf in _last_of(trains, nodes):
        path = _path(nodes, leaf)
        own = left.intersection(path)
        rows.append(_row(leaf, nodes, path, own, begins))
        left -= own
    repeated = repeated_tokens(
        [-1 if node.parent is None else node.parent for node in nodes],
        [len(node.token_ids) if index in trains else 0 for index, node in enumerate(nodes)],
    )
    counts = TokenCounts(trained + masked.total(), trained, dict(masked), repeated)
    return SessionRows(tuple(rows), counts)


def repeated_tokens(parents: Sequence[int], trained: Sequence[int]) -> int:
    """`TokenCounts.repeated`, from a tree alone: tokens that rows repeat after the first one.

    Args:
        parents: of each node, an earlier one; -1 for none.
        trained: the tokens of each node that are trained.
    """
    leaves = [0] * len(parents)
    repeated = 0
    for index in range(len(parents) - 1, -1, -1):
        if trained[index]:
            leaves[index] = max(1, leaves[index])
            repeated += trained[index] * (leaves[index] - 1)
        if parents[index] >= 0:
            leaves[parents[index]] += leaves[index]
    return repeated


def _last_of(trains: Set[int], nodes: Sequence[Node]) -> list[int]:
    """The trained nodes without a trained one after them on any path, in order."""
    continued: set[int] = set()
    for index in range(len(nodes) - 1, -1, -1):
        parent = nodes[index].parent
        if parent is not None and (index in trains or index in continued):
            continued.add(parent)
    return sorted(trains - continued)


def _versions(node: Node) -> np.ndarray:
    """The version of each token of a node."""
    if not node.sampled:
        return np.full(len(node.token_ids), NOT_SAMPLED, dtype=np.int32)
    spans = node.versions
    return np.repeat(
        np.array([span.version for span in spans], dtype=np.int32),
        [span.end - span.start for span in spans],
    )


def _path(nodes: Sequence[Node], leaf: int) -> list[int]:
    """The indices of the nodes from the first one to the leaf."""
    path: list[int] = []
    at: int | None = leaf
    while at is not None:
        path.append(at)
        at = nodes[at].parent
    return path[::-1]


def _begins(nodes: Sequence[Node]) -> list[int]:
    """For each turn, the sampled tokens of the turns before it."""
    lengths = [len(node.token_ids) if node.sampled else 0 for node in nodes]
    return [0, *accumulate(lengths)][:-1]


def _positions(node: Node, begin: int) -> np.ndarray:
    """The position of each token of a node whose sampled tokens begin at `begin`."""
    count = len(node.token_ids)
    return np.arange(begin, begin + count) if node.sampled else np.full(count, NO_POSITION)


def _row(
    leaf: int, nodes: Sequence[Node], path: Sequence[int], own: Set[int], begins: Sequence[int]
) -> SessionRow:
    """The row of a path, which trains the nodes `own`.

    Args:
        begins: by `_begins`.
    """
    members = [nodes[index] for index in path]
    lengths = [len(node.token_ids) for node in members]
    return SessionRow(
        leaf,
        np.concatenate([np.array(node.token_ids, dtype=np.int64) for node in members]),
        np.repeat([index in own for index in path], lengths),
        np.concatenate(
            [
                np.array(node.logprobs or (0.0,) * len(node.token_ids), np.float32)
                for node in members
            ]
        ),
        np.concatenate([_versions(node) for node in members]),
        np.repeat(np.array(path, dtype=np.int32), lengths),
        np.concatenate([_positions(nodes[index], begins[index]) for index in path]),
    )
