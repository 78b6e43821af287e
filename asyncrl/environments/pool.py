"""Environment processes: each runs the code of many sessions. A process is killed if one of its
sessions blocks it or does not end. It is replaced if threads have outlived too many of its
sessions.

    play ──► code of a session, in a process ◄──requests, answers──► session, here

If a process ends, the session whose code ran is the cause, and the others begin again. If no code
ran, the cause is unknown. Then each session begins again alone in a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from asyncrl.config import EnvironmentConfig
from asyncrl.environments.model import ChatSession, SessionUrl
from asyncrl.environments.process import (
    ALIVE,
    NOBODY,
    REFUSALS,
    RUNNING,
    SHARED,
    Answered,
    Play,
    Setup,
)
from asyncrl.environments.running import Ended, Limits
from asyncrl.runtime.functions import one_line
from asyncrl.runtime.processes.pool import START_TIMEOUT_S, Call, PoolProcess, ProcessPool
from asyncrl.sessions.answers import ChatRequest

SERVE = "asyncrl.environments.process:serve"
FOLDER = "environment"
"""Kind of the temporary folder of each process."""
GUARD_S = 5.0
"""Seconds beyond its deadline, and beyond block_s, until the pool kills the process of a session
that has not ended."""
CLOSE_S = 4.0
"""Seconds that the games of a pool that ends get to close."""
BLOCKED = "it kept its process for over environment.block_s"
"""How the note of a session begins whose code blocked its process."""
MOST_LEFT = 16
"""Threads that may outlive their sessions in a process before it is replaced."""


class EnvironmentFailedError(RuntimeError):
    """The environment cannot be imported, or its processes do not start."""


class ModelFailedError(RuntimeError):
    """The model could not answer a session's request. The environment has no part in it."""


class SessionLostError(RuntimeError):
    """The process of a session ended, and another session may be the cause. Begin it again.

    `alone` says whether it must then be alone in its process, because the cause is unknown.
    """

    def __init__(self, alone: bool) -> None:
        super().__init__("the process of a session ended")
        self.alone = alone


class PooledSession(ChatSession, Protocol):
    """A session, as the pool needs it."""

    def abandon(self, nodes: Sequence[int]) -> None:
        """Note that the agent did not get these answers."""
        ...


class Clock(Protocol):
    """The clock of a session."""

    def start(self) -> None:
        """Note that the session begins, after it has waited for a process."""
        ...

    def excuse(self, seconds: float) -> None:
        """Note that the code of another session has blocked their process for so long."""
        ...


@dataclass(slots=True, eq=False, kw_only=True)
class _Session(Call[Ended]):
    """A session that waits or runs."""

    session: PooledSession
    clock: Clock | None
    requests: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    answered: dict[int, Sequence[int]] = field(default_factory=dict)
    """Request → the nodes of its answers."""
    failed: Exception | None = None
    """Why the model could not answer a request, the last time."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its process does not run it any more."""

    def stop_requests(self) -> None:
        """Cancel the requests that are under way."""
        for request in self.requests.values():
            request.cancel()


class _Unchanged:
    """The seconds for which a value has not changed."""

    def __init__(self) -> None:
        self._value: object = None
        self._since_s = 0.0

    def seconds(self, value: object, now_s: float) -> float:
        """Take a look. 0 if the value is another one than before."""
        if value != self._value:
            self._value, self._since_s = value, now_s
        return now_s - self._since_s


@dataclass(eq=False, kw_only=True)
class _Process(PoolProcess[_Session]):
    """One environment process, and the sessions that run in it."""

    memory: mmap.mmap
    """What the process tells of itself, also while a session blocks it."""
    closes: bool = False
    """Whether its games have a method `close`."""
    _control: _Unchanged = field(default_factory=_Unchanged)
    _silence: _Unchanged = field(default_factory=_Unchanged)
    _excused: float = 0.0
    """Until when the sessions know what another one has blocked."""

    def in_control(self) -> tuple[int, float]:
        """The number of the session whose code has control, or NOBODY, and since when."""
        number, since = RUNNING.unpack_from(self.memory)
        return number, since

    def blocked_s(self, now_s: float) -> float:
        """Seconds for which the pool has seen no change of that."""
        return self._control.seconds(self.in_control(), now_s)

    def silent_s(self, now_s: float) -> float:
        """Seconds for which the pool has seen no sign of life of the event loop."""
        return self._silence.seconds(ALIVE.unpack_from(self.memory, RUNNING.size)[0], now_s)

    def left(self) -> int:
        """The number of threads that have outlived their sessions."""
        _, left = ALIVE.unpack_from(self.memory, RUNNING.size)
        return int(left)

    def is_worn(self) -> bool:
        """Whether those are too many. It begins no more sessions, and is replaced after its last
        one."""
        return self.left() >= MOST_LEFT

    def has_room(self, most: int) -> bool:
        """Whether the process may begin a session, if it runs `most` at once."""
        return not self.is_worn() and super().has_room(most)

    def begin(self, call: _Session) -> None:
        """Begin a session."""
        if call.clock is not None:
            call.clock.start()
        super().begin(call)

    def done(self, call: _Session) -> None:
        """Remove a session that has ended."""
        super().done(call)
        call.left.set()
        call.stop_requests()

    def excuse_others(self, number: int, since: float) -> None:
        """Tell the other sessions that this one has blocked them since then."""
        now = time.monotonic()
        seconds, self._excused = now - max(since, self._excused), now
        for call in self.running.values():
            if call.number != number and call.clock is not None:
                call.clock.excuse(seconds)

    def culprits(self) -> Mapping[int, str]:
        """See `PoolProcess.culprits`: also the session whose code ran last."""
        number, _ = self.in_control()
        return self.blamed or ({} if number == NOBODY else {number: ""})


class EnvironmentPool(ProcessPool[_Session, _Process]):
    """`config.processes` environment processes. Use it on one event loop, and close it.

    Args:
        output: file descriptor to which they print. None: to where this process prints.
    """

    def __init__(self, config: EnvironmentConfig, output: int | None = None) -> None:
        limit_s = config.deadline_s + config.block_s + GUARD_S
        super().__init__(config.processes, config.concurrency, limit_s)
        self._config, self._output = config, output

    async def play(
        self,
        task: Mapping[str, Any],
        session: PooledSession,
        alone: bool = False,
        url: SessionUrl | None = None,
        clock: Clock | None = None,
    ) -> Ended:
        """Play one session to its end.

        Args:
            session: answers the requests of the environment, in this process.
            alone: whether no other session may run in its process.
            url: where the session is served, if it is.
            clock: learns when the session begins, and what others block.

        Raises:
            SessionLostError: its process ended, and it is not known to be the cause.
            Any error of the session that is not the environment's business.
            EnvironmentFailedError: no process starts.
        """
        if self._closing.is_set():
            raise EnvironmentFailedError("the environment processes have ended")
        await self.start()
        call = _Session(Play(task, url), alone, session=session, clock=clock)
        try:
            ended: Ended = await self._run(call)
            return ended
        finally:
            call.stop_requests()

    async def close(self) -> None:
        """Kill the processes and everything that they have started."""
        await self.end_sessions()
        await self._close()

    async def end_sessions(self) -> None:
        """End all sessions, and begin no more. Games that have a `close` get a moment for it."""
        self._closing.set()
        closing = [
            call
            for process in self._processes
            if process.closes
            for call in process.running.values()
        ]
        for call in closing:
            self._cancel(call)
            call.answer.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*(call.left.wait() for call in closing))

    async def _start_process(self) -> _Process:
        config = self._config
        shared = os.memfd_create("environment")
        try:
            os.ftruncate(shared, SHARED)
            memory = mmap.mmap(shared, SHARED)
            RUNNING.pack_into(memory, 0, NOBODY, 0.0)
            ALIVE.pack_into(memory, RUNNING.size, time.monotonic(), 0)
            setup = Setup(
                config.entry,
                config.entry_arguments,
                Limits(config.max_turns, config.deadline_s),
                config.memory_bytes,
                shared,
                # Each session may leave one, and the others still have theirs.
                config.concurrency + 2 * MOST_LEFT,
            )
            return await _Process.start(
                SERVE, setup, (shared,), FOLDER, self._output, memory=memory
            )
        finally:
            os.close(shared)

    def _accept(self, process: _Process, ready: Mapping[str, Any]) -> None:
        if why := str(ready["ready"]):
            raise EnvironmentFailedError(why)
        process.closes = bool(ready.get("closes"))

    def _not_started(self, cause: Exception, code: int | None) -> EnvironmentFailedError:
        if isinstance(cause, EnvironmentFailedError):
            return cause  # what the process says itself is whole
        why = f"an environment process failed ({cause})"
        if isinstance(cause, TimeoutError):
            why = f"an environment process was not ready after {START_TIMEOUT_S:g} s"
        elif isinstance(cause, EOFError):
            why = (
                f"a process ended while it imported environment.function ="
                f" {self._config.entry!r}; its module must not exit"
            )
        return EnvironmentFailedError(f"{why} (exit code {code})")

    def _look(self, process: _Process) -> None:
        """Kill the process if the code of one session keeps control for too long, if the event
        loop stands still for another reason, or if it is idle and has too many threads."""
        if process.is_worn() and not process.running:
            process.kill()
        self._dispatch()  # the threads may have ended
        number, since = process.in_control()
        blocked_s, silent_s = process.blocked_s(self._seen_s), process.silent_s(self._seen_s)
        # A single look may be torn: the process writes meanwhile.
        if not blocked_s:
            return
        if number == NOBODY:
            if silent_s > self._config.block_s:
                process.kill()
            return
        process.excuse_others(number, since)
        if blocked_s > self._config.block_s:
            process.blame(
                number,
                f"{BLOCKED} = {self._config.block_s:g} s without an await; call"
                " blocking code with asyncio.to_thread",
            )

    def _overdue(self, process: _Process, call: _Session) -> None:
        """Blame a session that has not ended, unless the loop stands still: then its deadline
        could not end it, and the looks find out who is the cause."""
        if process.silent_s(self._seen_s) < GUARD_S:
            why = f"it did not end within {self._limit_s:g} s, although it was canceled"
            process.blame(call.number, why)
        else:
            process.kill()

    def _handle(self, process: _Process, call: _Session, message: Mapping[str, Any]) -> None:
        if "abandoned" in message:
            number = message["abandoned"]
            if request := call.requests.pop(number, None):
                request.cancel()
            # The answer may be on its way. The environment does not get it.
            call.session.abandon(call.answered.pop(number, ()))
        elif "request" in message:
            if not call.answer.done():
                number = message["request"]
                call.requests[number] = asyncio.create_task(_answer(process, call, message))
        else:
            process.done(call)
            self._ended(call, message)

    def _ended(self, call: _Session, message: Mapping[str, Any]) -> None:
        if "canceled" in message and not call.alone:
            # By its own code, or by that of another session in its process.
            call.fail(SessionLostError(alone=True))
        elif "canceled" in message:
            call.give(Ended("env_error", note="it canceled its own task"))
        elif "failed" in message:
            call.fail(call.failed or ModelFailedError(message["failed"]))
        else:
            ended = Ended(**message["ended"])
            call.give(replace(ended, note=one_line(ended.note)))

    def _culprit(self, call: _Session, why: str, code: int | None) -> None:
        call.give(Ended("env_error", note=why or f"it ended its process (exit code {code})"))

    def _lost(self, call: _Session, alone: bool) -> None:
        call.fail(SessionLostError(alone))


async def _answer(process: _Process, call: _Session, message: Mapping[str, Any]) -> None:
    """Answer one request of a session."""
    head = (call.number, message["request"])
    try:
        asked = message["asked"]
        answers = await call.session.chat(ChatRequest(**{**asked, "stop": tuple(asked["stop"])}))
    except Exception as error:  # the environment gets it
        call.failed = error
        name = type(error).__name__
        text = str(error) if name in REFUSALS else f"{name}: {error}"
        process.send(Answered(*head, (), name, text))
    else:
        call.answered[message["request"]] = [answer.node for answer in answers]
        process.send(Answered(*head, answers))
    finally:
        call.requests.pop(message["request"], None)
