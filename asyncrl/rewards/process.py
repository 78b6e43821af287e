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
import resource
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypedDict, TypeVar

from asyncrl.rewards.contract import (
    FunctionRewards,
    GroupCall,
    RewardError,
    check_rewards,
    failed,
    import_reward,
    keyword_arguments,
)
from asyncrl.runtime.child_process import MessageWriter, receive
from asyncrl.runtime.functions import is_async
from asyncrl.text.answer import AnswerFormat, AnswerReader

T = TypeVar("T")

CANCEL_S = 1.0
"""Seconds that an async function has to end after its task is canceled at the deadline."""


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
    deadline_s: float
    memory_bytes: int
    answers: AnswerFormat
    """How answers are found in the completions of the model in training."""


@dataclass(frozen=True, slots=True)
class Call:
    """A message to a reward process: run the function `name` on a group."""

    number: int
    name: str
    group: GroupCall


@dataclass(frozen=True, slots=True)
class Cancel:
    """A message to a reward process: the caller no longer waits for this call."""

    number: int


class Rewards(TypedDict):
    """The fields of a `FunctionRewards`."""

    rewards: list[float | None]
    parts: dict[str, list[float | None]]
    tokens: list[list[float] | None] | None


class ProcessMessage(TypedDict, total=False):
    """A message of a reward process: `ready` first, then `number` and the outcome of each call."""

    ready: dict[str, str]
    """Functions that could not be imported → why."""
    number: int
    rewards: Rewards
    late: bool
    """The call ended, but only after its deadline."""
    stuck: bool
    """The call can be ended only by ending the process."""
    error: str
    """Name of the exception's class."""
    message: str
    notes: list[str]


def serve(connection: socket.socket) -> None:
    """Serve calls until the pool closes the connection."""
    setup = receive(connection)
    assert isinstance(setup, Setup)
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_DATA, (setup.memory_bytes, setup.memory_bytes))
    _Process(connection, setup).run()


class _Process:
    def __init__(self, connection: socket.socket, setup: Setup) -> None:
        self._connection, self._setup = connection, setup
        self._send: Callable[[ProcessMessage], None] = MessageWriter(connection)
        self._functions: dict[str, Callable[..., object]] = {}
        self._failed_imports: dict[str, str] = {}
        self._main: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._threads = (
            ThreadPoolExecutor(setup.concurrency, thread_name_prefix="rewards")
            if setup.concurrency > 1
            else None
        )
        self._answers = AnswerReader(setup.answers)
        self._loop = asyncio.new_event_loop()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def run(self) -> None:
        """Import the functions, report that, then run plain functions in this thread."""
        for name, named in self._setup.functions.items():
            try:
                self._functions[name] = import_reward(named.function)
            except RewardError as error:
                # Each call of the function reports this, under its name.
                self._failed_imports[name] = str(error)
        self._send({"ready": self._failed_imports})
        for target in (self._run_loop, self._read):
            threading.Thread(target=target, daemon=True).start()
        while True:
            self._main.get()()

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        except SystemExit as ending:
            os._exit(ending.code if isinstance(ending.code, int) else 1)

    def _read(self) -> None:
        """Thread: handle messages from the pool until it closes the connection."""
        while True:
            try:
                message = receive(self._connection)
            except (EOFError, OSError):
                os._exit(0)
            if isinstance(message, Cancel):
                self._loop.call_soon_threadsafe(self._cancel, message.number)
            elif isinstance(message, Call):
                self._loop.call_soon_threadsafe(self._begin, message)

    def _begin(self, call: Call) -> None:
        task = self._tasks[call.number] = self._loop.create_task(self._answer(call))
        task.add_done_callback(lambda _: self._tasks.pop(call.number))

    def _cancel(self, number: int) -> None:
        if task := self._tasks.get(number):
            task.cancel()

    async def _answer(self, call: Call) -> None:
        """Send the outcome of the call.

        Past the deadline, that is `late` if the call has ended, and `stuck` if only the end of the
        process can end it.
        """
        try:
            given = await self._within_deadline(call)
        except asyncio.CancelledError:
            given = {"error": RewardError.__name__, "message": "canceled"}
        except RewardError as error:
            given = {
                "error": type(error).__name__,
                "message": str(error),
                "notes": getattr(error, "__notes__", []),
            }
        self._send({"number": call.number, **given})

    async def _within_deadline(self, call: Call) -> ProcessMessage:
        if call.name in self._failed_imports:
            raise RewardError(self._failed_imports[call.name])
        reward, named = self._functions[call.name], self._setup.functions[call.name]
        stage = _Stage()
        work = asyncio.ensure_future(self._work(reward, named, call.group, stage))
        try:
            done, _ = await asyncio.wait({work}, timeout=self._setup.deadline_s)
        except asyncio.CancelledError:
            if stage.in_thread:
                # A plain function cannot be stopped, and keeps its thread. So the answer is sent
                # when it returns, or at the deadline.
                done, _ = await asyncio.wait({work}, timeout=self._setup.deadline_s)
            else:
                work.cancel()
                await asyncio.wait({work}, timeout=CANCEL_S)
                raise
        if not done and not stage.in_thread:
            work.cancel()
            done, _ = await asyncio.wait({work}, timeout=CANCEL_S)
            return {"late": True} if done else {"stuck": True}
        if not done:
            return {"stuck": True}
        rewards = work.result()
        return {
            "rewards": {
                "rewards": rewards.rewards,
                "parts": rewards.parts,
                "tokens": rewards.tokens,
            }
        }

    async def _work(
        self, reward: Callable[..., object], named: Named, group: GroupCall, stage: _Stage
    ) -> FunctionRewards:
        values: object
        try:
            arguments = keyword_arguments(reward, group, named.arguments, self._answers)
            if is_async(reward):
                values = await reward(**arguments)
            else:
                stage.in_thread = True
                values, error = await asyncio.wrap_future(
                    self._in_thread(lambda: _outcome(lambda: reward(**arguments)))
                )
                stage.in_thread = False
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

    def _in_thread(self, work: Callable[[], T]) -> Future[T]:
        if self._threads is not None:
            return self._threads.submit(work)
        future: Future[T] = Future()
        self._main.put(lambda: _fulfill(future, work))
        return future


@dataclass(slots=True)
class _Stage:
    """Whether a call runs in a thread, where only the end of the process can end it."""

    in_thread: bool = False


def _outcome(work: Callable[[], object]) -> tuple[object, BaseException | None]:
    """What the work returned or raised. A future cannot hold StopIteration and would never
    complete, which looks like a hang."""
    try:
        return work(), None
    except SystemExit:
        raise
    except BaseException as error:
        return None, error


def _fulfill(future: Future[T], work: Callable[[], T]) -> None:
    try:
        future.set_result(work())
    except SystemExit:
        raise
    except BaseException as error:
        # The caller that waits for the future reports it.
        future.set_exception(error)
