"""Random agents of a session: whatever they do, every sampled token is trained exactly once, or is
masked with a named status."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
from chat_families import CHATML, STRIPS_THINKING
from session_model import NUMBERED, Model, read, user

from asyncrl.contracts.nodes import NODE_STATUSES, ORPHAN, Node, branch_class
from asyncrl.contracts.rows import Completion, VersionSpan
from asyncrl.contracts.session_table import flat_completion, nodes_of_group, turns_of_group
from asyncrl.contracts.text_listener import Heard
from asyncrl.sessions.answers import (
    Answer,
    ChatRequest,
    ContextTooLongError,
    SessionClosedError,
)
from asyncrl.sessions.session import Sampled, Session, SessionTemplate, TurnRequest
from asyncrl.sessions.session_rows import session_rows
from asyncrl.testing import VirtualTimeLoop
from asyncrl.text.chat_messages import Message

TEXTS = ("x", "yes no", "12 34", "<think>why</think>so")


@dataclass(slots=True)
class Turns:
    """A generator that is slow, fails, and notes what it makes."""

    model: Model
    draw: Random
    made: list[tuple[TurnRequest, Sampled, bool]] = field(default_factory=list)
    """Each completion, its request, and whether the session was open when it was done."""
    version: int = 0
    closed: bool = False

    async def generate(self, request: TurnRequest, heard: Heard | None = None) -> Sequence[Sampled]:
        self.version = max(self.version + self.draw.choice((0, 0, 1)), request.min_version or 0)
        await asyncio.sleep(self.draw.choice((0, 0, 1, 2, 5)))
        if self.draw.random() < 0.2:
            raise RuntimeError("the engine died")
        answers = []
        for _ in range(request.n):
            answers.append(self._sampled(request))
            self.made.append((request, answers[-1], not self.closed))
        return answers

    def _sampled(self, request: TurnRequest) -> Sampled:
        text = self.draw.choice(TEXTS)
        whole = (*self.model.tokenizer.encode(text, add_special_tokens=False), self.model.end)
        ids = whole[: request.max_tokens]
        # No two completions have the same log-probs, so each is known by them.
        logprobs = tuple(-len(self.made) - position / 64 for position in range(len(ids)))
        middle = self.draw.randrange(len(ids))
        spans = [(self.version, 0, middle), (self.version + 1, middle, len(ids))]
        versions = tuple(VersionSpan(*span) for span in spans if span[1] < span[2])
        finish = "stop" if ids == whole else "length"
        completion = Completion(ids, logprobs, versions, finish, self.model.text(ids))
        return Sampled(completion, "r", 0, 1, "constrained" if request.schema else "ok")


@dataclass(slots=True)
class Agent:
    """Asks several things at once, each as a client with its own history and its own faults."""

    session: Session
    turns: Turns
    draw: Random
    chats: list[list[Message]] = field(default_factory=lambda: [[]])
    asked: list[ChatRequest] = field(default_factory=list)
    """Requests with a key."""
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    """The answers of each key."""
    got: dict[int, bool] = field(default_factory=dict)
    """First choices that a client received → whether it kept them."""
    failed: set[str | None] = field(default_factory=set)
    """Keys whose last answer was an error."""
    events: Counter[str] = field(default_factory=Counter)

    def request(self) -> ChatRequest:
        draw = self.draw
        if self.asked and draw.random() < 0.2:  # a retry, which joins or repeats
            self.events["retry"] += 1
            return draw.choice(self.asked[-3:])
        if draw.random() < 0.05:
            return ChatRequest(prompt=draw.choice(("once", "once upon")), n=draw.choice((1, 2)))
        chat = list(draw.choice(self.chats[-3:]))
        if len(chat) > 1 and draw.random() < 0.15:
            chat[draw.randrange(len(chat))] = user("rewritten")
        elif len(chat) > 2 and draw.random() < 0.3:
            chat = [user("summary"), *chat[-1:]]
            self.events["compaction"] += 1
        if not chat or draw.random() < 0.9:
            chat.append(user(draw.choice("abc")))
        key = None if draw.random() < 0.5 else f"key {len(self.asked)}"
        request = ChatRequest(
            chat,
            n=draw.choice((1, 1, 1, 2, 3)),
            max_tokens=draw.choice((None, None, 1, 2)),
            key=key,
            schema={"type": "object"} if draw.random() < 0.1 else None,
        )
        if key is not None:
            self.asked.append(request)
        return request

    async def client(self) -> None:
        draw = self.draw
        for _ in range(draw.randint(1, 6)):
            await asyncio.sleep(draw.choice((0, 0, 1, 3)))
            request = self.request()
            patience = draw.choice((None, None, None, 0, 1, 2))
            try:
                async with asyncio.timeout(patience):
                    answers = await self.session.chat(request)
            except TimeoutError:
                self.events["canceled"] += 1
            except (RuntimeError, ContextTooLongError) as error:
                self.events[type(error).__name__] += 1
                self.failed.add(request.key)
            except asyncio.CancelledError:
                assert self.turns.closed
                self.events["canceled by the end"] += 1
                return
            else:
                self.take(request, answers)

    def take(self, request: ChatRequest, answers: list[Answer]) -> None:
        assert len(answers) == request.n
        if request.key is not None:
            assert self.answers.setdefault(request.key, answers) == answers, (
                "a retry is no new turn"
            )
            self.events["answered at last"] += request.key in self.failed
            self.failed.discard(request.key)
        self.got[answers[0].node] = True
        if self.draw.random() < 0.1:  # the connection broke while the answer was on its way
            self.session.abandon([answer.node for answer in answers])
            self.got[answers[0].node] = False
            self.events["abandoned"] += 1
            return
        start = request.messages if request.prompt is None else [user(request.prompt)]
        chosen = answers if self.draw.random() < 0.3 else [self.draw.choice(answers)]
        self.chats += [[*start, answer.message] for answer in chosen]

    async def play(self) -> None:
        clients = [asyncio.ensure_future(self.client()) for _ in range(self.draw.choice((1, 1, 3)))]
        if self.draw.random() < 0.3:
            await asyncio.sleep(self.draw.randint(1, 12))
            self.events["closed in the middle"] += any(not one.done() for one in clients)
        else:
            await asyncio.wait(clients)
        self.turns.closed = True
        self.session.close("deadline")
        before = self.session.nodes
        await asyncio.gather(*clients)
        await asyncio.sleep(100)  # what is under way ends, too late
        with pytest.raises(SessionClosedError, match="deadline"):
            await self.session.chat(ChatRequest([user("more")]))
        assert self.session.nodes == before, "nothing comes after the end"


def check_tokens(nodes: Sequence[Node], agent: Agent) -> None:
    """Every completion that was made in time is one turn, after the prompt of its request."""
    turns = {node.logprobs: node for node in nodes if node.sampled}
    assert len(turns) == sum(node.sampled for node in nodes), "a completion is two turns"
    kept = [(request, sampled) for request, sampled, in_time in agent.turns.made if in_time]
    assert len(kept) == len(turns)
    for request, sampled in kept:
        completion, node = sampled.completion, turns[sampled.completion.logprobs]
        assert (node.token_ids, node.versions) == (completion.token_ids, completion.versions)
        assert (node.finish_reason, node.replica) == (completion.finish_reason, "r")
        assert agent.session.tree.path_ids(node.parent) == request.prompt_ids
        assert (node.status == "constrained") == (request.schema is not None)
        assert node.request_hash


def check_rows(nodes: Sequence[Node], reason: str | None) -> None:
    """Every sampled token is trained exactly once, or is masked with a named status."""
    found = session_rows(nodes, reason)
    turns = [node for node in nodes if node.sampled]
    status = [reason or node.status for node in turns for _ in node.token_ids]
    ids = [token for node in turns for token in node.token_ids]
    trained: Counter[int] = Counter()
    for row in found.rows:
        positions = row.positions[row.trained].tolist()
        assert row.token_ids[row.trained].tolist() == [ids[position] for position in positions]
        trained.update(positions)
    assert trained == Counter(position for position, why in enumerate(status) if why == "ok")
    assert found.counts.masked == Counter(why for why in status if why != "ok")
    assert found.counts.trained + sum(found.counts.masked.values()) == len(status)
    assert set(status) <= {*NODE_STATUSES, "deadline"}


def check_statuses(nodes: Sequence[Node], agent: Agent) -> None:
    """What an agent received and kept is trained. What nobody received or continued is not, and
    neither is a choice beside one that was continued."""
    request_of = {one.completion.logprobs: id(request) for request, one, _ in agent.turns.made}
    continued = {node.parent for node in nodes if not node.sampled}
    choices: dict[int, list[int]] = {}
    for index, node in enumerate(nodes):
        if node.sampled:
            choices.setdefault(request_of[node.logprobs], []).append(index)
    for indices in choices.values():
        chosen = continued.intersection(indices)
        for index in indices:
            status = nodes[index].status
            if index in chosen:
                assert status != ORPHAN
            elif chosen or not agent.got.get(index):
                assert status != "ok"
            else:
                assert status != ORPHAN


def check_branches(nodes: Sequence[Node], agent: Agent) -> None:
    """A request is a branch exactly if it does not go on with a turn that nobody else follows, and
    its first turn has the reason."""
    request_of = {one.completion.logprobs: request for request, one, _ in agent.turns.made}
    seen: list[int] = []
    answered: set[int | None] = set()
    followed: set[int | None] = set()
    for node in nodes:
        if not node.sampled:
            continue
        assert node.parent is not None
        context, request = nodes[node.parent], id(request_of[node.logprobs])
        kind = branch_class(node.branch_reason or context.branch_reason)
        if request in seen:
            assert node.branch_reason == ""
            continue
        if node.parent in answered:
            assert kind == "repeated"
        elif context.branch_reason:
            assert kind in ("drift", "history") and node.branch_reason == ""
        elif context.parent is None:
            assert kind in (("rewritten", "separate") if seen else ("",))
        else:
            assert kind == ("forked" if context.parent in followed else "")
        if kind not in ("", "repeated"):
            assert "; token " in (node.branch_reason or context.branch_reason)
        seen.append(request)
        answered.add(node.parent)
        followed.add(context.parent)


def check_columns(nodes: Sequence[Node]) -> None:
    """The columns of a group's row have the same tokens."""
    completion, mask = flat_completion(nodes, "")
    spans = [{"version": s.version, "start": s.start, "end": s.end} for s in completion.versions]
    row: Any = {
        **turns_of_group([nodes]),
        "completion_ids": [completion.token_ids],
        "logprobs": [completion.logprobs],
        "versions": [spans],
    }
    (read_back,) = nodes_of_group(row)
    assert turns_of_group([read_back]) == turns_of_group([nodes])
    assert session_rows(read_back).counts == session_rows(nodes).counts
    assert session_rows(nodes).counts.trained == sum(mask)


async def play(template: SessionTemplate, model: Model, seed: int) -> tuple[Agent, Session]:
    draw = Random(seed)
    turns = Turns(model, draw)
    session = Session(template, turns, read)
    agent = Agent(session, turns, draw)
    await agent.play()
    return agent, session


@pytest.mark.parametrize("sessions", [500, pytest.param(2000, marks=pytest.mark.slow)])
def test_every_token_that_random_agents_sample_is_trained_once_or_masked(
    tmp_path: Path, sessions: int
) -> None:
    events: Counter[str] = Counter()
    templates = []
    for name, text in (("a", CHATML), ("b", CHATML), ("c", NUMBERED), ("d", STRIPS_THINKING)):
        model = Model(tmp_path / name, text, "<|im_end|>")
        history: Any = "template" if text == STRIPS_THINKING else "verbatim"
        ends = frozenset({model.end})
        templates.append((SessionTemplate(model.tokenizer, ends, 80, history), model))
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        for seed in range(sessions):
            try:
                agent, session = runner.run(play(*templates[seed % len(templates)], seed))
                check_tokens(session.nodes, agent)
                check_rows(session.nodes, "deadline" if seed % 10 == 0 else None)
                if seed % len(templates) < 2:  # the others go on in rows of their own
                    check_statuses(session.nodes, agent)
                check_branches(session.nodes, agent)
                check_columns(session.nodes)
            except BaseException as error:
                error.add_note(f"seed {seed}")
                raise
            events.update(agent.events)
            reasons = (node.branch_reason for node in session.nodes)
            events.update(branch_class(reason) for reason in reasons if reason)
    assert len(events) == 16 and min(events.values()) >= sessions // 50, events
