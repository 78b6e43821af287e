"""A call that hangs in a thread costs its own session, and not the others of its process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import psutil
import pytest

from asyncrl.config import FunctionEnvironment
from asyncrl.environments import pool as pools
from asyncrl.environments.model import Model, SessionUrl
from asyncrl.environments.pool import EnvironmentPool
from asyncrl.environments.running import Ended
from asyncrl.environments.threads import CallThreads, in_thread
from asyncrl.sessions.answers import Answer, ChatRequest

FAULTY = "tests.environments.environments_under_test:faulty"
HUNG = 40
"""More than asyncio's own executor has threads."""


class Gate:
    """Answers when it is open."""

    def __init__(self, opened: bool = True) -> None:
        self.open = asyncio.Event()
        if opened:
            self.open.set()

    def abandon(self, nodes: Sequence[int]) -> None:
        pass

    async def chat(self, request: ChatRequest) -> list[Answer]:
        await self.open.wait()
        return [Answer({"role": "assistant", "content": "a"}, "stop", 2, 5, 1)]


def with_pool(work: Any, **settings: Any) -> Any:
    async def run() -> Any:
        config = {"function": FAULTY, "processes": 1, **settings}
        pool = EnvironmentPool(FunctionEnvironment.model_validate(config))
        try:
            return await work(pool)
        finally:
            await pool.close()

    return asyncio.run(asyncio.wait_for(run(), 120))


async def play(pool: EnvironmentPool, fault: str, gate: Gate | None = None) -> Ended:
    return await pool.play({"fault": fault}, gate or Gate())


async def leave_threads(pool: EnvironmentPool, count: int) -> None:
    """End so many sessions whose calls hang."""
    await pool.start()
    process = pool._processes[0]
    before = process.left()
    stuck = [asyncio.ensure_future(play(pool, "hangs in a thread")) for _ in range(count)]
    (served,) = psutil.Process(process._supervisor.pid).children()
    while served.num_threads() < before + count + 2:  # noqa: ASYNC110 — its own, and a reader
        await asyncio.sleep(0.02)
    for session in stuck:
        session.cancel()
    while process.left() < before + count:  # noqa: ASYNC110
        await asyncio.sleep(0.02)


def test_a_session_beside_many_that_hang_has_a_thread() -> None:
    async def work(pool: EnvironmentPool) -> None:
        gate = Gate(opened=False)
        # It begins its call when the others have ended, and their threads have not.
        session = asyncio.ensure_future(play(pool, "calls in a thread", gate))
        await leave_threads(pool, HUNG)
        later = asyncio.ensure_future(play(pool, "calls in a thread"))
        await asyncio.sleep(0)
        assert pool._waiting, "the process begins no more sessions"
        gate.open.set()
        first, second = await session, await later
        assert (first.end, second.end) == ("done", "done")
        assert first.reward != second.reward, "another process has replaced it"
        assert pool._processes[0].left() == 0

    with_pool(work)


def test_a_process_with_few_threads_left_goes_on() -> None:
    async def work(pool: EnvironmentPool) -> None:
        before = await play(pool, "calls in a thread")
        await leave_threads(pool, pools.MOST_LEFT - 1)
        after = await play(pool, "calls in a thread")
        assert before.reward == after.reward

    with_pool(work)


def test_only_calls_of_ended_sessions_are_left() -> None:
    number, over = [1], threading.Event()
    with CallThreads(3, lambda: number[0]) as threads:
        first = threads.submit(over.wait)
        number[0] = 2
        second = threads.submit(over.wait)
        assert [threads.left(running) for running in ([1, 2], [2], [1], [])] == [0, 1, 1, 2]
        over.set()
        assert first.result() and second.result()
    assert threads.left([]) == 0


def stops(task: Any, model: Model) -> float:
    raise StopIteration(7)


def hangs(task: Any, model: Model) -> float:
    threading.Event().wait()
    return 0.0


def test_a_blocking_function_that_hangs_counts_too() -> None:
    async def work(pool: EnvironmentPool) -> None:
        url = SessionUrl("http://127.0.0.1:9", "sk-of-this-session")
        ended = await pool.play({}, Gate(), url=url)
        assert ended.end == "deadline" and pool._processes[0].left() == 1

    agent = {"function": f"{__name__}:hangs"}
    with_pool(work, function="asyncrl.environments.agent:play", arguments=agent, deadline_s=1.0)


async def test_a_call_may_raise_what_a_future_does_not_take() -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        await in_thread(lambda: stops(None, Model(Gate())))
