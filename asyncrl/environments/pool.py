"""Environment processes: each runs the code of many sessions. A process is killed if one of its
sessions blocks it or does not end. It is replaced if threads have outlived too many of its
sessions.

    play ──► code of a session, in the process with the fewest ◄──requests, answers──► session, here

If a process ends, the session whose code ran is the cause, and the others begin again. If no code
ran, the cause is unknown. Then each session begins again alone in a process, where only it can
cause a failure.
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
    Answered,
    Play,
    Setup,
    Stop,
)
from asyncrl.environments.running import Ended, Limits
from asyncrl.runtime.child_process import ChildProcess
from asyncrl.runtime.functions import one_line
from asyncrl.sessions.answers import ChatRequest

SERVE = "asyncrl.environments.process:serve"
FOLDER = "environment"
"""Kind of the temporary folder of each process."""
START_TIMEOUT_S = 180.0
"""Seconds until a new process must be ready, imports included."""
RESTART_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
"""Seconds until a process is started again. They double while it does not start."""
LOOK_EVERY_S = 0.25
"""Seconds between two looks at what runs in a process."""
MOST_SEEN_S = 1.0
"""What the time between two looks counts at most. If the next look comes later, the pool's own
process did not run either, so the other process is not to blame for the rest."""
GUARD_S = 5.0
"""Seconds beyond its deadline, and beyond block_s, until the pool kills the process of a session
that has not ended."""
CLOSE_S = 4.0
"""Seconds that the games of a pool that ends get to close."""
BLOCKED = "it kept its process for over environment.block_s"
"""How the note of a session begins whose code blocked its process."""
MOST_LEFT = 16
"""Threads that may outlive their sessions in a process before it is replaced."""
SHARED = RUNNING.size + ALIVE.size
"""Bytes of the memory that a process shares with the pool."""


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


class AgentSession(ChatSession, Protocol):
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


@dataclass(slots=True, eq=False)
class _Entry:
    """A session that waits or runs."""

    number: int
    task: Mapping[str, Any]
    session: AgentSession
    alone: bool
    url: SessionUrl | None
    clock: Clock | None
    end: asyncio.Future[Ended]
    requests: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    answered: dict[int, Sequence[int]] = field(default_factory=dict)
    """Request → the nodes of its answers."""
    failed: Exception | None = None
    """Why the model could not answer a request, the last time."""
    guard: asyncio.TimerHandle | None = None
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its process does not run it any more."""

    def stop_requests(self) -> None:
        """Cancel the requests that are under way."""
        for request in self.requests.values():
            request.cancel()


class EnvironmentPool:
    """`config.processes` environment processes. Use it on one event loop, and close it.

    Args:
        output: file descriptor to which they print. None: to where this process prints.
    """

    def __init__(self, config: EnvironmentConfig, output: int | None = None) -> None:
        self._config, self._output = config, output
        self._limits = Limits(config.max_turns, config.deadline_s)
        self._processes = [_Process() for _ in range(config.processes)]
        self._waiting: list[_Entry] = []
        self._count = 0
        self._closing = self._closed = False
        self._ready: asyncio.Future[None] | None = None
        self._keepers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start the processes, and wait until one has imported the environment.

        Raises:
            EnvironmentFailedError: it cannot be imported, or its import takes longer than
                START_TIMEOUT_S.
        """
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._keepers = [
                asyncio.create_task(self._keep_running(process)) for process in self._processes
            ]
        await asyncio.shield(self._ready)

    async def play(
        self,
        task: Mapping[str, Any],
        session: AgentSession,
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
        if self._closing:
            raise EnvironmentFailedError("the environment processes have ended")
        await self.start()
        self._count += 1
        end: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        entry = _Entry(self._count, task, session, alone, url, clock, end)
        self._waiting.append(entry)
        self._dispatch()
        try:
            return await end
        except asyncio.CancelledError:
            self._give_up(entry)
            raise

    async def close(self) -> None:
        """Kill the processes and everything that they have started."""
        if self._closed:
            return
        self._closed = True
        await self.end_sessions()
        for process in self._processes:
            process.kill()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for entry in self._waiting:
            entry.end.cancel()
        for process in self._processes:
            process.free()

    async def end_sessions(self) -> None:
        """End all sessions, and begin no more. Games that have a `close` get a moment for it."""
        self._closing = True
        ends = []
        for process in self._processes:
            for entry in process.running.values() if process.closes else ():
                process.send(Stop(entry.number))
                entry.end.cancel()
                ends.append(entry.left.wait())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*ends)

    def _give_up(self, entry: _Entry) -> None:
        if entry in self._waiting:
            self._waiting.remove(entry)
        for process in self._processes:
            if entry.number in process.running:
                process.send(Stop(entry.number))
                entry.stop_requests()

    def _dispatch(self) -> None:
        """Give waiting sessions, in their order, to the processes with the fewest. One that must
        run alone delays those after it."""
        while self._waiting:
            alone = self._waiting[0].alone
            most = 1 if alone else self._config.concurrency
            free = [process for process in self._processes if process.has_room(most)]
            if not free:
                return
            process = min(free, key=lambda process: len(process.running))
            config = self._config
            process.begin(self._waiting.pop(0), config.deadline_s + config.block_s + GUARD_S)

    async def _keep_running(self, process: _Process) -> None:
        """Run one process after another, until the pool closes."""
        pause = RESTART_PAUSE_S
        while not self._closing:
            problem = await self._run(process)
            code = await process.end()
            if self._closing:
                break
            if process.ready:
                self._handle_end(process, code)
                pause = RESTART_PAUSE_S
            else:
                # What the process says itself is whole. Its exit code then says how it was ended.
                how = "" if process.refused else f" (exit code {code})"
                self._not_started(f"{problem}{how}")
                pause = min(2 * pause, LONGEST_PAUSE_S)
            process.forget()
            self._dispatch()
            await asyncio.sleep(pause)
        for entry in process.forget():
            entry.end.cancel()

    async def _run(self, process: _Process) -> str:
        """Run a process to its end. Returns why it ended."""
        watch: asyncio.Task[None] | None = None
        try:
            await process.start_with(self._setup(process), self._output)
            if self._closing:
                process.kill()
            ready = await asyncio.wait_for(process.read(), START_TIMEOUT_S)
            if why := str(ready["ready"]):
                process.refused = True
                return why
            process.ready, process.closes = True, bool(ready.get("closes"))
            watch = asyncio.create_task(self._watch(process))
            self._is_ready()
            self._dispatch()
            while True:
                self._handle(process, await process.read())
        except TimeoutError:
            return f"an environment process was not ready after {START_TIMEOUT_S:g} s"
        except EOFError:
            return (
                f"a process ended while it imported environment.function ="
                f" {self._config.entry!r}; its module must not exit"
            )
        except (OSError, ValueError, RecursionError) as error:  # or what it sends is no JSON
            return f"an environment process failed ({error})"
        finally:
            if watch is not None:
                watch.cancel()

    def _setup(self, process: _Process) -> Setup:
        config = self._config
        return Setup(
            config.entry,
            config.entry_arguments,
            self._limits,
            config.memory_bytes,
            process.shared,
            # Each session may leave one, and the others still have theirs.
            config.concurrency + 2 * MOST_LEFT,
        )

    async def _watch(self, process: _Process) -> None:
        """Kill the process if the code of one session keeps control for too long, if the event
        loop stands still for another reason, or if it is idle and has too many threads."""
        running, alive = _Unchanged(), _Unchanged()
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if process.is_worn() and not process.running:
                process.kill()
            self._dispatch()  # the threads may have ended
            number, since = now = process.running_now()
            blocked_s, silent_s = running.seconds(now), alive.seconds(process.alive())
            # A single look may be torn: the process writes meanwhile.
            if not blocked_s:
                continue
            if number == NOBODY:
                if silent_s > self._config.block_s:
                    process.kill()
                continue
            process.excuse_others(number, since)
            if blocked_s > self._config.block_s:
                process.blame(
                    number,
                    f"{BLOCKED} = {self._config.block_s:g} s without an await; call"
                    " blocking code with asyncio.to_thread",
                )

    def _handle(self, process: _Process, message: Mapping[str, Any]) -> None:
        entry = process.running.get(message["number"])
        if entry is None:
            return
        if "abandoned" in message:
            number = message["abandoned"]
            if request := entry.requests.pop(number, None):
                request.cancel()
            # The answer may be on its way. The environment does not get it.
            entry.session.abandon(entry.answered.pop(number, ()))
            return
        if "request" in message:
            if not entry.end.done():
                number = message["request"]
                entry.requests[number] = asyncio.create_task(_answer(process, entry, message))
            return
        process.done(entry)
        self._dispatch()
        if entry.end.done():
            return
        if "canceled" in message and not entry.alone:
            # By its own code, or by that of another session in its process.
            entry.end.set_exception(SessionLostError(alone=True))
        elif "canceled" in message:
            entry.end.set_result(Ended("env_error", note="it canceled its own task"))
        elif "failed" in message:
            entry.end.set_exception(entry.failed or ModelFailedError(message["failed"]))
        else:
            ended = Ended(**message["ended"])
            entry.end.set_result(replace(ended, note=one_line(ended.note)))

    def _handle_end(self, process: _Process, code: int | None) -> None:
        """Tell the sessions of a process that has ended what to do."""
        blamed, why = process.blamed or (process.running_now()[0], "")
        alone = len(process.running) == 1 and blamed in (NOBODY, *process.running)
        for entry in process.running.values():
            if entry.end.done():
                continue
            if entry.number == blamed or alone:
                note = why or f"it ended its process (exit code {code})"
                entry.end.set_result(Ended("env_error", note=note))
            else:
                entry.end.set_exception(SessionLostError(blamed not in process.running))

    def _is_ready(self) -> None:
        """Let sessions begin, also after an earlier process did not start."""
        if self._ready is None or (self._ready.done() and self._ready.exception() is not None):
            self._ready = asyncio.get_running_loop().create_future()
        if not self._ready.done():
            self._ready.set_result(None)

    def _not_started(self, why: str) -> None:
        if any(process.ready for process in self._processes):
            return
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(EnvironmentFailedError(why))
        while self._waiting:
            entry = self._waiting.pop()
            if not entry.end.done():
                entry.end.set_exception(EnvironmentFailedError(why))


async def _answer(process: _Process, entry: _Entry, message: Mapping[str, Any]) -> None:
    """Answer one request of a session."""
    head = (entry.number, message["request"])
    try:
        asked = message["asked"]
        answers = await entry.session.chat(ChatRequest(**{**asked, "stop": tuple(asked["stop"])}))
    except Exception as error:  # the environment gets it
        entry.failed = error
        name = type(error).__name__
        text = str(error) if name in REFUSALS else f"{name}: {error}"
        process.send(Answered(*head, (), name, text))
    else:
        entry.answered[message["request"]] = [answer.node for answer in answers]
        process.send(Answered(*head, answers))
    finally:
        entry.requests.pop(message["request"], None)


class _Unchanged:
    """The seconds for which a value has not changed, as this process has seen it."""

    def __init__(self) -> None:
        self._value: object = None
        self._looked, self._seconds = 0.0, 0.0

    def seconds(self, value: object) -> float:
        """Take a look. 0 if the value is another one than before."""
        now = time.monotonic()
        passed = min(now - self._looked, MOST_SEEN_S)
        self._seconds = self._seconds + passed if value == self._value else 0.0
        self._value, self._looked = value, now
        return self._seconds


class _Process(ChildProcess):
    """One environment process, and the sessions that run in it."""

    def __init__(self) -> None:
        super().__init__()
        self.ready = False
        self.closes = False
        """Whether its games have a method `close`."""
        self.refused = False
        """Whether it said itself why it cannot be used."""
        self.running: dict[int, _Entry] = {}
        self.blamed: tuple[int, str] | None = None
        """The number of the session that is the reason to kill it, and why."""
        self._excused = 0.0
        """Until when the sessions know what another one has blocked."""
        self.shared = os.memfd_create("environment")
        os.ftruncate(self.shared, SHARED)
        self._memory = mmap.mmap(self.shared, SHARED)

    def free(self) -> None:
        """Free the shared memory. The process cannot be started again."""
        self._memory.close()
        os.close(self.shared)

    async def start_with(self, setup: Setup, output: int | None) -> None:
        RUNNING.pack_into(self._memory, 0, NOBODY, 0.0)
        ALIVE.pack_into(self._memory, RUNNING.size, time.monotonic(), 0)
        await self.start(SERVE, setup, (self.shared,), FOLDER, output)

    def running_now(self) -> tuple[int, float]:
        """The number of the session whose code has control, or NOBODY, and since when."""
        number, since = RUNNING.unpack_from(self._memory)
        return number, since

    def alive(self) -> float:
        """When the event loop gave its last sign of life, by `time.monotonic`."""
        alive, _ = ALIVE.unpack_from(self._memory, RUNNING.size)
        return float(alive)

    def silent_s(self) -> float:
        """Seconds since the event loop's last sign of life."""
        return time.monotonic() - self.alive()

    def left(self) -> int:
        """The number of threads that have outlived their sessions."""
        _, left = ALIVE.unpack_from(self._memory, RUNNING.size)
        return int(left)

    def is_worn(self) -> bool:
        """Whether those are too many. It begins no more sessions, and is replaced after its last
        one."""
        return self.left() >= MOST_LEFT

    def has_room(self, most: int) -> bool:
        """Whether it may begin a session, if it runs `most` at once."""
        return (
            self.ready
            and not self.killed
            and not self.is_worn()
            and len(self.running) < most
            and not any(entry.alone for entry in self.running.values())
        )

    def begin(self, entry: _Entry, limit_s: float) -> None:
        """Begin a session; kill the process if it has not ended after `limit_s`."""
        loop = asyncio.get_running_loop()
        why = f"it did not end within {limit_s:g} s, although it was canceled"
        entry.guard = loop.call_later(limit_s, self._guard, entry.number, why)
        self.running[entry.number] = entry
        if entry.clock is not None:
            entry.clock.start()
        self.send(Play(entry.number, entry.task, entry.url))

    def _guard(self, number: int, why: str) -> None:
        """Blame a session that has not ended, unless the loop stands still: then its deadline
        could not end it, and the watch finds out who is the cause."""
        if self.silent_s() < GUARD_S:
            self.blame(number, why)
        else:
            self.kill()

    def excuse_others(self, number: int, since: float) -> None:
        """Tell the other sessions that this one has blocked them since then."""
        now = time.monotonic()
        seconds, self._excused = now - max(since, self._excused), now
        for entry in self.running.values():
            if entry.number != number and entry.clock is not None:
                entry.clock.excuse(seconds)

    def blame(self, number: int, why: str) -> None:
        """Kill the process because of one session."""
        self.blamed = self.blamed or (number, why)
        self.kill()

    def done(self, entry: _Entry) -> None:
        """Remove a session that has ended."""
        del self.running[entry.number]
        entry.left.set()
        if entry.guard is not None:
            entry.guard.cancel()
        entry.stop_requests()

    def forget(self) -> list[_Entry]:
        """Reset for a restart. Returns the sessions that ran."""
        lost = list(self.running.values())
        for entry in lost:
            self.done(entry)
        self.blamed, self.ready, self.refused, self.killed = None, False, False, False
        return lost
