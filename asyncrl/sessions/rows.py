"""The learner's rows of a session: one token sequence for each leaf of its tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from asyncrl.contracts.nodes import Node, check_nodes

__all__ = ["NOT_SAMPLED", "STALE", "SessionRow", "SessionRows", "TokenCounts", "session_rows"]

STALE = "stale"
"""Why a token of a version before the oldest allowed one is not trained."""
NOT_SAMPLED = -1
"""The version of a context token."""


@dataclass(frozen=True, slots=True, eq=False)
class SessionRow:
    """The path from a first node to a leaf, up to its last trained token: T tokens."""

    leaf: int
    """Index of the leaf among the session's nodes."""
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


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """What became of the sampled tokens of a session: `sampled` = `trained` + all of `masked`."""

    sampled: int
    """Sampled tokens, each counted once."""
    trained: int
    masked: Mapping[str, int]
    """Sampled tokens that are not trained, by reason."""
    repeated: int
    """Sampled tokens that a row has as context, because an earlier row trains them."""


@dataclass(frozen=True, slots=True)
class SessionRows:
    """The rows of a session that train at least one token, by leaf, and its token counts."""

    rows: tuple[SessionRow, ...]
    counts: TokenCounts


def session_rows(
    nodes: Sequence[Node], reason: str | None = None, oldest_version: int | None = None
) -> SessionRows:
    """Derive the learner's rows from the nodes of a session.

    Each leaf has a row. A turn that several leaves share is trained in the first of their rows, and
    is context in the others. So every sampled token is trained exactly once, or masked for a
    reason: the session's, else the status of its turn, else STALE.

    Args:
        reason: why no token of the session is trained, such as an error of its agent. None: its
            tokens are trained.
        oldest_version: tokens of earlier versions are masked. None: every version is trained.

    Raises:
        ValueError: a parent does not come before its node, or a first node is not context.
    """
    check_nodes(nodes)
    versions = [_versions(node) for node in nodes]
    masked: Counter[str] = Counter()
    trainable = [np.zeros(len(node.token_ids), dtype=bool) for node in nodes]
    for index, node in enumerate(nodes):
        if node.sampled:
            why = reason or (node.status if node.status != "ok" else None)
            if why is None:
                trainable[index] = versions[index] >= (oldest_version or 0)
            masked[why or STALE] += int((~trainable[index]).sum())
    rows: list[SessionRow] = []
    repeated = 0
    taken: set[int] = set()
    for leaf in _leaves(nodes):
        path = _path(nodes, leaf)
        own = {index for index in path if trainable[index].any()} - taken
        if own:
            masks = [trainable[i] if i in own else np.zeros_like(trainable[i]) for i in path]
            rows.append(_row(leaf, nodes, path, versions, masks))
            repeated += sum(int(trainable[index].sum()) for index in path if index not in own)
            taken |= own
    counts = TokenCounts(
        sampled=sum(len(node.token_ids) for node in nodes if node.sampled),
        trained=sum(int(mask.sum()) for mask in trainable),
        masked={name: count for name, count in masked.items() if count},
        repeated=repeated,
    )
    return SessionRows(tuple(rows), counts)


def _leaves(nodes: Sequence[Node]) -> list[int]:
    """The indices of the nodes without children."""
    parents = {node.parent for node in nodes}
    return [index for index in range(len(nodes)) if index not in parents]


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


def _row(
    leaf: int,
    nodes: Sequence[Node],
    path: Sequence[int],
    versions: Sequence[np.ndarray],
    masks: Sequence[np.ndarray],
) -> SessionRow:
    lengths = [len(nodes[index].token_ids) for index in path]
    trained = np.concatenate(masks)
    end = int(np.flatnonzero(trained)[-1]) + 1
    logprobs = [nodes[index].logprobs or (0.0,) * len(nodes[index].token_ids) for index in path]
    return SessionRow(
        leaf,
        np.concatenate([np.array(nodes[i].token_ids, dtype=np.int64) for i in path])[:end],
        trained[:end],
        np.concatenate([np.array(part, dtype=np.float32) for part in logprobs])[:end],
        np.concatenate([versions[index] for index in path])[:end],
        np.repeat(np.array(path, dtype=np.int32), lengths)[:end],
    )
