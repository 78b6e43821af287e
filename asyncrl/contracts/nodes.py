"""The nodes of a session. Each holds what one turn or some messages add to their parent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.contracts.rows import FINISH_REASONS, VersionSpan, check_spans

CONSTRAINED = "constrained"
"""Status of a turn whose tokens a grammar restricted, so that the policy did not choose them."""
ORPHAN = "orphan"
"""Status of a turn that its agent never received, or did not choose among several."""
NODE_STATUSES = ("ok", CONSTRAINED, ORPHAN)
"""Only tokens of `ok` turns are trained."""

REWRITTEN = "rewritten"
"""Class of a branch: no turn has the beginning of its chat, which has answers of the session. The
agent has changed or compacted it."""
SEPARATE = "separate"
"""The branch begins a chat of its own: another agent asks, or the agent begins anew."""
FORKED = "forked"
"""The branch goes on from a turn that another turn follows already."""
REPEATED = "repeated"
"""The branch repeats a request that has an answer, without a key that would name it."""
DRIFT = "drift"
"""The template does not prove what follows the turn before it."""
CUT = "cut"
"""The turn before it was cut in a tool call."""
HISTORY = "history"
"""`environment.history` is `template`, which would write the tokens before it in another way."""
BRANCHES = (REWRITTEN, SEPARATE, FORKED, REPEATED, DRIFT, CUT, HISTORY)


@dataclass(frozen=True, slots=True)
class Node:
    """What one turn, or the messages before it, add to their parent: T token ids.

    A turn has a behavior log-prob in nats for each token, and version spans that cover [0, T). Any
    other node is context: prompts, environment messages, and the tokens that a template adds.

    Raises:
        ValueError: lengths disagree, spans do not cover the tokens, context has log-probs or
            versions, or the status or the finish reason is unknown.

    Example:
        Node(None, (5, 6, 7)), Node(0, (8, 9), sampled=True, logprobs=(-0.1, -2.0),
        versions=(VersionSpan(3, 0, 2),), finish_reason="stop")
    """

    parent: int | None
    """Index of the parent among the session's nodes, below the node's own. None: a first node."""
    token_ids: tuple[int, ...]
    sampled: bool = False
    """Whether a turn sampled the tokens."""
    logprobs: tuple[float, ...] = ()
    versions: tuple[VersionSpan, ...] = ()
    status: str = "ok"
    finish_reason: str = ""
    """Finish reason of a turn. Empty for context."""
    branch_reason: str = ""
    """Why it is a branch: one of BRANCHES, a colon, and a line with the first token that differs.
    Empty if it is none."""
    replica: str = ""
    request_hash: str = ""
    """Hash of the body of a turn's request. Equal bodies have the same hash."""
    started_at: float = 0.0
    """Unix seconds by `steady_time`, as is `finished_at`."""
    finished_at: float = 0.0

    def __post_init__(self) -> None:
        if self.status not in NODE_STATUSES:
            raise ValueError(f"status {self.status!r} is not one of {NODE_STATUSES}")
        if not self.sampled:
            if self.logprobs or self.versions or self.finish_reason or self.status != "ok":
                raise ValueError(
                    "context has no log-probs, versions, finish reason or status; a turn does"
                )
            return
        if len(self.logprobs) != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} tokens have {len(self.logprobs)} log-probs")
        if self.finish_reason not in FINISH_REASONS:
            raise ValueError(f"finish reason {self.finish_reason!r} is not one of {FINISH_REASONS}")
        check_spans(self.versions, len(self.token_ids))


def branch_class(reason: str) -> str:
    """The class of a node's `branch_reason`."""
    return reason.partition(":")[0]


def check_nodes(nodes: Sequence[Node]) -> None:
    """Raise ValueError unless every parent comes before its node, and every first node is context
    with a token. The learner needs a token before the first one that it trains."""
    for index, node in enumerate(nodes):
        if node.parent is None:
            if node.sampled or not node.token_ids:
                raise ValueError(f"node {index} has no parent, so it must be context with a token")
        elif not 0 <= node.parent < index:
            raise ValueError(f"node {index} has parent {node.parent}, which is no node before it")
