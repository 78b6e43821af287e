"""Environment processes: attempts run in separate processes, many in each. A process is killed if
one of its attempts blocks it or does not end. It is replaced if threads have outlived too many of
its attempts.

    play ──► an attempt in the process with the fewest ◄──requests, answers──► its session, here

If a process ends, the attempt whose code ran is the cause, and the others are made again. If no
code ran, the cause is unknown. Then each attempt is made again alone in a process, where only it
can cause a failure.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from asyncrl.config import EnvironmentConfig
from asyncrl.environments.attempt import Ended, Limits
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
from asyncrl.runtime.child_process import ChildProcess
from asyncrl.runtime.functions import one_line
from asyncrl.sessions.answers import ChatRequest

__all__ = ["AttemptLostError", "EnvironmentFailedError", "EnvironmentPool", "ModelFailedError"]

SERVE = "asyncrl.environments.process:serve"
FOLDER = "environment"
"""Kind of the temporary folder of each process."""
START_TIMEOUT_S = 180.0
"""Seconds until a new process must be ready, imports included."""
RESTART_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
"""Seconds until a process is started again. They double while it does not start."""
LOOK_EVERY_S = 0.25
"""Seconds between two looks at what runs in a process."""
GUARD_S = 5.0
"""Seconds beyond its deadline, and beyond block_s, until the pool kills the process of an attempt
that has not ended."""
MOST_LEFT = 16
"""Threads that may outlive their attempts in a process before it is replaced."""
SHARED = RUNNING.size + ALIVE.size
"""Bytes of the memory that a process shares with the pool."""


class EnvironmentFailedError(RuntimeError):
    """The environment cannot be imported, or its processes do not start."""


class ModelFailedError(RuntimeError):
    """The model could not answer an attempt. The environment has no part in it."""


class AttemptLostError(RuntimeError):
    """The process of an attempt ended, and another attempt may be the cause. Make it again.

    `alone` says whether it must then be alone in its process, because the cause is unknown.
    """

    def __init__(self, alone: bool) -> None:
        super().__init__("the process of an attempt ended")
        self.alone = alone


class AgentSession(ChatSession, Protocol):
    """The session of an attempt."""

    def abandon(self, nodes: Sequence[int]) -> None:
        """Note that the agent did not get these answers."""
        ...


class Clock(Protocol):
    """The clock of an attempt."""

    def start(self) -> None:
        """Note that the attempt begins, after it has waited for a process."""
        ...

    def excuse(self, seconds: float) -> None:
        """Note that the code of another attempt has blocked their process for so long."""
        ...


@dataclass(slots=True, eq=False)
class _Attempt:
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

    def stop_requests(self) -> None:
        """Cancel the requests that are under way."""
        for request in self.requests.values():
            request.cancel()


class EnvironmentPool:
    """`config.processes` environment processes. Use it on one event loop, and close it."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config = config
        self._limits = Limits(config.max_turns, config.deadline_s)
        self._processes = [_Process() for _ in range(config.processes)]
        self._waiting: list[_Attempt] = []
        self._count = 0
        self._closing = False
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
        """Make one attempt.

        Args:
            session: answers its requests, in this process.
            alone: whether no other attempt may run in its process.
            url: where the session is served, if it is.
            clock: learns when the attempt begins, and what others block.

        Raises:
            AttemptLostError: its process ended, and it is not known to be the cause.
            Any error of the session that is not the environment's business.
            EnvironmentFailedError: no process starts.
        """
        if self._closing:
            raise EnvironmentFailedError("the environment processes have ended")
        await self.start()
        self._count += 1
        end: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        attempt = _Attempt(self._count, task, session, alone, url, clock, end)
        self._waiting.append(attempt)
        self._dispatch()
        try:
            return await end
        except asyncio.CancelledError:
            self._give_up(attempt)
            raise

    async def close(self) -> None:
        """Kill the processes and everything that they have started."""
        if self._closing:
            return
        self._closing = True
        for process in self._processes:
            process.kill()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for attempt in self._waiting:
            attempt.end.cancel()
        for process in self._processes:
            process.free()

    def _give_up(self, attempt: _Attempt) -> None:
        if attempt in self._waiting:
            self._waiting.remove(attempt)
        for process in self._processes:
            if attempt.number in process.running:
                process.send(Stop(attempt.number))
                attempt.stop_requests()

    def _dispatch(self) -> None:
        """Give waiting attempts, in their order, to the processes with the fewest. One that must
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
        for attempt in process.forget():
            attempt.end.cancel()

    async def _run(self, process: _Process) -> str:
        """Run a process to its end. Returns why it ended."""
        watch: asyncio.Task[None] | None = None
        try:
            await process.start_with(self._setup(process))
            if self._closing:
                process.kill()
            ready = await asyncio.wait_for(process.read(), START_TIMEOUT_S)
            if why := str(ready["ready"]):
                process.refused = True
                return why
            process.ready = True
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
                f" {self._config.function!r}; its module must not exit"
            )
        except (OSError, ValueError, RecursionError) as error:  # or what it sends is no JSON
            return f"an environment process failed ({error})"
        finally:
            if watch is not None:
                watch.cancel()

    def _setup(self, process: _Process) -> Setup:
        config = self._config
        return Setup(
            config.function,
            config.arguments,
            self._limits,
            config.memory_bytes,
            process.shared,
            # Each attempt may leave one, and the others still have theirs.
            config.concurrency + 2 * MOST_LEFT,
        )

    async def _watch(self, process: _Process) -> None:
        """Kill the process if the code of one attempt keeps control for too long, if the event
        loop stands still for another reason, or if it is idle and has too many threads."""
        before = (NOBODY, 0.0)
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if process.is_worn() and not process.running:
                process.kill()
            self._dispatch()  # the threads may have ended
            number, since = now = process.running_now()
            # A single look may be torn: the process writes meanwhile.
            steady, before = now == before, now
            if steady and number == NOBODY and process.silent_s() > self._config.block_s:
                process.kill()
            if not steady or number == NOBODY:
                continue
            process.excuse_others(number, since)
            if time.monotonic() - since > self._config.block_s:
                process.blame(
                    number,
                    f"it kept its process for over environment.block_s = {self._config.block_s:g} s"
                    " without an await; call blocking code with asyncio.to_thread",
                )

    def _handle(self, process: _Process, message: Mapping[str, Any]) -> None:
        attempt = process.running.get(message["number"])
        if attempt is None:
            return
        if "abandoned" in message:
            number = message["abandoned"]
            if request := attempt.requests.pop(number, None):
                request.cancel()
            # The answer may be on its way. The environment does not get it.
            attempt.session.abandon(attempt.answered.pop(number, ()))
            return
        if "request" in message:
            if not attempt.end.done():
                number = message["request"]
                attempt.requests[number] = asyncio.create_task(_answer(process, attempt, message))
            return
        process.done(attempt)
        self._dispatch()
        if attempt.end.done():
            return
        if "canceled" in message and not attempt.alone:
            # By its own code, or by that of another attempt in its process.
            attempt.end.set_exception(AttemptLostError(alone=True))
        elif "canceled" in message:
            attempt.end.set_result(Ended("env_error", note="it canceled its own task"))
        elif "failed" in message:
            attempt.end.set_exception(attempt.failed or ModelFailedError(message["failed"]))
        else:
            ended = Ended(**message["ended"])
            attempt.end.set_result(replace(ended, note=one_line(ended.note)))

    def _handle_end(self, process: _Process, code: int | None) -> None:
        """Tell the attempts of a process that has ended what to do."""
        blamed, why = process.blamed or (process.running_now()[0], "")
        alone = len(process.running) == 1 and blamed in (NOBODY, *process.running)
        for attempt in process.running.values():
            if attempt.end.done():
                continue
            if attempt.number == blamed or alone:
                note = why or f"it ended its process (exit code {code})"
                attempt.end.set_result(Ended("env_error", note=note))
            else:
                attempt.end.set_exception(AttemptLostError(blamed not in process.running))

    def _is_ready(self) -> None:
        """Let attempts begin, also after an earlier process did not start."""
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
            attempt = self._waiting.pop()
            if not attempt.end.done():
                attempt.end.set_exception(EnvironmentFailedError(why))


async def _answer(process: _Process, attempt: _Attempt, message: Mapping[str, Any]) -> None:
    """Answer one request of an attempt."""
    head = (attempt.number, message["request"])
    try:
        asked = message["asked"]
        answers = await attempt.session.chat(ChatRequest(**{**asked, "stop": tuple(asked["stop"])}))
    except Exception as error:  # the attempt gets it
        attempt.failed = error
        name = type(error).__name__
        text = str(error) if name in REFUSALS else f"{name}: {error}"
        process.send(Answered(*head, (), name, text))
    else:
        attempt.answered[message["request"]] = [answer.node for answer in answers]
        process.send(Answered(*head, answers))
    finally:
        attempt.requests.pop(message["request"], None)


class _Process(ChildProcess):
    """One environment process, and the attempts that run in it."""

    def __init__(self) -> None:
        super().__init__()
        self.ready = False
        self.refused = False
        """Whether it said itself why it cannot be used."""
        self.running: dict[int, _Attempt] = {}
        self.blamed: tuple[int, str] | None = None
        """The number of the attempt that is the reason to kill it, and why."""
        self._excused = 0.0
        """Until when the attempts know what another one has blocked."""
        self.shared = os.memfd_create("environment")
        os.ftruncate(self.shared, SHARED)
        self._memory = mmap.mmap(self.shared, SHARED)

    def free(self) -> None:
        """Free the shared memory. The process cannot be started again."""
        self._memory.close()
        os.close(self.shared)

    async def start_with(self, setup: Setup) -> None:
        RUNNING.pack_into(self._memory, 0, NOBODY, 0.0)
        ALIVE.pack_into(self._memory, RUNNING.size, time.monotonic(), 0)
        await self.start(SERVE, setup, (self.shared,), FOLDER)

    def running_now(self) -> tuple[int, float]:
        """The number of the attempt whose code has control, or NOBODY, and since when."""
        number, since = RUNNING.unpack_from(self._memory)
        return number, since

    def silent_s(self) -> float:
        """Seconds since the event loop's last sign of life."""
        alive, _ = ALIVE.unpack_from(self._memory, RUNNING.size)
        return time.monotonic() - float(alive)

    def left(self) -> int:
        """The number of threads that have outlived their attempts."""
        _, left = ALIVE.unpack_from(self._memory, RUNNING.size)
        return int(left)

    def is_worn(self) -> bool:
        """Whether those are too many. It begins no more attempts, and is replaced after its last
        one."""
        return self.left() >= MOST_LEFT

    def has_room(self, most: int) -> bool:
        """Whether it may begin an attempt, if it runs `most` at once."""
        return (
            self.ready
            and not self.killed
            and not self.is_worn()
            and len(self.running) < most
            and not any(attempt.alone for attempt in self.running.values())
        )

    def begin(self, attempt: _Attempt, limit_s: float) -> None:
        """Begin an attempt; kill the process if it has not ended after `limit_s`."""
        loop = asyncio.get_running_loop()
        why = f"it did not end within {limit_s:g} s, although it was canceled"
        attempt.guard = loop.call_later(limit_s, self._guard, attempt.number, why)
        self.running[attempt.number] = attempt
        if attempt.clock is not None:
            attempt.clock.start()
        self.send(Play(attempt.number, attempt.task, attempt.url))

    def _guard(self, number: int, why: str) -> None:
        """Blame an attempt that has not ended, unless the loop stands still: then its deadline
        could not end it, and the watch finds out who is the cause."""
        if self.silent_s() < GUARD_S:
            self.blame(number, why)
        else:
            self.kill()

    def excuse_others(self, number: int, since: float) -> None:
        """Tell the other attempts that this one has blocked them since then."""
        now = time.monotonic()
        seconds, self._excused = now - max(since, self._excused), now
        for attempt in self.running.values():
            if attempt.number != number and attempt.clock is not None:
                attempt.clock.excuse(seconds)

    def blame(self, number: int, why: str) -> None:
        """Kill the process because of one attempt."""
        self.blamed = self.blamed or (number, why)
        self.kill()

    def done(self, attempt: _Attempt) -> None:
        """Remove an attempt that has ended."""
        del self.running[attempt.number]
        if attempt.guard is not None:
            attempt.guard.cancel()
        attempt.stop_requests()

    def forget(self) -> list[_Attempt]:
        """Reset for a restart. Returns the attempts that ran."""
        lost = list(self.running.values())
        for attempt in lost:
            self.done(attempt)
        self.blamed, self.ready, self.refused, self.killed = None, False, False, False
        return lost
