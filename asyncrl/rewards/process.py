"""A reward process: reads calls from its socket, runs reward functions, writes answers. Imports
nothing heavy.

    reader thread ──plain functions──► main thread (concurrency 1), else a pool of threads
          └────────async functions───► one event loop, in its own thread

Plain functions run in the main thread, so that signals and `asyncio.run` work in them. All async
calls share one loop, so that a client that is kept between calls keeps working.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import queue
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from asyncrl.rewards.contract import (
    FunctionRewards,
    GroupCall,
    RewardError,
    check_rewards,
    failed,
    import_reward,
    keyword_arguments,
)
from asyncrl.runtime.functions import is_async
from asyncrl.runtime.processes.child_process import (
    Begin,
    Cancel,
    MessageWriter,
    limit_memory,
    receive,
    receive_on,
)
from asyncrl.text.answer import AnswerFormat, AnswerReader

T = TypeVar("T")

FIELDS = [field.name for field in fields(FunctionRewards)]
CANCEL_S = 1.0
"""Seconds that an async function has to end after its task is canceled."""


@dataclass(frozen=True, slots=True)
class Named:
    """A reward function of the config."""

    function: str
    arguments: Mapping[str, object]
    per_token: bool


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message to a reward process."""

    functions: Mapping[str, Named]
    concurrency: int
    memory_bytes: int
    answers: AnswerFormat
    """How answers are found in the completions of the model in training."""


@dataclass(frozen=True, slots=True)
class Score:
    """The work of a call: run the function `name` on a group."""

    name: str
    group: GroupCall


def serve(connection: socket.socket) -> None:
    """Serve calls until the pool closes the connection."""
    setup = receive(connection)
    assert isinstance(setup, Setup)
    limit_memory(setup.memory_bytes)
    _Process(connection, setup).run()


class _MainThread(Executor):
    """Runs calls in the main thread."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put(lambda: future.set_result(fn(*args, **kwargs)))
        return future

    def run(self) -> None:
        """Run the calls, for ever."""
        while True:
            self._calls.get()()


class _Process:
    def __init__(self, connection: socket.socket, setup: Setup) -> None:
        self._connection, self._setup = connection, setup
        self._send = MessageWriter(connection)
        self._functions: dict[str, Callable[..., object]] = {}
        self._failed_imports: dict[str, str] = {}
        self._main = _MainThread()
        self._threads = (
            ThreadPoolExecutor(setup.concurrency, thread_name_prefix="rewards")
            if setup.concurrency > 1
            else self._main
        )
        self._answers = AnswerReader(setup.answers)
        self._loop = asyncio.new_event_loop()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._in_thread: set[int] = set()
        """Calls that run in a thread, where only the end of the process can end them."""

    def run(self) -> None:
        """Import the functions, report that, then run plain functions in this thread."""
        for name, named in self._setup.functions.items():
            try:
                self._functions[name] = import_reward(named.function)
            except RewardError as error:
                # Each call of the function reports this, under its name.
                self._failed_imports[name] = str(error)
        self._send({"ready": self._failed_imports})
        threading.Thread(target=self._run_loop, daemon=True).start()
        receive_on(self._loop, self._connection, self._handle)
        self._main.run()

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        except SystemExit as ending:
            os._exit(ending.code if isinstance(ending.code, int) else 1)

    def _handle(self, message: object) -> None:
        match message:
            case Begin(number, Score() as work):
                task = self._tasks[number] = self._loop.create_task(self._answer(number, work))
                task.add_done_callback(lambda _: self._tasks.pop(number))
            case Cancel(number) if number in self._in_thread:
                self._report_stuck(number)
            case Cancel(number) if number in self._tasks:
                self._tasks[number].cancel()
                self._loop.call_later(CANCEL_S, self._report_stuck, number)

    def _report_stuck(self, number: int) -> None:
        """Send that only the end of the process can end a call that was canceled."""
        if number in self._tasks:
            self._send({"number": number, "stuck": True})

    async def _answer(self, number: int, work: Score) -> None:
        """Send the outcome of a call: `rewards`, or the `error`'s class, `message` and `notes`."""
        given: dict[str, object]
        try:
            rewards = await self._rewards(number, work)
            given = {"rewards": {name: getattr(rewards, name) for name in FIELDS}}
        except asyncio.CancelledError:
            given = {"error": RewardError.__name__, "message": "canceled"}
        except RewardError as error:
            given = {
                "error": type(error).__name__,
                "message": str(error),
                "notes": getattr(error, "__notes__", []),
            }
        self._send({"number": number, **given})

    async def _rewards(self, number: int, work: Score) -> FunctionRewards:
        if work.name in self._failed_imports:
            raise RewardError(self._failed_imports[work.name])
        reward, named = self._functions[work.name], self._setup.functions[work.name]
        group = work.group
        values: object
        try:
            arguments = keyword_arguments(reward, group, named.arguments, self._answers)
            if is_async(reward):
                values = await reward(**arguments)
            else:
                self._in_thread.add(number)
                values, error = await self._loop.run_in_executor(
                    self._threads, _outcome, lambda: reward(**arguments)
                )
                self._in_thread.discard(number)
                if error is not None:
                    raise error
                if inspect.isawaitable(values):
                    values = await values
        except (asyncio.CancelledError, SystemExit):
            raise
        except BaseException as error:
            # Not only Exception: KeyboardInterrupt and some packages' errors are BaseExceptions.
            raise failed(named.function, error, group, named.arguments) from None
        return check_rewards(named.function, values, group, named.per_token)


def _outcome(work: Callable[[], object]) -> tuple[object, BaseException | None]:
    """What the work returned or raised. A future cannot hold StopIteration and would never
    complete, which looks like a hang."""
    try:
        return work(), None
    except SystemExit:
        raise
    except BaseException as error:
        return None, error
