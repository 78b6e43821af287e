"""The learner's rows of sessions, by hand and on random trees."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from asyncrl.contracts.nodes import CONSTRAINED, NODE_STATUSES, ORPHAN, Node
from asyncrl.contracts.rows import VersionSpan
from asyncrl.sessions.session_rows import NO_POSITION, NOT_SAMPLED, SessionRows, session_rows

TREES = 2000


def context(parent: int | None, *ids: int) -> Node:
    return Node(parent, ids)


def turn(parent: int, *ids: int, version: int = 0, status: str = "ok") -> Node:
    return Node(
        parent,
        ids,
        sampled=True,
        logprobs=tuple(-float(token) for token in ids),
        versions=(VersionSpan(version, 0, len(ids)),) if ids else (),
        status=status,
        finish_reason="stop",
    )


def test_a_chain_is_one_row_whose_last_context_is_cut() -> None:
    nodes = [context(None, 1, 2), turn(0, 3, 4, version=5), context(1, 6), turn(2, 7, version=6)]
    nodes.append(context(3, 8, 9))
    (row,) = session_rows(nodes).rows
    assert row.leaf == 3
    assert row.token_ids.tolist() == [1, 2, 3, 4, 6, 7]
    assert row.trained.tolist() == [False, False, True, True, False, True]
    assert row.logprobs.tolist() == [0, 0, -3, -4, 0, -7]
    assert row.versions.tolist() == [NOT_SAMPLED, NOT_SAMPLED, 5, 5, NOT_SAMPLED, 6]
    assert row.nodes.tolist() == [0, 0, 1, 1, 2, 3]
    counts = session_rows(nodes).counts
    assert (counts.sampled, counts.trained, counts.masked, counts.repeated) == (3, 3, {}, 0)


def test_a_shared_turn_is_trained_in_the_row_of_its_first_leaf() -> None:
    nodes = [context(None, 1), turn(0, 2), context(1, 3), turn(2, 4), context(1, 5), turn(4, 6)]
    first, second = session_rows(nodes).rows
    assert (first.token_ids.tolist(), first.trained.tolist()) == ([1, 2, 3, 4], [0, 1, 0, 1])
    assert (second.token_ids.tolist(), second.trained.tolist()) == ([1, 2, 5, 6], [0, 0, 0, 1])
    assert second.logprobs.tolist() == [0, -2, 0, -6]
    counts = session_rows(nodes).counts
    assert (counts.sampled, counts.trained, counts.repeated) == (3, 3, 1)


def test_orphans_and_requests_without_an_answer_have_no_row() -> None:
    nodes = [context(None, 1)]
    for _ in range(5):
        last = len(nodes) - 1
        nodes.append(turn(last, 9, status=ORPHAN))
        nodes.append(turn(last, 2))
        nodes.append(context(len(nodes) - 1, 3))
        nodes.append(context(len(nodes) - 2, 4))
    (row,) = session_rows(nodes).rows
    assert row.trained.sum() == 5 and session_rows(nodes).counts.repeated == 0


def test_turns_that_are_not_ok_are_context_with_a_reason() -> None:
    nodes = [
        context(None, 1),
        turn(0, 2, 2, status=CONSTRAINED),
        context(1, 3),
        turn(2, 4),
        turn(0, 5, 5, 5, status=ORPHAN),
    ]
    (row,) = session_rows(nodes).rows
    assert (row.token_ids.tolist(), row.trained.tolist()) == ([1, 2, 2, 3, 4], [0, 0, 0, 0, 1])
    counts = session_rows(nodes).counts
    assert (counts.sampled, counts.trained) == (6, 1)
    assert counts.masked == {CONSTRAINED: 2, ORPHAN: 3}


def test_a_failed_session_trains_nothing_and_says_why() -> None:
    nodes = [context(None, 1), turn(0, 2, 3), turn(0, 4, status=ORPHAN)]
    found = session_rows(nodes, reason="agent_error")
    assert found.rows == ()
    assert found.counts.masked == {"agent_error": 3} and found.counts.sampled == 3


@pytest.mark.parametrize(
    ("nodes", "error"),
    [
        ([context(0, 1)], "node 0 has parent 0, which is no node before it"),
        ([context(None, 1), context(2, 1), context(0, 1)], "node 1 has parent 2"),
        ([context(None)], "node 0 has no parent, so it must be context with a token"),
        ([replace(turn(0, 1), parent=None)], "node 0 has no parent"),
    ],
)
def test_a_tree_out_of_order_is_refused(nodes: list[Node], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        session_rows(nodes)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"logprobs": (-1.0,)}, "2 tokens have 1 log-probs"),
        ({"versions": (VersionSpan(0, 0, 1),)}, "version spans cover 1 of 2 tokens"),
        ({"status": "lost"}, "status 'lost' is not one of"),
        ({"finish_reason": ""}, "finish reason '' is not one of"),
        ({"sampled": False}, "context has no log-probs"),
    ],
)
def test_a_node_whose_parts_disagree_is_refused(fields: dict[str, object], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        replace(turn(0, 1, 2), **fields)  # type: ignore[arg-type]


def random_tree(random: np.random.Generator) -> list[Node]:
    """A session with retries, deaths, cancellations and rewritten histories. Every token of it has
    an id of its own."""
    nodes: list[Node] = []
    tokens = iter(range(10_000))

    def take(most: int, least: int = 0) -> tuple[int, ...]:
        return tuple(next(tokens) for _ in range(random.integers(least, most + 1)))

    for _ in range(random.integers(1, 25)):
        if not nodes or random.random() < 0.05:  # another agent, or a compacted history
            nodes.append(Node(None, take(5, 1)))
            continue
        # Mostly the last node goes on. Any other one is a branch.
        last = random.random() < 0.7
        parent = len(nodes) - 1 if last else int(random.integers(len(nodes)))
        if not nodes[parent].sampled and random.random() < 0.8:
            ids = take(6)
            cuts = sorted(random.choice(len(ids) + 1, size=2)) if len(ids) else []
            edges = sorted({0, *map(int, cuts), len(ids)})
            version = int(random.integers(4))
            spans = tuple(
                VersionSpan(version + at, start, end)
                for at, (start, end) in enumerate(pairwise(edges))
            )
            nodes.append(
                Node(
                    parent,
                    ids,
                    sampled=True,
                    logprobs=tuple(-float(token) for token in ids),
                    versions=spans,
                    status=str(random.choice(NODE_STATUSES, p=(0.8, 0.1, 0.1))),
                    finish_reason=str(random.choice(["stop", "length", "abort"])),
                )
            )
        else:
            nodes.append(Node(parent, take(4)))
    return nodes


def check(nodes: list[Node], found: SessionRows, reason: str | None) -> None:
    """Compare with what each token says of itself, by its own id."""
    versions = {
        node.token_ids[place]: span.version
        for node in nodes
        for span in node.versions
        for place in range(span.start, span.end)
    }
    why = {
        token: reason or (node.status if node.status != "ok" else None)
        for node in nodes
        if node.sampled
        for token in node.token_ids
    }
    trained: Counter[int] = Counter()
    ends = [row.leaf for row in found.rows]
    assert ends == sorted(set(ends))
    paths = [tuple(row.token_ids.tolist()) for row in found.rows]
    sampled = [token for node in nodes if node.sampled for token in node.token_ids]
    assert not any(a != b and b[: len(a)] == a for a in paths for b in paths), "a row in a row"
    for row in found.rows:
        ids = row.token_ids.tolist()
        assert tuple(ids) == sequence_to(nodes, row.leaf)
        assert row.trained[-1] and not row.trained[0]
        before = {
            token for other in found.rows if other.leaf < row.leaf for token in other.token_ids
        }
        own = [token for token in ids if why.get(token, "context") is None]
        expected = [token for token in own if token not in before]
        assert row.token_ids[row.trained].tolist() == expected, "the first row trains a token"
        trained.update(row.token_ids[row.trained].tolist())
        assert row.prompt_length == row.trained.tolist().index(True)
        columns = (row.logprobs, row.versions, row.nodes, row.positions)
        for token, logprob, version, node, place in zip(
            ids, *(column.tolist() for column in columns), strict=True
        ):
            assert place == (sampled.index(token) if token in versions else NO_POSITION)
            assert version == versions.get(token, NOT_SAMPLED)
            assert logprob == (-float(token) if token in versions else 0)
            assert token in nodes[node].token_ids
    assert trained == Counter(token for token, reason in why.items() if reason is None)
    counts = found.counts
    assert counts.masked == Counter(reason for reason in why.values() if reason is not None)
    assert counts.trained == trained.total()
    assert counts.sampled == counts.trained + sum(counts.masked.values()) == len(why)
    in_rows = sum(token in trained for row in found.rows for token in row.token_ids.tolist())
    assert in_rows == counts.trained + counts.repeated


def sequence_to(nodes: list[Node], leaf: int) -> tuple[int, ...]:
    node = nodes[leaf]
    before = () if node.parent is None else sequence_to(nodes, node.parent)
    return before + node.token_ids


def test_every_sampled_token_is_trained_once_or_masked_with_a_reason() -> None:
    random = np.random.default_rng(0)
    branched = repeated = 0
    for _ in range(TREES):
        nodes = random_tree(random)
        reason = "deadline" if random.random() < 0.1 else None
        found = session_rows(nodes, reason)
        check(nodes, found, reason)
        branched += len(found.rows) > 1
        repeated += found.counts.repeated > 0
    assert branched > TREES // 4 and repeated > TREES // 10
