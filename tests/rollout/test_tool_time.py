"""The limit of a session's tools: the time from an answer to its next request, or to its end."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from clock_ahead import ClockAhead, put_forward, until
from small_config import small_config

from asyncrl.config import FunctionEnvironment
from asyncrl.contracts.text_listener import Heard
from asyncrl.environments.running import Ended
from asyncrl.rollout.session_player import Player
from asyncrl.rollout.session_time import PacedSession
from asyncrl.sessions.answers import Answer, ChatRequest
from asyncrl.testing import VirtualTimeLoop

FAULTY = "tests.environments.environments_under_test:faulty"
QUESTION = ChatRequest([{"role": "user", "content": "q"}], None)
ASKS = """
import json, os, sys, time, urllib.request
def ask():
    body = {"messages": [{"role": "user", "content": "q"}]}
    headers = {"Content-Type": "application/json"}
    headers["Authorization"] = "Bearer " + os.environ["OPENAI_API_KEY"]
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
"""


class Slow:
    """Answers after some seconds, and after an event."""

    def __init__(self, seconds: float = 0.0, after: asyncio.Event | None = None) -> None:
        self.seconds, self.after = seconds, after
        self.asked = self.answered = 0
        self.ended = asyncio.Event()

    def abandon(self, nodes: Sequence[int]) -> None:
        pass

    async def chat(self, request: ChatRequest, heard: Heard | None = None) -> list[Answer]:
        self.asked += 1
        await asyncio.sleep(self.seconds)
        if self.after is not None:
            await self.after.wait()
        self.answered += 1
        return [Answer({"role": "assistant", "content": "a"}, "stop", 2, 5, 1)]


def paced(work: Callable[[PacedSession], Awaitable[None]], tool_s: float | None = 3.0) -> Any:
    """The session after this work, in virtual time, with answers that take ten seconds."""

    async def run() -> PacedSession:
        session = PacedSession(Slow(10.0), tool_s)
        try:
            async with session:
                await work(session)
        except TimeoutError:
            assert session.expired
        return session

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(run())


def test_only_the_time_after_an_answer_counts() -> None:
    async def patient(session: PacedSession) -> None:
        await asyncio.sleep(100)
        await session.chat(QUESTION)
        await asyncio.sleep(2.9)
        await asyncio.gather(session.chat(QUESTION), session.chat(QUESTION))
        await asyncio.sleep(2.9)
        assert session.played_s == pytest.approx(125.8)

    session = paced(patient)
    assert not session.expired and session.turns == 3
    assert session.model_s == pytest.approx(20.0)


def test_one_request_under_way_is_enough() -> None:
    async def overlapping(session: PacedSession) -> None:
        later = asyncio.create_task(session.chat(QUESTION))
        await asyncio.sleep(5)
        await asyncio.gather(session.chat(QUESTION), later)
        assert session.model_s == pytest.approx(15.0)

    assert not paced(overlapping).expired


def test_time_that_another_session_blocks_does_not_count() -> None:
    async def blocked(session: PacedSession) -> None:
        session.excuse(100)  # no clock runs yet
        await session.chat(QUESTION)
        await asyncio.sleep(2)
        session.excuse(4)
        await asyncio.sleep(4.9)
        await session.chat(QUESTION)
        await asyncio.sleep(3.1)

    session = paced(blocked)
    assert session.expired and session.turns == 2


@pytest.mark.parametrize("tool_s", [3.0, None])
def test_a_session_that_asks_too_late_ends(tool_s: float | None) -> None:
    async def late(session: PacedSession) -> None:
        await session.chat(QUESTION)
        await asyncio.sleep(3.1)

    assert paced(late, tool_s).expired is (tool_s is not None)


def test_a_request_that_ends_after_its_session_starts_no_clock() -> None:
    async def leaves(session: PacedSession) -> None:
        asyncio.get_running_loop().leftover = asyncio.create_task(  # type: ignore[attr-defined]
            session.chat(QUESTION)
        )
        await asyncio.sleep(0)

    async def run() -> None:
        session = PacedSession(Slow(10.0), 3.0)
        async with session:
            await leaves(session)
        await asyncio.get_running_loop().leftover  # type: ignore[attr-defined]
        await asyncio.sleep(10)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(run())


def played(
    *plays: tuple[dict[str, object], Slow],
    meanwhile: Callable[[], Awaitable[None]],
    **settings: Any,
) -> list[Ended]:
    """The ends of sessions that one environment process plays at once.

    Args:
        meanwhile: runs beside them, and may put the clock forward.
    """

    async def run() -> list[Ended]:
        player = Player(
            FunctionEnvironment.model_validate({"function": FAULTY, "processes": 1, **settings})
        )

        async def play(task: dict[str, object], slow: Slow) -> Ended:
            try:
                return await player.play(task, slow)
            finally:
                slow.ended.set()

        try:
            plays_then = (play(task, slow) for task, slow in plays)
            _, *ends = await asyncio.gather(meanwhile(), *plays_then)
            return cast("list[Ended]", ends)
        finally:
            await player.close()

    with asyncio.Runner(loop_factory=ClockAhead) as runner:
        return runner.run(asyncio.wait_for(run(), 300))


def test_a_tool_that_hangs_ends_its_session_alone() -> None:
    hangs, other = Slow(), Slow()
    waits = Slow(after=hangs.ended)

    async def meanwhile() -> None:
        await until(lambda: hangs.answered == 3 and waits.asked and other.ended.is_set())
        put_forward(61)

    late, slow, done = played(
        ({"fault": "overrides and waits"}, hangs),
        ({"fault": "none"}, waits),
        ({"fault": "none"}, other),
        meanwhile=meanwhile,
        tool_s=60.0,
    )
    assert (late.end, late.turns, late.reward) == ("deadline", 3, None)
    assert late.overridden == 3, "two temperatures and a seed"
    assert late.note.startswith("it asked for no turn within environment.tool_s = 60 s after an")
    assert late.other_s >= 60.0 > late.model_s
    assert (slow.end, slow.reward) == ("done", 1.0)
    assert (done.end, done.reward) == ("done", 1.0)


def test_a_session_does_not_pay_for_another_that_blocks_their_process(tmp_path: Path) -> None:
    culprit, file = Slow(), tmp_path / "over"

    async def meanwhile() -> None:
        await culprit.ended.wait()
        file.touch()

    blocks, other = played(
        ({"fault": "blocks until", "file": str(file)}, culprit),
        ({"fault": "waits"}, Slow()),
        meanwhile=meanwhile,
        tool_s=4.0,
        block_s=60,
    )
    # The other one got no control for longer than its limit. Only the culprit pays.
    assert (blocks.end, other.end, other.reward) == ("deadline", "done", 1.0)


def test_the_time_before_a_session_begins_is_not_its_own() -> None:
    given = asyncio.Event()
    before, after = Slow(after=given), Slow()

    async def meanwhile() -> None:
        await until(lambda: before.asked)
        put_forward(100)  # the second one waits for a place
        given.set()
        await until(lambda: after.answered)
        put_forward(61)

    first, second = played(
        ({"fault": "none"}, before),
        ({"fault": "waits long"}, after),
        meanwhile=meanwhile,
        tool_s=60.0,
        concurrency=1,
    )
    assert (first.end, second.end) == ("done", "deadline"), (first.note, second.note)
    assert 60.0 <= second.other_s < 100.0, "it waited for a place for 100 s"


def test_an_environment_that_swallows_the_end_has_ended(tmp_path: Path) -> None:
    swallows, beside, file = Slow(), Slow(), tmp_path / "waits"

    async def meanwhile() -> None:
        await until(lambda: file.exists() and beside.ended.is_set())
        put_forward(61)

    ended, other = played(
        ({"fault": "swallows its deadline", "file": str(file)}, swallows),
        ({"fault": "none"}, beside),
        meanwhile=meanwhile,
        tool_s=60.0,
    )
    assert (ended.end, ended.reward, other.end) == ("deadline", None, "done")


def at_url(code: str, meanwhile: Callable[[Slow], Awaitable[None]]) -> Ended:
    """The end of an agent program with this code, which has 60 s between its turns. Another one has
    asked once and is over before `meanwhile` runs with the program's session."""
    session, beside = Slow(), Slow()

    async def later() -> None:
        await beside.ended.wait()
        await meanwhile(session)

    command = [sys.executable, "-c", "{program}"]
    ended, other = played(
        ({"program": ASKS + code, "prompt": ""}, session),
        ({"program": ASKS + "ask()", "prompt": ""}, beside),
        meanwhile=later,
        function="asyncrl.environments.agent:play",
        arguments={"command": command, "stdin": "none"},
        url=True,
        tool_s=60.0,
    )
    assert other.end == "done"
    return ended


def test_a_program_whose_tool_hangs_is_ended() -> None:
    async def meanwhile(session: Slow) -> None:
        await until(lambda: session.answered)
        put_forward(61)

    ended = at_url("ask()\ntime.sleep(600)  # hangs in its tool", meanwhile)
    assert (ended.end, ended.turns) == ("deadline", 1)
    assert "environment.tool_s = 60 s" in ended.note
    running = [" ".join(one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"])]
    assert not any("hangs in its tool" in one for one in running)


def test_a_program_may_take_its_time_before_it_asks(tmp_path: Path) -> None:
    started, go = tmp_path / "started", tmp_path / "go"

    async def meanwhile(session: Slow) -> None:
        await until(started.exists)
        put_forward(61)
        go.touch()

    code = f"""
open({str(started)!r}, "w").close()
while not os.path.exists({str(go)!r}):
    time.sleep(0.01)
ask()
"""
    ended = at_url(code, meanwhile)
    assert (ended.end, ended.turns) == ("done", 1)


def test_a_limit_without_an_effect_is_refused() -> None:
    environment = {"function": FAULTY, "deadline_s": 5, "tool_s": 5}
    data = {"train": "t", "max_prompt_length": 8, "max_length": 64}
    with pytest.raises(ValueError, match=r"tool_s = 5 is not below environment\.deadline_s = 5"):
        small_config(environment=environment, data=data)
