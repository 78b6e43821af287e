"""Environment processes: sessions in them, and who pays for a fault."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from asyncrl.config import FunctionEnvironment
from asyncrl.environments import pool as environment_pool
from asyncrl.environments.pool import (
    EnvironmentFailedError,
    EnvironmentPool,
    SessionLostError,
)
from asyncrl.environments.running import Ended
from asyncrl.observe.memory import process_name
from asyncrl.runtime.processes import pool as process_pool
from asyncrl.sessions.answers import Answer, ChatRequest, ContextTooLongError

Result = TypeVar("Result")
HERE = "tests.environments.environments_under_test"


class Echo:
    """Answers with the last message. `error`: raised instead."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.requests = 0
        self.abandoned: list[int] = []

    def abandon(self, nodes: Sequence[int]) -> None:
        self.abandoned += nodes

    async def chat(self, request: ChatRequest) -> list[Answer]:
        self.requests += 1
        if self.error is not None:
            raise self.error
        message = {"role": "assistant", "content": f"said {request.messages[-1]['content']}"}
        return [Answer(message, "stop", 2, 5, 1)]


def with_pool(
    work: Callable[[EnvironmentPool], Awaitable[Result]], function: str = "faulty", **changes: Any
) -> Result:
    """What the work returns with a pool of one process."""
    settings = {"function": f"{HERE}:{function}", "processes": 1, **changes}

    async def run() -> Result:
        pool = EnvironmentPool(FunctionEnvironment.model_validate(settings))
        try:
            return await work(pool)
        finally:
            await pool.close()

    return asyncio.run(asyncio.wait_for(run(), 120))


def one(fault: str, session: Echo | None = None, **changes: Any) -> Ended:
    """The end of a session with this fault, beside nobody; the pool works afterwards."""

    async def work(pool: EnvironmentPool) -> Ended:
        ended = await pool.play({"fault": fault}, session or Echo())
        assert (await pool.play({"fault": "none"}, Echo())).end == "done"
        return ended

    return with_pool(work, **changes)


def test_a_session_takes_turns_and_returns_its_reward() -> None:
    session = Echo()

    async def work(pool: EnvironmentPool) -> Ended:
        return await pool.play({"prompt": "hello"}, session)

    ended = with_pool(work, "echo", arguments={"worth": 0.5})
    assert (ended.end, ended.reward, ended.turns, session.requests) == ("done", 0.5, 1, 1)


def test_a_game_is_played() -> None:
    async def work(pool: EnvironmentPool) -> Ended:
        return await pool.play({"prompt": "hello"}, Echo())

    ended = with_pool(work, "Game", arguments={"most": 4})
    assert (ended.end, ended.reward, ended.turns) == ("done", 1.0, 4)
    assert with_pool(work, "Game", max_turns=2).end == "turns"


def test_two_hundred_sessions_run_at_once() -> None:
    async def work(pool: EnvironmentPool) -> list[Ended]:
        return await asyncio.gather(*(pool.play({"fault": "waits"}, Echo()) for _ in range(200)))

    began = time.monotonic()
    ends = with_pool(work, concurrency=200)
    assert {end.end for end in ends} == {"done"} and {end.reward for end in ends} == {1.0}
    assert time.monotonic() - began < 60  # one after the other they would take 200 s


FAULTS = {
    "blocks": "it kept its process for over environment.block_s = 1 s",
    "blocks in a task of its own": "it kept its process for over environment.block_s = 1 s",
    "hangs in c": "it kept its process for over environment.block_s = 1 s",
    "dies": r"it ended its process \(exit code 7\)",
    "leaves": "SystemExit: 3",
    "leaves with a text": r"^SystemExit: one \[31mtwo$",
    "raises with control characters": r"^Odd name: one two three \(/.*:\d+\)$",
    "raises": r"KeyError: 'no such thing' \(.*environments_under_test.py:\d+\)",
    "allocates": "MemoryError",
    "nonsense": r"reward is 'good' \(str\), not a finite number",
    "base exception": "^BaseException: odd lines$",
    "nests": "the messages are not JSON",
    "surrogate": r"FileNotFoundError: caf\\udce9",
}
"""What a session does, and what the note of its end says."""


@pytest.fixture(scope="module")
def ends_of_faults() -> dict[str, tuple[Ended, Ended]]:
    """Fault → the end of its session, and of one after it in the same pool."""

    async def work(pool: EnvironmentPool) -> dict[str, tuple[Ended, Ended]]:
        return {
            fault: (
                await pool.play({"fault": fault}, Echo()),
                await pool.play({"fault": "none"}, Echo()),
            )
            for fault in FAULTS
        }

    return with_pool(work, block_s=1, memory_bytes=4 << 30)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_session_is_the_environments_error(
    fault: str, ends_of_faults: dict[str, tuple[Ended, Ended]]
) -> None:
    ended, after = ends_of_faults[fault]
    expected = "reward_error" if fault == "nonsense" else "env_error"
    assert ended.end == expected and ended.reward is None
    assert re.search(FAULTS[fault], ended.note), ended.note
    assert after.end == "done"


@pytest.mark.parametrize("fault", ["blocks", "dies"])
def test_only_the_culprit_fails_and_the_others_begin_again(fault: str) -> None:
    async def work(pool: EnvironmentPool) -> list[Any]:
        faults = ["waits", fault, "waits"]
        plays = (pool.play({"fault": fault}, Echo()) for fault in faults)
        return await asyncio.gather(*plays, return_exceptions=True)

    first, culprit, third = with_pool(work, block_s=1)
    assert culprit.end == "env_error"
    for lost in (first, third):
        assert isinstance(lost, SessionLostError) and not lost.alone


def test_a_session_that_is_canceled_by_code_of_its_process_begins_again_alone() -> None:
    async def work(pool: EnvironmentPool) -> list[Any]:
        faults = ["waits long", "cancels all"]
        plays = (pool.play({"fault": fault}, Echo()) for fault in faults)
        lost = await asyncio.gather(*plays, return_exceptions=True)
        return [*lost, await pool.play({"fault": "cancels itself"}, Echo(), alone=True)]

    first, second, culprit = with_pool(work)
    for lost in (first, second):
        assert isinstance(lost, SessionLostError) and lost.alone
    assert (culprit.end, culprit.note) == ("env_error", "it canceled its own task")


def test_a_deadline_that_the_environment_catches_is_still_the_end() -> None:
    ended = one("swallows its deadline", deadline_s=0.3)
    assert (ended.end, ended.reward) == ("deadline", None)


def test_an_environment_may_ask_in_a_thread_with_a_loop_of_its_own() -> None:
    class Slow(Echo):
        async def chat(self, request: ChatRequest) -> list[Answer]:
            await asyncio.sleep(0.3)
            return await super().chat(request)

    ended = one("asks in a thread", Slow())
    assert (ended.end, ended.reward) == ("done", 1.0)


def test_an_answer_that_crosses_its_abandonment_was_not_received() -> None:
    session = Echo()

    async def work(pool: EnvironmentPool) -> None:
        with contextlib.suppress(SessionLostError):
            await pool.play({"fault": "dies"}, session)

    with_pool(work)
    assert session.abandoned == []

    class Slow(Echo):
        async def chat(self, request: ChatRequest) -> list[Answer]:
            await asyncio.sleep(0.5)
            return await super().chat(request)

    late = Slow()

    async def leaves(pool: EnvironmentPool) -> Ended:
        return await pool.play({"fault": "none"}, late)

    assert with_pool(leaves, deadline_s=0.2).end == "deadline"
    assert late.requests == 0  # canceled before it answered


def test_where_the_cause_is_unknown_all_begin_again_alone() -> None:
    async def work(pool: EnvironmentPool) -> list[Any]:
        faults = ["waits long", "blocks in a callback"]
        plays = (pool.play({"fault": fault}, Echo()) for fault in faults)
        lost = await asyncio.gather(*plays, return_exceptions=True)
        culprit = await pool.play({"fault": "blocks in a callback"}, Echo(), alone=True)
        return [*lost, culprit]

    first, second, culprit = with_pool(work, block_s=1)
    for lost in (first, second):
        assert isinstance(lost, SessionLostError) and lost.alone
    assert culprit.end == "env_error"


def test_a_machine_that_stood_still_is_nobodys_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a pause of a container, or on a machine that is much too busy."""
    monkeypatch.setattr(process_pool, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(process_pool, "MOST_SEEN_S", 0.2)

    async def work(pool: EnvironmentPool) -> Ended:
        asked = asyncio.Event()

        class Asked(Echo):
            async def chat(self, request: ChatRequest) -> list[Answer]:
                asked.set()
                return await super().chat(request)

        playing = asyncio.ensure_future(pool.play({"fault": "waits"}, Asked()))
        await asked.wait()
        children = psutil.Process().children(recursive=True)
        stopped = [child for child in children if process_name(child) == "environment process"]
        for child in stopped:
            child.suspend()
        await asyncio.sleep(0.15)  # the pool sees that nothing changes
        time.sleep(1.5)  # noqa: ASYNC251
        await asyncio.sleep(0.15)
        for child in stopped:
            child.resume()
        return await playing

    assert with_pool(work, block_s=1.5).end == "done"


def test_what_a_session_leaves_behind_ends_with_it() -> None:
    async def work(pool: EnvironmentPool) -> list[Ended]:
        first = await pool.play({"fault": "leaves a task"}, Echo())
        return [first, await pool.play({"fault": "waits"}, Echo())]

    assert [ended.end for ended in with_pool(work, block_s=1)] == ["done", "done"]


def test_an_abandoned_request_is_canceled() -> None:
    class Slow(Echo):
        canceled = False

        async def chat(self, request: ChatRequest) -> list[Answer]:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.canceled = True
                raise
            raise AssertionError

    session = Slow()

    async def work(pool: EnvironmentPool) -> Ended:
        return await pool.play({"fault": "none"}, session)

    assert with_pool(work, deadline_s=0.5).end == "deadline"
    assert session.canceled


def test_a_session_that_ignores_its_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_pool, "GUARD_S", 2.0)
    ended = one("ignores", deadline_s=1, block_s=1)
    assert ended.end == "env_error" and "it did not end within 4 s" in ended.note


def test_a_session_that_is_late_ends_at_its_deadline() -> None:
    ended = one("waits", deadline_s=0.3)
    assert (ended.end, ended.note) == ("deadline", "it was not over after 0.3 s")


def test_an_error_of_the_model_is_not_the_environments() -> None:
    with pytest.raises(RuntimeError, match="no engine"):
        one("none", Echo(RuntimeError("no engine")))
    ended = one("none", Echo(ContextTooLongError("too long")))
    assert (ended.end, ended.note) == ("length", "too long")


def test_an_error_of_the_model_is_not_hidden_by_an_environment_that_catches_it() -> None:
    class FailsLater(Echo):
        async def chat(self, request: ChatRequest) -> list[Answer]:
            if self.requests == 1:
                self.error = RuntimeError("no engine")
            return await super().chat(request)

    with pytest.raises(RuntimeError, match="no engine"):
        one("catches", FailsLater())


def test_a_reward_may_be_numpys() -> None:
    assert one("numpy").reward == 0.5


def test_an_environment_that_gives_no_reward() -> None:
    ended = one("nothing")
    assert (ended.end, ended.reward) == ("done", None)


def test_a_given_up_session_makes_room() -> None:
    async def work(pool: EnvironmentPool) -> Ended:
        await pool.start()
        playing = asyncio.create_task(pool.play({"fault": "ignores"}, Echo()))
        other = asyncio.create_task(pool.play({"fault": "waits long"}, Echo()))
        await asyncio.sleep(0.2)
        other.cancel()
        playing.cancel()
        await asyncio.gather(other, playing, return_exceptions=True)
        return await asyncio.wait_for(pool.play({"fault": "none"}, Echo()), 10)

    # `ignores` keeps its place until its guard ends it; the canceled one does not.
    assert with_pool(work, concurrency=2, deadline_s=30).end == "done"


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("absent", "cannot be imported"),
        ("Half", "is a class without step; a game needs both"),
        ("plain", "is not an async function; write `async def`"),
    ],
)
def test_what_is_no_environment_is_refused(function: str, why: str) -> None:
    async def work(pool: EnvironmentPool) -> None:
        await pool.start()

    with pytest.raises(EnvironmentFailedError, match=why):
        with_pool(work, function)


def test_nothing_is_left_after_the_end() -> None:
    # Other tests of this process may keep a sandbox.
    before = set(psutil.Process().children(recursive=True))

    async def work(pool: EnvironmentPool) -> list[psutil.Process]:
        await pool.play({"fault": "starts others"}, Echo())
        found = [
            child for child in psutil.Process().children(recursive=True) if child not in before
        ]
        assert any(process_name(process) == "environment process" for process in found)
        return found

    found = with_pool(work)
    assert any("sleep" in process.name() for process in found if process.is_running()) is False
    assert not [process for process in found if process.is_running()]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "import no_such_package_at_all",
            "cannot be imported (No module named 'no_such_package_at_all' at {file}:1, in"
            " <module>); check its name and that its package is installed",
        ),
        (
            "async def solve(task, model)\n    return 1.0",
            "cannot be imported (SyntaxError: expected ':' (odd_module.py, line 1)); repair its"
            " module",
        ),
        ("raise SystemExit(4)", "its module must not exit (exit code 4)"),
        ("solve = 7", "is of type int; name a function"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, expected: str
) -> None:
    """It says why, and nothing about the process that said so."""
    file = tmp_path / "odd_module.py"
    file.write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")

    async def refused() -> str:
        pool = EnvironmentPool(FunctionEnvironment(function="odd_module:solve", processes=1))
        try:
            with pytest.raises(EnvironmentFailedError) as error:
                await pool.start()
        finally:
            await pool.close()
        return str(error.value)

    text = asyncio.run(asyncio.wait_for(refused(), 120))
    assert text.endswith(expected.format(file=file)), text
    assert "odd_module:solve" in text and "\n" not in text


GAMES: list[tuple[dict[str, str], str, str]] = [
    ({"fault": "none"}, "done", ""),
    ({"fault": "goes on"}, "turns", "has taken its 3 turns"),
    ({"fault": "reset raises"}, "env_error", "OSError: no table"),
    ({"fault": "step raises"}, "env_error", "OSError: no row"),
    ({"fault": "none", "close": "raises"}, "env_error", "OSError: cannot close"),
    ({"fault": "step raises", "close": "raises"}, "env_error", "OSError: no row"),
]
"""What a game does, how its session ends, and what the note says."""


def closed(
    folder: Path, games: list[tuple[dict[str, str], str, str]], deadline_s: float = 60.0
) -> None:
    """Check that these games, which one process plays at once, end so, and are closed once."""
    files = [folder / str(number) for number in range(len(games))]

    async def work(pool: EnvironmentPool) -> list[Ended]:
        plays = (
            pool.play({"file": str(file), **task}, Echo())
            for file, (task, _, _) in zip(files, games, strict=True)
        )
        return await asyncio.gather(*plays)

    ends = with_pool(work, "Closing", max_turns=3, deadline_s=deadline_s)
    for ended, file, (task, end, note) in zip(ends, files, games, strict=True):
        assert ended.end == end and note in ended.note, task
        assert file.read_text() == "closed\n", task


def test_a_game_is_closed_at_every_end(tmp_path: Path) -> None:
    closed(tmp_path, GAMES)


def test_a_game_is_closed_at_its_deadline(tmp_path: Path) -> None:
    closed(tmp_path, [({"fault": "waits"}, "deadline", "was not over after 1 s")], 1.0)


@pytest.mark.slow
def test_a_game_whose_close_hangs_has_ended(tmp_path: Path) -> None:
    task = {"fault": "goes on", "close": "hangs"}
    closed(tmp_path, [(task, "turns", "has taken its 3 turns")])


async def until_there(file: Path) -> None:
    while not file.exists():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("by", ["its caller", "the pool"])
def test_a_game_that_nobody_waits_for_is_closed(by: str, tmp_path: Path) -> None:
    task = {"fault": "waits", "file": str(tmp_path / "closed")}

    async def work(pool: EnvironmentPool) -> None:
        playing = asyncio.ensure_future(pool.play(task, Echo()))
        await until_there(tmp_path / "closed.waits")
        if by == "its caller":
            playing.cancel()
        else:
            await pool.close()
        with contextlib.suppress(asyncio.CancelledError):
            await playing
        if by == "its caller":
            await until_there(tmp_path / "closed")

    with_pool(work, "Closing")
    assert (tmp_path / "closed").read_text() == "closed\n"
