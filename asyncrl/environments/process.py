"""A process that runs the sessions of an environment, many at once in one event loop. It imports
nothing heavy.

Its pool kills it if a session blocks the loop. So the process writes to memory that the pool can
read: the number of the session whose code runs, and the time when that code got control."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import mmap
import os
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, cast

from asyncrl.environments.agent import play
from asyncrl.environments.model import SessionUrl
from asyncrl.environments.running import Ended, Environment, Limits, run_session
from asyncrl.environments.threads import CallThreads
from asyncrl.runtime.functions import FunctionError, import_function, is_async, short, text_of
from asyncrl.runtime.processes.child_process import (
    Begin,
    Cancel,
    MessageWriter,
    limit_memory,
    receive,
    receive_on,
)
from asyncrl.sessions.answers import (
    Answer,
    ChatRequest,
    ContextTooLongError,
    SessionClosedError,
    TurnDeadlineError,
    TurnsExceededError,
)
from asyncrl.text.chat_messages import MessagesError

RUNNING, ALIVE = struct.Struct("=qd"), struct.Struct("=dq")
"""In the shared memory: the number of the session whose code runs, or NOBODY, and the time by
`time.monotonic` when it got control. After it, the time when the event loop was last alive, and the
number of threads that have outlived their sessions."""
SHARED = RUNNING.size + ALIVE.size
"""Bytes of the shared memory."""
NOBODY = -1
BEAT_S = 0.25
"""Seconds between two signs of life of the event loop."""
REFUSALS = {
    kind.__name__: kind
    for kind in (
        ContextTooLongError,
        MessagesError,
        SessionClosedError,
        TurnDeadlineError,
        TurnsExceededError,
    )
}
"""Errors of a request that are the environment's business."""

ASKED = [field.name for field in fields(ChatRequest)]

_NUMBER: contextvars.ContextVar[int] = contextvars.ContextVar("session", default=NOBODY)


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message to the process."""

    function: str
    arguments: Mapping[str, object]
    limits: Limits
    memory_bytes: int
    running: int
    """File descriptor of the shared memory."""
    threads: int
    """Most threads for `asyncio.to_thread`."""


@dataclass(frozen=True, slots=True)
class Play:
    """The work of a call: a session."""

    task: Mapping[str, Any]
    url: SessionUrl | None = None


@dataclass(frozen=True, slots=True)
class Answered:
    """A message to the process: what a session answered to a request."""

    number: int
    request: int
    answers: Sequence[Answer] = ()
    error: str = ""
    """Name of the class of its error; "" without one."""
    message: str = ""


class ModelSideError(RuntimeError):
    """The model could not answer. The environment has no part in it."""


def serve(connection: socket.socket) -> None:
    """Run sessions until the pool closes the connection."""
    setup = receive(connection)
    assert isinstance(setup, Setup)
    limit_memory(setup.memory_bytes)
    send = MessageWriter(connection)
    try:
        environment = imported(setup.function, setup.arguments)
    except FunctionError as error:
        send({"ready": str(error)})
        return
    process = _Process(connection, send, environment, setup)
    closes = inspect.isclass(environment) and callable(getattr(environment, "close", None))
    send({"ready": "", "closes": closes})
    asyncio.run(process.run())


def imported(function: str, arguments: Mapping[str, object]) -> Environment:
    """The environment `package.module:function`.

    Raises:
        FunctionError: it cannot be imported, is neither an async function nor a class with `reset`
            and `step`, or does not take the arguments.
    """
    found = import_function("environment.function", function)
    if inspect.isclass(found):
        missing = [name for name in ("reset", "step") if not callable(getattr(found, name, None))]
        if missing:
            raise FunctionError(
                f"environment.function {function!r} is a class without {' and '.join(missing)};"
                " a game needs both"
            )
    elif not is_async(found) and not is_async(inspect.unwrap(found)):
        raise FunctionError(
            f"environment.function {function!r} is not an async function; write `async def`, or"
            " name a class with reset and step"
        )
    _check_arguments(
        "environment.function", function, found, 0 if inspect.isclass(found) else 2, arguments
    )
    if found is play and arguments.get("function") is not None:
        agent = str(arguments["function"])
        own = cast("Mapping[str, object]", arguments.get("arguments") or {})
        _check_arguments(
            "environment.agent", agent, import_function("environment.agent", agent), 2, own
        )
    return cast("Environment", found)


def _check_arguments(
    setting: str,
    name: str,
    function: Callable[..., object],
    first: int,
    arguments: Mapping[str, object],
) -> None:
    """Raise FunctionError if a function cannot take the arguments of its section.

    Args:
        first: arguments that it gets before them: none, or the task and the model.
    """
    try:
        # Not of what a decorator wraps: that may get more arguments from it, or fewer.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # it has none
        return
    try:
        signature.bind(*[None] * first, **arguments)
    except TypeError as error:
        takes = [
            one.name
            for one in list(signature.parameters.values())[first:]
            if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)
        ]
        gets = "it gets the task and the model, and takes" if first else "it takes"
        raise FunctionError(
            f"{setting} {name!r} cannot be called with environment.arguments ="
            f" {short(repr(dict(arguments)))}: {error}; {gets} of environment.arguments:"
            f" {', '.join(takes) or 'nothing'}"
        ) from None


class _Process:
    def __init__(
        self,
        connection: socket.socket,
        send: Callable[[object], None],
        environment: Environment,
        setup: Setup,
    ) -> None:
        self._connection, self._send = connection, send
        self._environment, self._setup = environment, setup
        self._running = mmap.mmap(setup.running, SHARED)
        self._playing: dict[int, asyncio.Task[dict[str, object]]] = {}
        self._sessions: dict[int, _RemoteSession] = {}
        self._tasks: dict[int, set[asyncio.Task[Any]]] = {}
        """All tasks of each session, its own included."""
        self._stopped: set[int] = set()
        self._threads = CallThreads(setup.threads, _NUMBER.get)
        self._note()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_task_factory(self._task)
        loop.set_default_executor(self._threads)
        self._beat(loop)
        receive_on(loop, self._connection, self._handle)
        while True:
            # Code of an environment may cancel all tasks of the loop.
            with contextlib.suppress(asyncio.CancelledError):
                await loop.create_future()

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self._note()
        loop.call_later(BEAT_S, self._beat, loop)

    def _note(self) -> None:
        """Write a sign of life, and how many threads have outlived their sessions."""
        left = self._threads.left((NOBODY, *self._playing))
        ALIVE.pack_into(self._running, RUNNING.size, time.monotonic(), left)

    def _task(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> Any:
        """A task of a session notes whose code runs."""
        context = options.get("context")
        number = _NUMBER.get() if context is None else context.get(_NUMBER, NOBODY)
        if number == NOBODY:
            return asyncio.Task(work, loop=loop, **options)
        task = asyncio.Task(_noted(_Timed(work, self._running, number)), loop=loop, **options)
        tasks = self._tasks.setdefault(number, set())
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    def _handle(self, message: object) -> None:
        match message:
            case Begin(number, Play(task, url)):
                context = contextvars.copy_context()
                context.run(_NUMBER.set, number)
                self._sessions[number] = _RemoteSession(self._send, number)
                playing = self._playing[number] = asyncio.get_running_loop().create_task(
                    self._play(number, task, url), context=context
                )
                playing.add_done_callback(functools.partial(self._ended, number))
            case Answered(number, request, answers, error, text):
                if session := self._sessions.get(number):
                    session.answered(request, answers, error, text)
            case Cancel(number):
                # Once: a second one would cancel the `close` of a game.
                if number not in self._stopped and (task_of := self._playing.get(number)):
                    self._stopped.add(number)
                    task_of.cancel()

    def _ended(self, number: int, playing: asyncio.Task[dict[str, object]]) -> None:
        """Send how a session ended, and end what it has left behind."""
        for task in self._tasks.pop(number, ()):
            task.cancel()
        self._stopped.discard(number)
        del self._playing[number], self._sessions[number]
        self._note()  # before the pool gives this process another session
        # A task that was canceled before its first step has no result.
        ended = {"failed": "stopped"} if playing.cancelled() else playing.result()
        self._send({"number": number, **ended})

    async def _play(
        self, number: int, task: Mapping[str, Any], url: SessionUrl | None
    ) -> dict[str, object]:
        """Run a session. Returns how it ended, as a message."""
        try:
            ended = await run_session(
                self._environment,
                task,
                self._sessions[number],
                self._setup.limits,
                self._setup.arguments,
                url,
            )
        except asyncio.CancelledError:
            if number in self._stopped:
                raise
            return {"canceled": True}
        except Exception as error:  # of the model's side
            return {"failed": f"{type(error).__name__}: {text_of(str, error)}"}
        except BaseException as error:
            note = f"{type(error).__name__}: {text_of(str, error)}"
            ended = Ended("env_error", note=note)
        return {"ended": asdict(ended)}


class _RemoteSession:
    """A session, which lives in the pool's process."""

    def __init__(self, send: Callable[[object], None], number: int) -> None:
        self._send, self._number = send, number
        self._requests: dict[int, asyncio.Future[list[Answer]]] = {}
        self._count = 0

    async def chat(self, asked: ChatRequest) -> list[Answer]:
        request, self._count = self._count, self._count + 1
        answer: asyncio.Future[list[Answer]] = asyncio.get_running_loop().create_future()
        self._requests[request] = answer
        try:
            try:
                self._send(
                    {
                        "number": self._number,
                        "request": request,
                        "asked": {name: getattr(asked, name) for name in ASKED},
                    }
                )
            except Exception as error:  # such as deep nesting
                raise MessagesError(f"the messages are not JSON: {error}") from None
            return await answer
        finally:
            del self._requests[request]
            if not answer.done() or answer.cancelled():
                self._send({"number": self._number, "abandoned": request})

    def answered(self, request: int, answers: Sequence[Answer], error: str, message: str) -> None:
        """Give a request its answers, or its error."""
        waiting = self._requests.get(request)
        if waiting is None:
            return

        def settle() -> None:
            if waiting.done():
                return
            if error:
                waiting.set_exception(REFUSALS.get(error, ModelSideError)(message))
            else:
                waiting.set_result(list(answers))

        # An environment may ask in a thread, with an event loop of its own.
        waiting.get_loop().call_soon_threadsafe(settle)


async def _noted(steps: _Timed) -> Any:
    return await steps


class _Timed(Awaitable[Any]):
    """Runs a coroutine, and notes in shared memory while its code has control."""

    def __init__(self, work: Coroutine[Any, Any, Any], running: mmap.mmap, number: int) -> None:
        self._work, self._running, self._number = work, running, number

    def __await__(self) -> Generator[Any, Any, Any]:
        work, resume, value = self._work, self._work.send, None
        while True:
            RUNNING.pack_into(self._running, 0, self._number, time.monotonic())
            try:
                given = resume(value)
            except StopIteration as done:
                return done.value
            except (SystemExit, KeyboardInterrupt) as leaving:
                # At once, while this session is the one that runs.
                code = leaving.code if isinstance(leaving, SystemExit) else 130
                os._exit(code if isinstance(code, int) else 1)
            finally:
                RUNNING.pack_into(self._running, 0, NOBODY, 0.0)
            try:
                value, resume = (yield given), work.send
            except GeneratorExit:
                work.close()
                raise
            except BaseException as error:  # the task is canceled, for example
                value, resume = error, work.throw
