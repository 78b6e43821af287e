"""Requests find the turn that they continue."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from asyncrl.contracts.nodes import ORPHAN, Node
from asyncrl.contracts.rows import VersionSpan
from asyncrl.sessions.chat_digests import chat_digests
from asyncrl.sessions.session_rows import session_rows
from asyncrl.sessions.tree import Continued, SessionTree

Message = dict[str, Any]
SESSIONS = 200


def user(content: object) -> Message:
    return {"role": "user", "content": str(content)}


def assistant(content: object) -> Message:
    return {"role": "assistant", "content": str(content)}


@dataclass
class Served:
    """Requests of one session. Each context and each turn has one token, all different."""

    tree: SessionTree = field(default_factory=SessionTree)

    def ask(self, chat: list[Message], answer: object, version: int = 0) -> int:
        """Serve the request, and return the turn's index."""
        digests = chat_digests(chat)
        place = self.tree.find(digests)
        context = place.node
        if place.messages < len(chat):
            context = self.tree.add_context(Node(place.node, (self._token(),)), digests[-1])
        turn = Node(
            context,
            (self._token(),),
            sampled=True,
            logprobs=(-1.0,),
            versions=(VersionSpan(version, 0, 1),),
            finish_reason="stop",
        )
        return self.tree.add_turn(turn, chat_digests([*chat, assistant(answer)])[-1])

    def _token(self) -> int:
        return len(self.tree.nodes)


def test_each_request_continues_the_turn_before() -> None:
    served, chat = Served(), [user("a")]
    for number in range(4):
        turn = served.ask(chat, number, version=number)
        chat += [assistant(number), user(number)]
    assert [node.parent for node in served.tree.nodes] == [None, *range(7)]
    assert served.tree.path_ids(turn) == list(range(8))
    assert served.tree.newest_version(turn) == 3 and served.tree.newest_version(1) == 0
    assert served.tree.newest_version(0) is None and served.tree.newest_version(None) is None
    assert len(session_rows(served.tree.nodes).rows) == 1


def test_the_same_request_again_is_a_second_turn_of_one_context() -> None:
    served = Served()
    first, second = served.ask([user("a")], 1), served.ask([user("a")], 2)
    assert [node.parent for node in served.tree.nodes] == [None, 0, 0]
    third = served.ask([user("a"), assistant(1), user("b")], 3)
    assert served.tree.nodes[third].parent == 3 and served.tree.nodes[3].parent == first
    fourth = served.ask([user("a"), assistant(2), user("b")], 3)
    assert served.tree.nodes[5].parent == second and served.tree.nodes[fourth].parent == 5


def test_of_equal_answers_the_last_one_is_continued() -> None:
    served = Served()
    served.ask([user("a")], 1)
    second = served.ask([user("a")], 1)
    assert served.tree.find(chat_digests([user("a"), assistant(1), user("b")])) == Continued(
        second, 2
    )


def test_a_chat_without_an_answer_between_continues_nothing() -> None:
    served = Served()
    served.ask([user("a")], 1)
    assert served.tree.find(chat_digests([user("a"), user("b")])) == Continued(None, 0)
    assert served.tree.find(chat_digests([user("a"), assistant("forged"), user("b")])) == Continued(
        None, 0
    )


def test_a_rewritten_history_branches_where_it_changed() -> None:
    served = Served()
    first = served.ask([user("a")], 1)
    served.ask([user("a"), assistant(1), user("b")], 2)
    chat = [user("a"), assistant(1), user("other"), assistant(2), user("c")]
    assert served.tree.find(chat_digests(chat)) == Continued(first, 2)
    assert served.tree.find(chat_digests(chat, "tools")) == Continued(None, 0)


def test_a_status_can_change() -> None:
    served = Served()
    turn = served.ask([user("a")], 1)
    served.tree.set_status(turn, ORPHAN)
    assert served.tree.nodes[turn].status == ORPHAN
    assert session_rows(served.tree.nodes).counts.masked == {ORPHAN: 1}


def test_nodes_in_the_wrong_place_are_refused() -> None:
    served = Served()
    turn = served.ask([user("a")], 1)
    context, sampled = served.tree.nodes
    with pytest.raises(ValueError, match="at least one message"):
        served.tree.find([])
    with pytest.raises(ValueError, match="a turn was given as a context"):
        served.tree.add_context(sampled, b"x")
    with pytest.raises(ValueError, match="a context was given as a turn"):
        served.tree.add_turn(context, b"x")
    with pytest.raises(ValueError, match="the parent of a turn is the context of its request"):
        served.tree.add_turn(Node(turn, (), sampled=True, finish_reason="stop"), b"x")
    with pytest.raises(ValueError, match="node 9 is not one of 2"):
        served.tree.add_context(Node(9, (1,)), b"x")
    with pytest.raises(ValueError, match="the parent of a context is a turn"):
        served.tree.add_context(Node(0, (1,)), b"x")
    with pytest.raises(ValueError, match="node -1 is not one of 2"):
        served.tree.set_status(-1, ORPHAN)


def test_an_orphan_is_continued_only_if_no_other_turn_has_its_answer() -> None:
    served = Served()
    first, second = served.ask([user("a")], 1), served.ask([user("a")], 1)
    served.tree.set_status(second, ORPHAN)
    chat = [user("a"), assistant(1), user("b")]
    assert served.tree.find(chat_digests(chat)) == Continued(first, 2)
    served.tree.set_status(first, ORPHAN)
    served.ask(chat, 2)
    assert served.tree.nodes[second].status == "ok", "its agent got it after all"
    assert served.tree.nodes[first].status == ORPHAN


def test_random_agents_find_what_a_search_of_all_paths_finds() -> None:
    """Agents go on, sample again, go back, drop or rewrite messages, and start over."""
    draw = random.Random(0)
    branches = 0
    for _ in range(SESSIONS):
        served = Served()
        chats: dict[int, list[Message]] = {}  # by turn: its whole chat
        contexts: dict[str, int] = {}  # by request
        for _ in range(draw.randint(1, 12)):
            base = list(draw.choice([*chats.values()])) if chats else []
            if base and draw.random() < 0.6:
                base = list(chats[max(chats)])
            if base and draw.random() < 0.2:
                base[draw.randrange(len(base))] = user("rewritten")
            if base and draw.random() < 0.1:
                del base[draw.randrange(len(base))]
            chat = [*base, *(user(draw.randint(0, 1)) for _ in range(draw.randint(1, 2)))]
            beginnings = [
                (len(known), turn) for turn, known in chats.items() if chat[: len(known)] == known
            ]
            answer = draw.randint(0, 2)
            turn = served.ask(chat, answer)
            context = served.tree.nodes[turn].parent
            assert context is not None
            if str(chat) in contexts:
                assert context == contexts[str(chat)]
            else:
                expected = max(beginnings)[1] if beginnings else None
                assert served.tree.nodes[context].parent == expected
            contexts[str(chat)] = context
            chats[turn] = [*chat, assistant(answer)]
        found = session_rows(served.tree.nodes)
        assert found.counts.trained == len(chats)
        branches += len(found.rows) > 1
    assert branches > SESSIONS // 2
