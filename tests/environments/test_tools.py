"""The loop of agents with tools: what the model gets for each call, and when the loop ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from asyncrl.environments import ToolsRun, run_tools
from asyncrl.environments.model import Model
from asyncrl.environments.running import Limits, run_session
from asyncrl.environments.tools import MOST_CHARACTERS
from asyncrl.sessions.answers import ContextTooLongError
from asyncrl.testing import FakeChatSession, tool_call

ADD: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {}}}


async def add(left: int, right: int) -> int:
    return left + right


async def fails(**_: Any) -> None:
    raise KeyError("no such\nrow")


async def long() -> str:
    return "x" * (MOST_CHARACTERS + 7)


async def odd() -> object:
    return {"name": "Grüße", "half": "\ud800"}


TOOLS: Any = {
    name: (ADD, function)
    for name, function in (("add", add), ("fails", fails), ("long", long), ("odd", odd))
}


def play(answers: Sequence[object], most_turns: int = 8, **fake: Any) -> tuple[ToolsRun, Any]:
    session = FakeChatSession(answers, **fake)
    chat = [{"role": "user", "content": "2 + 3?"}]
    done = asyncio.run(run_tools(Model(session), chat, TOOLS, most_turns))
    assert len(chat) == 1, "the caller's list was changed"
    return done, session


def told(answer: object) -> str:
    """What the model gets for a call."""
    done, _ = play([answer, "so"])
    assert done.answer == "so" and done.calls == 1
    return str(done.messages[-2]["content"])


def test_a_call_is_run_and_its_answer_comes_back() -> None:
    done, session = play([tool_call("add", {"left": 2, "right": 3}), "it is 5"])
    assert (done.answer, done.ended, done.calls, done.failed) == ("it is 5", "answer", 1, 0)
    assert [message["role"] for message in done.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    reply = done.messages[2]
    assert reply == {"role": "tool", "tool_call_id": "call_0", "content": "5"}
    chat, tools = session.requests[1]
    assert chat[-1] == reply and list(tools) == [ADD] * len(TOOLS)


def test_calls_of_one_answer_run_in_their_order() -> None:
    one, two = (tool_call("add", {"left": 1, "right": n}, f"call_{n}") for n in (1, 2))
    both = {**one, "tool_calls": [*one["tool_calls"], *two["tool_calls"]]}  # type: ignore[misc]
    done, _ = play([both, "done"])
    replies = [(m["tool_call_id"], m["content"]) for m in done.messages if m["role"] == "tool"]
    assert replies == [("call_1", "2"), ("call_2", "3")] and done.calls == 2


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            tool_call("sub", {}),
            "error: there is no tool 'sub'; the tools are: add, fails, long, odd",
        ),
        (tool_call("add", "{oops"), "error: add cannot be called with these arguments: Expecting"),
        (tool_call("add", "[1]"), "they are no JSON object"),
        (tool_call("add", "[" * 100_000), "error: add cannot be called"),
        (tool_call("add", {"left": 1}), "missing a required argument: 'right'"),
        (tool_call("add", {"left": 1, "right": 2, "x": 3}), "unexpected keyword argument 'x'"),
        (tool_call("add", {"left": 1, "right": "a"}), "error: TypeError: unsupported operand"),
        (tool_call("fails", {}), "error: KeyError: 'no such"),
    ],
)
def test_a_call_that_fails_is_told_to_the_model(call: Mapping[str, object], text: str) -> None:
    assert text in told(call)
    assert play([call, "so"])[0].failed == 1


def test_no_text_means_no_arguments() -> None:
    for nothing in ("", " ", "null", "{}"):
        assert told(tool_call("long", nothing)).startswith("xx")


def test_arguments_that_were_written_twice_are_read() -> None:
    assert told(tool_call("add", json.dumps('{"left": 2, "right": 3}'))) == "5"


def test_answers_of_tools_are_text_of_bounded_length() -> None:
    assert told(tool_call("long", {})).endswith("x… (7 more characters)")
    assert told(tool_call("odd", {})) == '{"name": "Grüße", "half": "\\ud800"}'


def test_a_model_that_never_ends_its_calls_has_no_answer() -> None:
    done, session = play([tool_call("add", {"left": 1, "right": 1})] * 3, most_turns=3)
    assert (done.answer, done.ended, done.calls) == ("", "turns", 3)
    assert len(session.requests) == 3 and done.messages[-1]["content"] == "2"
    with pytest.raises(ValueError, match="most_turns = 0"):
        play([], most_turns=0)


def test_a_full_context_ends_the_loop_after_the_first_turn() -> None:
    call = tool_call("add", {"left": 1, "right": 1})
    done, _ = play([call], most_messages=2)
    assert (done.answer, done.ended, done.calls) == ("", "length", 1)
    with pytest.raises(ContextTooLongError):
        play([call], most_messages=0)


async def test_a_limit_of_the_run_still_ends_the_session() -> None:
    async def solve(task: Mapping[str, Any], model: Any) -> float:
        await run_tools(model, [{"role": "user", "content": "q"}], TOOLS)
        return 1.0

    session = FakeChatSession([tool_call("fails", {})] * 5)
    ended = await run_session(solve, {}, session, Limits(turns=2))
    assert (ended.end, ended.reward) == ("turns", None)
