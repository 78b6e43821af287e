"""How sessions at a URL end: what a late request learns, and what a program's reward counts."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest
from clock_ahead import ClockAhead, put_forward, until

from asyncrl.config import FunctionEnvironment
from asyncrl.contracts.text_listener import Heard
from asyncrl.environments.running import Ended
from asyncrl.rewards.builtin import printed_reward
from asyncrl.rollout.session_player import Player
from asyncrl.sessions.answers import Answer, ChatRequest, ContextTooLongError

GOES_ON = """
import json, os, urllib.error, urllib.request
body = {"messages": [{"role": "user", "content": "q"}]}
headers = {"Content-Type": "application/json"}
headers["Authorization"] = "Bearer " + os.environ["OPENAI_API_KEY"]
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = urllib.request.Request(url, json.dumps(body).encode(), headers)
try:
    for turn in range(3):
        urllib.request.urlopen(request).read()
except urllib.error.HTTPError as error:
    print(json.loads(error.read())["error"]["code"])
print(turn / 4)
"""
"""Asks until the API refuses, and then prints a reward for the turns that it took."""
LATE = {"messages": [{"role": "user", "content": "late"}]}
ENDS = {
    "none": "done",
    "raises": "env_error",
    "nonsense": "reward_error",
    "catches": "turns",
    "asks at its URL": "turns",
    "waits long": "deadline",
    "agent fails": "agent_error",
}
"""What an environment does, and how its session ends."""


class Answers:
    """Answers each request, except that of a broken model or of a canceled session."""

    def __init__(self, fault: str) -> None:
        self.fault, self.asked = fault, asyncio.Event()
        self.answered = False

    def abandon(self, nodes: Sequence[int]) -> None:
        pass

    async def chat(self, request: ChatRequest, heard: Heard | None = None) -> list[Answer]:
        self.asked.set()
        if self.fault == "canceled":
            await asyncio.Event().wait()
        if self.fault == "broken":
            raise RuntimeError("the engine died")
        self.answered = True
        return [Answer({"role": "assistant", "content": "a"}, "stop", 2, 5, 1)]


async def refusals(folder: Path) -> dict[str, Any]:
    """What sessions do → the error that a request with their key gets after their end."""
    player = Player(
        FunctionEnvironment.model_validate(
            {
                "function": "tests.environments.environments_under_test:tells_its_key",
                "processes": 1,
                "url": True,
                "max_turns": 1,
                "tool_s": 60,
            }
        )
    )

    names = [*ENDS, "canceled", "broken"]
    sessions = {name: Answers(name) for name in names}
    over: list[str] = []

    async def play(fault: str) -> str | None:
        task = {"fault": fault, "file": str(folder / fault)}
        session = sessions[fault]
        playing = asyncio.ensure_future(player.play(task, session))
        if fault == "canceled":
            await session.asked.wait()
            playing.cancel()
        try:
            return (await playing).end
        except (asyncio.CancelledError, RuntimeError):
            return None
        finally:
            over.append(fault)

    async def reach_the_limit() -> None:
        await until(lambda: sessions["waits long"].answered and len(over) == len(names) - 1)
        put_forward(61)

    async def late(client: httpx2.AsyncClient, fault: str) -> Any:
        _, url, key = (folder / fault).read_text().split()
        headers = {"authorization": f"Bearer {key}"}
        answer = await client.post(f"{url}/chat/completions", json=LATE, headers=headers)
        assert answer.status_code == 409
        return answer.json()["error"]

    try:
        *ends, _ = await asyncio.gather(*map(play, names), reach_the_limit())
        assert ends == [*ENDS.values(), None, None]
        async with httpx2.AsyncClient() as client:
            return {name: await late(client, name) for name in names}
    finally:
        await player.close()


def test_a_late_request_learns_how_its_session_ended(tmp_path: Path) -> None:
    with asyncio.Runner(loop_factory=ClockAhead) as runner:
        found = runner.run(asyncio.wait_for(refusals(tmp_path), 180))
    ends = {**ENDS, "canceled": "closed", "broken": "closed"}
    assert {name: error["session_end"] for name, error in found.items()} == ends
    assert {error["code"] for error in found.values()} == {"session_closed"}


class Short(Answers):
    """Has room for two turns."""

    turns = 0

    async def chat(self, request: ChatRequest, heard: Heard | None = None) -> list[Answer]:
        self.turns += 1
        if self.turns > 2:
            raise ContextTooLongError("the request is too long")
        return await super().chat(request, heard)


async def reached(most_turns: int) -> Ended:
    """The end of a program that goes on until it is refused."""
    config = {
        "function": "asyncrl.environments.agent:play",
        "arguments": {"command": [sys.executable, "-c", GOES_ON], "stdin": "none"},
        "processes": 1,
        "url": True,
        "max_turns": most_turns,
    }
    player = Player(FunctionEnvironment.model_validate(config))
    try:
        return await player.play({"prompt": ""}, Short(""))
    finally:
        await player.close()


@pytest.mark.parametrize(
    ("most_turns", "end", "code"),
    [(1, "turns", "turns_exceeded"), (9, "length", "context_length_exceeded")],
)
async def test_a_program_prints_a_reward_for_what_it_reached(
    most_turns: int, end: str, code: str
) -> None:
    ended = await asyncio.wait_for(reached(most_turns), 120)
    reward = min(most_turns, 2) / 4
    assert (ended.end, ended.reward, ended.output) == (end, None, f"{code}\n{reward}\n")
    found = printed_reward(session_output=[ended.output], session_end=[ended.end])
    assert found == {"reward": [reward]}


ASKS_AND_FAILS = """
import json, os, urllib.request
more = json.loads(os.environ["MORE"])
body = json.dumps({"messages": [{"role": "user", "content": "q"}], **more})
headers = {"Content-Type": "application/json"}
headers["Authorization"] = "Bearer " + os.environ["OPENAI_API_KEY"]
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, body.encode(), headers)).read()
raise SystemExit("no visible output")
"""
"""Takes a turn, and fails, as agents do that cannot go on with a cut one."""


class Cut(Answers):
    """Cuts each turn after two tokens."""

    async def chat(self, request: ChatRequest, heard: Heard | None = None) -> list[Answer]:
        return [Answer({"role": "assistant", "content": ""}, "length", 2, 5, 1)]


@pytest.mark.parametrize(
    ("session", "more", "end"),
    [
        (Cut(""), {}, "length"),
        (Cut(""), {"max_tokens": 9}, "length"),
        (Cut(""), {"max_tokens": 2}, "agent_error"),  # its own limit cut the turn
        (Answers(""), {}, "agent_error"),
    ],
)
async def test_an_agent_that_fails_after_a_turn_that_the_run_cut_is_not_to_blame(
    session: Answers, more: dict[str, int], end: str
) -> None:
    config = {
        "function": "asyncrl.environments.agent:play",
        "arguments": {
            "command": [sys.executable, "-c", ASKS_AND_FAILS],
            "stdin": "none",
            "variables": {"MORE": json.dumps(more)},
        },
        "processes": 1,
        "url": True,
    }
    async with asyncio.timeout(120):
        player = Player(FunctionEnvironment.model_validate(config))
        try:
            ended = await player.play({"prompt": ""}, session)
        finally:
            await player.close()
    assert (ended.end, ended.reward) == (end, None)
    assert ended.note.endswith("ended with exit code 1: no visible output")
    assert ended.note.startswith("the run cut the last turn") == (end == "length")
