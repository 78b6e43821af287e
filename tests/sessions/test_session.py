"""Agents of several kinds talk to a session. It keeps the tokens that were sampled."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from chat_families import CHATML, HEADERS, STRIPS_THINKING, TOOLS
from session_model import NUMBERED, Model, assistant, user

from asyncrl.contracts.nodes import ORPHAN
from asyncrl.contracts.rows import Completion
from asyncrl.sessions.answers import Answer, ChatRequest, ContextTooLongError, SessionClosedError
from asyncrl.sessions.session import Session, SessionTemplate
from asyncrl.sessions.session_rows import session_rows
from asyncrl.testing import FakeTurnGenerator
from asyncrl.text.chat_messages import Message, MessagesError


@pytest.fixture
def chatml(tmp_path: Path) -> Model:
    return Model(tmp_path, CHATML, "<|im_end|>")


def counted(number: int) -> str:
    return f"answer {number}"


async def talk(session: Session, questions: Sequence[str], **options: Any) -> list[Message]:
    """Ask one question after the other, as an agent with a growing history does."""
    chat: list[Message] = []
    for question in questions:
        chat.append(user(question))
        (answer,) = await session.chat(ChatRequest(chat, **options))
        chat.append(answer.message)
    return chat


@pytest.mark.parametrize(("template", "end"), [(CHATML, "<|im_end|>"), (HEADERS, "<|eot|>")])
async def test_a_growing_chat_is_one_row_of_the_templates_own_tokens(
    tmp_path: Path, template: str, end: str
) -> None:
    model = Model(tmp_path, template, end)
    session, generator = model.session(counted)
    chat = await talk(session, ["a", "b", "c", "d"])
    (row,) = session_rows(session.nodes).rows
    whole = model.tokenizer.apply_chat_template(chat, tokenize=False)
    assert model.text(row.token_ids.tolist()) == whole.rstrip("\n")
    sampled = row.token_ids[row.trained].tolist()
    assert model.text(sampled) == "".join(f"answer {number}{end}" for number in range(4))
    assert [request.turn for request in generator.requests] == [0, 1, 2, 3]
    assert [request.answered for request in generator.requests] == [0] * 4
    assert not any(node.branch_reason for node in session.nodes)
    for before, after in zip(generator.requests, generator.requests[1:], strict=False):
        assert after.prompt_ids[: len(before.prompt_ids)] == before.prompt_ids


async def test_the_next_turn_asks_for_the_newest_version_before_it(chatml: Model) -> None:
    session, generator = chatml.session(counted)

    chat: list[Message] = []
    for version in (3, 5, 5, 6):
        generator.version = version
        chat.append(user("q"))
        chat.append((await session.chat(ChatRequest(chat)))[0].message)
    assert [request.min_version for request in generator.requests] == [None, 3, 5, 5]


async def test_reasoning_that_a_template_strips_stays_in_verbatim_history(tmp_path: Path) -> None:
    model = Model(tmp_path, STRIPS_THINKING, "<|im_end|>")

    def think(number: int) -> str:
        return f"<think>why {number}</think>so {number}"

    session, _ = model.session(think)
    await talk(session, ["a", "b", "c"])
    (row,) = session_rows(session.nodes).rows
    assert model.text(row.token_ids.tolist()).count("<think>why") == 3
    session, _ = model.session(think, history="template")
    await talk(session, ["a", "b", "c"])
    rows = session_rows(session.nodes).rows
    assert len(rows) == 3 and all(row.trained.sum() for row in rows)
    reasons = [node.branch_reason for node in session.nodes if node.branch_reason]
    assert len(reasons) == 2
    assert all(
        reason.startswith("history: the template writes earlier turns in another way; token ")
        and reason.endswith("('<think>')")
        and reason.count("token ") == 1
        for reason in reasons
    )
    assert session_rows(session.nodes).counts.masked == {}


NEEDS_TOOLS = "{% if not tools %}{{ raise_exception('no tools') }}{% endif %}" + TOOLS


@pytest.mark.parametrize(
    ("template", "unseen"), [(CHATML, 2), (TOOLS, 0), (NEEDS_TOOLS, 0)], ids=["no", "yes", "always"]
)
async def test_requests_whose_tools_the_template_leaves_out_are_counted(
    tmp_path: Path, template: str, unseen: int
) -> None:
    session, _ = Model(tmp_path, template, "<|im_end|>").session(counted)
    add = {"type": "function", "function": {"name": "add"}}
    await talk(session, ["a", "b"], tools=[add])
    assert session.unseen_tools == unseen
    if template != NEEDS_TOOLS:
        await talk(session, ["c"])
        assert session.unseen_tools == unseen


def branch_of(
    model: Model, session: Session, answer: Answer, beside: int | None
) -> tuple[str, str, int]:
    """Class, reason and place of an answer's branch. The reason names the first token of its prompt
    that is not on the path to the turn `beside`."""
    node = session.nodes[answer.node]
    assert node.parent is not None
    reason = node.branch_reason or session.nodes[node.parent].branch_reason
    kind, why, token = re.fullmatch(r"(\w+): ([^;]*)(?:; (.*))?", reason).groups()  # type: ignore[union-attr]
    if beside is None:
        assert token is None
        return kind, why, -1
    was, now = session.tree.path_ids(beside), session.tree.path_ids(node.parent)
    place, found, before = next(
        (place, *both) for place, both in enumerate(zip_longest(now, was)) if both[0] != both[1]
    )
    found, before = (
        "none" if one is None else f"{one} ({model.text([one])!r})" for one in (found, before)
    )
    assert token == f"token {place} is {found}, and was {before}"
    return kind, why, place


async def test_a_branch_names_its_class_and_the_first_token_that_differs(chatml: Model) -> None:
    session, generator = chatml.session(counted)

    rules = {"role": "system", "content": "rules"}
    first = await session.chat(ChatRequest([rules, user("a")]))
    chat = [rules, user("a"), first[0].message]
    second = await session.chat(ChatRequest([*chat, user("b")]))
    assert not any(node.branch_reason for node in session.nodes)
    # The last message is another one.
    (edited,) = await session.chat(ChatRequest([*chat, user("c")]))
    kind, why, place = branch_of(chatml, session, edited, second[0].node)
    assert (kind, why) == ("forked", "another turn follows the turn before it")
    assert place > len(session.tree.path_ids(first[0].node))
    (third,) = await session.chat(ChatRequest([*chat, user("cd")]))
    assert branch_of(chatml, session, third, edited.node)[0] == "forked"
    # The history is compacted: all but the rules and an answer.
    summary = [rules, user("summary"), first[0].message, user("sum")]
    (compacted,) = await session.chat(ChatRequest(summary))
    kind, why, place = branch_of(chatml, session, compacted, third.node)
    assert (kind, why) == ("rewritten", "no turn has the beginning of the chat")
    assert 3 < place < len(generator.requests[0].prompt_ids)
    # Another agent with another system prompt.
    (other,) = await session.chat(ChatRequest([user("else"), user("d")]))
    kind, _, place = branch_of(chatml, session, other, compacted.node)
    assert kind == "separate" and place < 3
    # Both agents go on.
    for before in (compacted, other):
        start = [user("else"), user("d")] if before is other else summary
        (after,) = await session.chat(ChatRequest([*start, before.message, user("on")]))
        assert session.nodes[after.node].branch_reason == ""
    again = await session.chat(ChatRequest([rules, user("a")], n=2))
    assert branch_of(chatml, session, again[0], None)[0] == "repeated"
    assert session.nodes[again[1].node].branch_reason == "", "a request is one branch"
    (text,) = await session.chat(ChatRequest(prompt="once"))
    assert branch_of(chatml, session, text, again[1].node)[0] == "separate"
    (more,) = await session.chat(ChatRequest(prompt=f"x{text.message['content']}"))
    assert branch_of(chatml, session, more, text.node)[0] == "rewritten"


TWO_TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in "ab"]


def system(text: str) -> Message:
    return {"role": "system", "content": text}


@pytest.mark.parametrize(
    ("second", "tools", "kind"),
    [
        ([system("critic"), user("is 1 right?")], None, "separate"),
        ([system("solver"), user("another question")], None, "separate"),  # a worker like the first
        ([user("quoted: 1")], None, "separate"),
        # Examples for the second agent.
        ([system("critic"), user("x"), {"role": "assistant", "content": "y"}], None, "separate"),
        # A handoff has another prompt and other tools.
        ([system("critic"), user("q"), "answer", user("go on")], TWO_TOOLS[1:], "separate"),
        # The same agent with the time in its prompt, or with other tools.
        (
            [system("solver at 12:01"), user("q"), "answer", user("go on")],
            TWO_TOOLS[:1],
            "rewritten",
        ),
        ([system("solver"), user("q"), "answer", user("go on")], TWO_TOOLS[1:], "rewritten"),
        # An agent that writes its answers in another way.
        (
            [system("solver"), user("q"), {"role": "assistant", "content": "I said 1"}],
            TWO_TOOLS[:1],
            "rewritten",
        ),
        ([system("solver"), user("summary"), "answer"], TWO_TOOLS[:1], "rewritten"),
    ],
)
async def test_a_second_agent_is_no_rewritten_chat(
    chatml: Model, second: list[Any], tools: Any, kind: str
) -> None:
    session, _ = chatml.session(counted)

    chat = [system("solver"), user("q")]
    (answer,) = await session.chat(ChatRequest(chat, TWO_TOOLS[:1]))
    asked = [answer.message if one == "answer" else one for one in second] + [user("?")]
    (other,) = await session.chat(ChatRequest(asked, tools))
    assert session.nodes[other.node].branch_reason.startswith(f"{kind}: ")
    # Both go on, and are no branches.
    for before, had, given in ((answer, chat, TWO_TOOLS[:1]), (other, asked, tools)):
        (on,) = await session.chat(ChatRequest([*had, before.message, user("on")], given))
        assert session.nodes[on.node].branch_reason == ""


async def test_where_the_template_does_not_go_on_the_turn_before_says_the_token(
    tmp_path: Path,
) -> None:
    model = Model(tmp_path, NUMBERED, "<|im_end|>")
    session, _ = model.session(counted)

    (first,) = await session.chat(ChatRequest([user("a")]))
    (second,) = await session.chat(ChatRequest([user("a"), first.message, user("b")]))
    kind, why, place = branch_of(model, session, second, first.node)
    assert kind == "drift" and "messages before the turn in another way" in why
    assert place == 1  # the number of messages


async def test_a_turn_that_was_cut_in_a_tool_call_has_a_branch_of_its_own(tmp_path: Path) -> None:
    model = Model(tmp_path, TOOLS, "<|im_end|>")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

    def reads(prompt_ids: object, completion: Completion, tools: object) -> Message:
        return {**assistant(""), "tool_calls": [call]}

    generator = FakeTurnGenerator(model.tokenizer, lambda number: "call f and more", model.end)
    template = SessionTemplate(model.tokenizer, frozenset({model.end}), 500)
    session = Session(template, generator, reads)

    (first,) = await session.chat(ChatRequest([user("a")], max_tokens=2))
    done = {"role": "tool", "tool_call_id": "1", "content": "done"}
    (second,) = await session.chat(ChatRequest([user("a"), first.message, done]))
    kind, why, place = branch_of(model, session, second, first.node)
    assert (kind, why) == ("cut", "the turn was cut after a tool call")
    assert place > len(generator.requests[0].prompt_ids)


async def test_a_request_without_an_answer_makes_no_branch(chatml: Model) -> None:
    session, _ = chatml.session(counted, fails=lambda number: number in (0, 1, 3))

    for _ in range(2):
        with pytest.raises(RuntimeError):
            await session.chat(ChatRequest([user("a")]))
    (first,) = await session.chat(ChatRequest([user("other")]))
    chat = [user("other"), first.message]
    with pytest.raises(RuntimeError):
        await session.chat(ChatRequest([*chat, user("b")]))
    await session.chat(ChatRequest([*chat, user("c")]))
    assert not any(node.branch_reason for node in session.nodes)


async def test_a_turn_that_was_cut_is_closed_by_context(chatml: Model) -> None:
    session, _ = chatml.session(counted)
    chat = await talk(session, ["a", "b"], max_tokens=3)
    (row,) = session_rows(session.nodes).rows
    text = chatml.text(row.token_ids.tolist())
    assert f"{chat[1]['content']}<|im_end|>\n<|im_start|>user\nb" in text
    ends = row.token_ids == chatml.end
    assert not (ends & row.trained).any(), "the model sampled no end"
    assert row.trained.sum() == 6


async def test_a_retry_joins_or_repeats_the_answer_and_an_equal_body_does_not(
    chatml: Model,
) -> None:
    session, generator = chatml.session(counted, latency=lambda number: 0.01)

    chat = [user("a")]
    first, second = await asyncio.gather(
        session.chat(ChatRequest(chat, key="k")), session.chat(ChatRequest(chat, key="k"))
    )
    third = await session.chat(ChatRequest(chat, key="k"))
    assert first == second == third and len(generator.requests) == 1
    fourth = await session.chat(ChatRequest(chat))
    assert fourth[0].node != first[0].node
    assert [request.answered for request in generator.requests] == [0, 1]
    assert [node.parent for node in session.nodes] == [None, 0, 0]


async def test_a_client_that_leaves_does_not_end_what_its_retry_gets(chatml: Model) -> None:
    session, generator = chatml.session(counted, latency=lambda number: 0.05)

    chat = [user("a")]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await session.chat(ChatRequest(chat, key="k"))
    (answer,) = await session.chat(ChatRequest(chat, key="k"))
    assert answer.message == assistant("answer 0")
    assert len(generator.requests) == 1 and len(session.nodes) == 2


async def test_a_failed_answer_is_asked_for_again(chatml: Model) -> None:
    session, generator = chatml.session(counted, fails=lambda number: number == 0)

    with pytest.raises(RuntimeError, match="answer 0 failed"):
        await session.chat(ChatRequest([user("a")], key="k"))
    (answer,) = await session.chat(ChatRequest([user("a")], key="k"))
    assert answer.message == assistant("answer 1")
    assert [request.answered for request in generator.requests] == [0, 1]


async def test_choices_that_are_not_taken_become_orphans(chatml: Model) -> None:
    session, _ = chatml.session(counted)

    answers = await session.chat(ChatRequest([user("a")], n=3))
    await session.chat(ChatRequest([user("a"), answers[1].message, user("b")]))
    counts = session_rows(session.nodes).counts
    assert [node.status for node in session.nodes[1:4]] == [ORPHAN, "ok", ORPHAN]
    assert set(counts.masked) == {ORPHAN} and len(session_rows(session.nodes).rows) == 1


async def test_of_several_choices_the_first_counts_until_another_is_continued(
    chatml: Model,
) -> None:
    session, _ = chatml.session(counted)
    answers = await session.chat(ChatRequest([user("a")], n=3))
    assert [node.status for node in session.nodes[1:4]] == ["ok", ORPHAN, ORPHAN]
    assert session.chat_so_far[-1] == answers[0].message
    both = [session.chat(ChatRequest([user("a"), one.message, user("b")])) for one in answers[:2]]
    for chat in both:
        await chat
    assert [node.status for node in session.nodes[1:4]] == ["ok", "ok", ORPHAN]


async def test_the_end_of_a_session_cancels_what_is_under_way(chatml: Model) -> None:
    session, _ = chatml.session(counted, latency=lambda number: 60)

    async with asyncio.timeout(10):
        asking = asyncio.ensure_future(session.chat(ChatRequest([user("a")], key="1")))
        await asyncio.sleep(0.01)
        session.close("it has ended")
        with pytest.raises(asyncio.CancelledError):
            await asking
    assert session_rows(session.nodes).counts.sampled == 0


async def test_turns_that_no_client_got_become_orphans(chatml: Model) -> None:
    session, _ = chatml.session(counted, latency=lambda number: 0.05)

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(session.chat(ChatRequest([user("a")], key="1")), 0.01)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(session.chat(ChatRequest([user("b")], key="2")), 0.01)
    await session.chat(ChatRequest([user("b")], key="2"))  # its retry gets the answer
    session.close("it has ended")
    statuses = [node.status for node in session.nodes if node.sampled]
    assert sorted(statuses) == ["ok", ORPHAN]
    assert set(session_rows(session.nodes).counts.masked) == {ORPHAN}


async def test_an_abandoned_turn_counts_again_once_a_request_continues_it(chatml: Model) -> None:
    session, _ = chatml.session(counted)
    (answer,) = await session.chat(ChatRequest([user("a")]))
    session.abandon([answer.node])
    assert session.nodes[answer.node].status == ORPHAN
    await session.chat(ChatRequest([user("a"), answer.message, user("b")]))
    assert session.nodes[answer.node].status == "ok"
    session.abandon([answer.node])
    assert session.nodes[answer.node].status == "ok"


async def test_requests_that_differ_only_in_reasoning_have_prompts_of_their_own(
    chatml: Model,
) -> None:
    session, generator = chatml.session(counted)
    for thought in ("add the two", "count on fingers"):
        shown = assistant(f"<think>{thought}</think>4")
        await session.chat(ChatRequest([user("2+2"), shown, user("3+3")]))
    first, second = (chatml.text(request.prompt_ids) for request in generator.requests)
    assert "add the two" in first and "count on fingers" in second
    # Equal tokens of other messages count as asked again, and so get another seed.
    await session.chat(ChatRequest([{**user("2+2"), "name": "x"}]))
    await session.chat(ChatRequest([user("2+2")]))
    assert [request.answered for request in generator.requests[-2:]] == [0, 1]


async def test_text_far_beyond_the_context_is_refused_before_it_is_encoded(chatml: Model) -> None:
    session, _ = chatml.session(counted)
    session._template = replace(session._template, most_characters=200)
    with pytest.raises(ContextTooLongError, match="characters, which are more than 500 tokens"):
        await session.chat(ChatRequest([user("x" * 300)]))
    chat = await talk(session, ["a"])
    with pytest.raises(ContextTooLongError, match="the new messages have 300 characters"):
        await session.chat(ChatRequest([*chat, user("x" * 300)]))


async def test_text_that_no_tokenizer_reads_is_refused(chatml: Model) -> None:
    session, _ = chatml.session(counted)
    with pytest.raises(MessagesError, match="the messages are no text"):
        await session.chat(ChatRequest([user("caf\udce9")]))
    chat = await talk(session, ["a"])
    with pytest.raises(MessagesError, match="the messages are no text"):
        await session.chat(ChatRequest([*chat, user("caf\udce9")]))


async def test_two_turns_at_once_branch(chatml: Model) -> None:
    session, _ = chatml.session(counted, latency=lambda number: 0.01 * (2 - number))

    await asyncio.gather(
        session.chat(ChatRequest([user("a")])), session.chat(ChatRequest([user("b")]))
    )
    assert len(session_rows(session.nodes).rows) == 2
    assert session_rows(session.nodes).counts.trained == sum(
        len(node.token_ids) for node in session.nodes if node.sampled
    )


async def test_a_closed_session_says_why(chatml: Model) -> None:
    session, _ = chatml.session(counted)
    session.close("its deadline passed")
    session.close("another reason")
    with pytest.raises(SessionClosedError, match="its deadline passed"):
        await session.chat(ChatRequest([user("a")]))


async def test_bad_requests_leave_no_node_half_made(chatml: Model) -> None:
    session, _ = chatml.session(counted, max_length=40)
    with pytest.raises(ContextTooLongError, match=r"has \d+ tokens, and 40 are allowed"):
        await session.chat(ChatRequest([user("long " * 40)]))
    with pytest.raises(MessagesError):
        await session.chat(ChatRequest([{"role": "user", "content": {"a": 1}}]))
    assert session_rows(session.nodes).counts.sampled == 0


async def test_tokens_that_a_grammar_forced_are_never_trained(chatml: Model) -> None:
    session, _ = chatml.session(counted, constrained=True)

    answers = await session.chat(ChatRequest([user("a")], n=2, schema={"type": "object"}))
    for answer in answers:
        await session.chat(ChatRequest([user("a"), answer.message, user("b")], schema={}))
    counts = session_rows(session.nodes).counts
    assert counts.trained == 0 and set(counts.masked) == {"constrained"}
    assert counts.masked["constrained"] == counts.sampled > 0


async def test_an_answer_that_comes_after_the_end_leaves_no_turn(chatml: Model) -> None:
    session, _ = chatml.session(counted, latency=lambda number: 0.02)

    asking = asyncio.ensure_future(session.chat(ChatRequest([user("a")])))
    await asyncio.sleep(0)
    session.close("the session has ended")
    with pytest.raises(SessionClosedError):
        await asking
    assert not any(node.sampled for node in session.nodes)


async def test_a_retry_does_not_bring_back_an_answer_that_was_not_chosen(chatml: Model) -> None:
    session, _ = chatml.session(counted)

    first = ChatRequest([user("a")], n=2, key="k")
    answers = await session.chat(first)
    await session.chat(ChatRequest([user("a"), answers[1].message, user("b")]))
    await session.chat(first)
    statuses = [node.status for node in session.nodes if node.sampled]
    assert statuses == [ORPHAN, "ok", "ok"]


async def test_of_equal_answers_the_one_with_the_same_reasoning_is_continued(chatml: Model) -> None:
    texts = ["<think>way 0</think>42", "<think>way 1</think>42", "x", "y"]
    generator = FakeTurnGenerator(chatml.tokenizer, lambda number: texts[number], chatml.end)
    template = SessionTemplate(chatml.tokenizer, frozenset({chatml.end}), 500)

    def reads(prompt_ids: object, completion: Completion, tools: object) -> Message:
        thought, _, text = chatml.text(completion.token_ids).partition("</think>")
        return {**assistant(text.removesuffix("<|im_end|>")), "reasoning": thought[7:]}

    session = Session(template, generator, reads)

    async def agent(chosen: int) -> int | None:
        answers = await session.chat(ChatRequest([user("a")], n=2))
        sent = {"role": "assistant", "content": "42", "reasoning_content": f"way {chosen}"}
        (after,) = await session.chat(ChatRequest([user("a"), sent, user("b")]))
        context = session.nodes[after.node].parent
        assert context is not None
        assert [answer.node for answer in answers] == [1, 2]
        return session.nodes[context].parent

    assert await agent(1) == 2
    assert [node.status for node in session.nodes if node.sampled] == [ORPHAN, "ok", "ok"]


async def test_the_chat_so_far_is_that_of_the_last_answer_that_was_received(chatml: Model) -> None:
    session, _ = chatml.session(counted, latency=lambda number: 0.05 if number == 0 else 0.0)

    slow = asyncio.ensure_future(session.chat(ChatRequest([user("slow")], key="1")))
    await asyncio.sleep(0)
    slow.cancel()  # the client leaves, and its answer comes later
    await session.chat(ChatRequest([user("fast")], key="2"))
    await asyncio.sleep(0.1)
    assert [message["content"] for message in session.chat_so_far] == ["fast", "answer 1"]


def test_equal_bodies_have_the_same_hash_in_every_session(chatml: Model) -> None:
    chat = [user("a"), assistant("<think>b</think>c"), user("d")]
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    bodies = [
        ChatRequest(chat),
        ChatRequest(chat[:1]),
        ChatRequest([chat[0], assistant("c"), chat[2]]),
        ChatRequest(chat, [tool]),
        ChatRequest(chat, n=2),
        ChatRequest(chat, max_tokens=3),
        ChatRequest(chat, stop=("x",)),
        ChatRequest(chat, logprobs=True),
        ChatRequest(chat, schema={"type": "object"}),
        ChatRequest(chat, calls=False),
        ChatRequest(prompt="a"),
        ChatRequest(prompt="a", n=2),
    ]

    def asked(of: Sequence[ChatRequest]) -> list[str]:
        session, _ = chatml.session(counted)
        nodes = [asyncio.run(session.chat(one))[-1].node for one in of]
        return [session.nodes[node].request_hash for node in nodes]

    first = asked(bodies)
    # Another session, another order, and keys, with which a client names its request.
    again = asked([replace(one, key=str(place)) for place, one in enumerate(bodies[::-1])])
    assert again[::-1] == first and asked([bodies[0]] * 2) == [first[0]] * 2
    assert len(set(first)) == len(first) and {len(one) for one in first} == {16}


def test_true_is_not_one(chatml: Model) -> None:
    session, generator = chatml.session(counted)

    def asked(value: object) -> ChatRequest:
        call = {"type": "function", "function": {"name": "f", "arguments": {"a": value}}}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        return ChatRequest([user("q"), said, user("b")], [{"strict": value}])

    asyncio.run(session.chat(asked(1)))
    asyncio.run(session.chat(asked(True)))
    contexts = [node for node in session.nodes if not node.sampled]
    assert len(contexts) == 2 and len(generator.requests) == 2


async def test_half_of_a_surrogate_pair_in_arguments_is_refused(chatml: Model) -> None:
    session, _ = chatml.session(counted)
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    with pytest.raises(MessagesError, match="no text"):
        await session.chat(ChatRequest([user("q"), said, user("b")]))
