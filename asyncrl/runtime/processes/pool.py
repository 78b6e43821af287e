"""A pool of processes for a user's code. The pool starts another process when one has ended.

    run ──► waiting calls ──dispatch──► the process with the fewest calls ──► messages of a call
        ◄── its answer, or the end of its process

A process runs `concurrency` calls at once. If it dies or must be killed, the call that caused this
is not always known. Then each call that ran in it must run again alone in a process, where only the
call itself can cause a failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import os
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from typing import Any, Generic, Self, TypeVar

import psutil

from asyncrl.runtime.loopback import without_proxy_on_loopback
from asyncrl.runtime.processes.child_process import HEADER, Begin, Cancel
from asyncrl.runtime.processes.supervisor import command
from asyncrl.runtime.ray.serve_calls import cluster_environment

START_TIMEOUT_S = 180.0
"""Seconds until a new process must be ready, imports included."""
RESTART_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
"""Seconds until a process is started again. They double while it does not start."""
END_S = 5.0
"""Seconds that a supervisor has to end everything."""
LOOK_EVERY_S = 0.25
"""Seconds between two looks at the processes."""
MOST_SEEN_S = 1.0
"""What the time between two looks counts at most. If the next look comes later, the pool's own
process did not run either, so the other processes are not to blame for the rest."""

Answer = TypeVar("Answer")


@dataclass(slots=True, eq=False)
class Call(Generic[Answer]):
    """A call, from its submission to its answer. It may run more than once."""

    work: object
    """What its process gets."""
    alone: bool = False
    """Whether no other call may run in its process."""
    number: int = field(init=False, default_factory=itertools.count().__next__)
    answer: asyncio.Future[Answer] = field(
        init=False, default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    ends: float = field(init=False, default=math.inf)
    """When it is overdue, by the pool's clock."""
    late: bool = field(init=False, default=False)
    """Whether the call has been overdue in its process."""

    def give(self, answer: Answer) -> None:
        """Answer the call, unless it has been answered or canceled."""
        if not self.answer.done():
            self.answer.set_result(answer)

    def fail(self, error: Exception) -> None:
        """Fail the call, unless it has been answered or canceled."""
        if not self.answer.done():
            self.answer.set_exception(error)


CallT = TypeVar("CallT", bound=Call[Any])


@dataclass(eq=False)
class PoolProcess(Generic[CallT]):
    """One process with its supervisor, and the calls that run in it."""

    _supervisor: subprocess.Popen[bytes]
    _lifeline: int
    """File descriptor. When it is closed, the supervisor ends everything."""
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter
    ready: bool = False
    killed: bool = False
    running: dict[int, CallT] = field(default_factory=dict)
    blamed: dict[int, str] = field(default_factory=dict)
    """Number of each call that is a reason to kill it → why."""

    @classmethod
    async def start(
        cls,
        serve: str,
        setup: object,
        inherited: Sequence[int] = (),
        folder: str = "",
        output: int | None = None,
        **own: Any,
    ) -> Self:
        """Start a process and send it its first message.

        Args:
            serve: `module:function`, which the process calls with its socket.
            inherited: further file descriptors that it has, under the same numbers.
            folder: kind of a temporary folder that ends with the process; "" = none.
            output: file descriptor to which it prints. None: to where this process prints.
            own: further fields of a subclass.
        """
        ours, theirs = socket.socketpair()
        end, lifeline = os.pipe()
        try:
            # A new session: Ctrl-C in the terminal is for the driver only.
            supervisor = await asyncio.to_thread(
                subprocess.Popen,
                command(end, theirs.fileno(), serve, folder),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(end, theirs.fileno(), *inherited),
                env=without_proxy_on_loopback(cluster_environment() or os.environ),
                start_new_session=True,
            )
        except OSError:
            os.close(lifeline)
            ours.close()
            raise
        finally:
            os.close(end)
            theirs.close()
        process = cls(supervisor, lifeline, *await asyncio.open_connection(sock=ours), **own)
        process.send(setup)
        return process

    async def read(self) -> Any:
        """The next message. Raises EOFError or OSError when the process has ended."""
        size = HEADER.unpack(await self._reader.readexactly(HEADER.size))[0]
        return json.loads(await self._reader.readexactly(size))

    def send(self, message: object) -> None:
        """Send a message. A process that has ended does not get it."""
        payload = ForkingPickler.dumps(message)
        if not self._writer.is_closing():
            self._writer.write(HEADER.pack(len(payload)) + payload)

    def has_room(self, most: int) -> bool:
        """Whether the process may begin a call, if it runs `most` at once."""
        alone = any(call.alone for call in self.running.values())
        return self.ready and not self.killed and not alone and len(self.running) < most

    def begin(self, call: CallT) -> None:
        """Begin a call."""
        self.running[call.number] = call
        self.send(Begin(call.number, call.work))

    def done(self, call: CallT) -> None:
        """Remove a call that has ended, which makes room for another."""
        del self.running[call.number]

    def blame(self, number: int, why: str) -> None:
        """Kill the process because of one call."""
        self.blamed.setdefault(number, why)
        self.kill()

    def kill(self) -> None:
        """Have the supervisor end the process and everything that it has started."""
        if not self.killed:
            self.killed = True
            os.close(self._lifeline)

    def has_started_others(self) -> bool:
        """Whether a process that this one has started is still alive."""
        with contextlib.suppress(psutil.Error):
            return len(psutil.Process(self._supervisor.pid).children(recursive=True)) > 1
        return False

    async def end(self) -> int | None:
        """End the process. Returns its exit code, 128 + n after signal n; None if unknown."""
        self.kill()
        self._writer.close()
        try:
            code = await asyncio.to_thread(self._supervisor.wait, END_S)
        except subprocess.TimeoutExpired:
            return None  # the supervisor keeps trying
        if code < 0:
            # The supervisor itself was killed. End at least what is still in its process group.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._supervisor.pid, signal.SIGKILL)
        return code

    def culprits(self) -> Mapping[int, str]:
        """Number of each call that is the cause of its end → why; "" if only the exit code says
        it. Empty if the cause is unknown."""
        return self.blamed


ProcessT = TypeVar("ProcessT", bound=PoolProcess[Any])


class ProcessPool(ABC, Generic[CallT, ProcessT]):
    """Processes that run calls. Use the pool on one event loop.

    Args:
        count: of its processes.
        concurrency: calls that run in a process at once.
        limit_s: seconds until a call is overdue.
    """

    def __init__(self, count: int, concurrency: int, limit_s: float) -> None:
        self._count, self._concurrency, self._limit_s = count, concurrency, limit_s
        self._processes: list[ProcessT] = []
        self._waiting: deque[CallT] = deque()
        self._tasks: list[asyncio.Task[None]] = []
        self._seen_s = 0.0
        """The pool's clock: seconds that its looks have seen."""
        self._known = asyncio.Event()
        """Set when the first process is ready, or has not started."""
        self._problem: Exception | None = None
        """Why no process starts."""
        self._closing = asyncio.Event()

    @abstractmethod
    async def _start_process(self) -> ProcessT:
        """Start a process and send its setup."""

    @abstractmethod
    def _accept(self, process: ProcessT, ready: Any) -> None:
        """Take its first message. Raises RuntimeError if the process cannot be used."""

    @abstractmethod
    def _not_started(self, cause: Exception, code: int | None) -> Exception:
        """What calls get if a process ended before it was ready."""

    @abstractmethod
    def _handle(self, process: ProcessT, call: CallT, message: Any) -> None:
        """Handle a message on a call that runs."""

    @abstractmethod
    def _overdue(self, process: ProcessT, call: CallT) -> None:
        """Handle a call that has reached its limit."""

    @abstractmethod
    def _culprit(self, call: CallT, why: str, code: int | None) -> None:
        """Answer a call that is the reason why its process ended."""

    def _lost(self, call: CallT, alone: bool) -> None:
        """Handle a call whose process ended because of another one: run it again."""
        call.alone = alone
        self._waiting.appendleft(call)

    def _look(self, process: ProcessT) -> None:
        """Look at a process that is ready."""

    def _begin(self) -> None:
        """Start the processes, once."""
        if not self._tasks:
            work = [self._watch(), *(self._keep_running() for _ in range(self._count))]
            self._tasks = [asyncio.create_task(part) for part in work]

    async def start(self) -> None:
        """Start the processes, and wait until one is ready. Raises if none starts."""
        self._begin()
        await self._known.wait()
        if self._problem is not None:
            raise self._problem

    async def _run(self, call: CallT) -> Any:
        """The answer to a call. A canceled call is canceled in its process too."""
        self._waiting.append(call)
        self._dispatch()
        try:
            return await call.answer
        except asyncio.CancelledError:
            with contextlib.suppress(ValueError):
                self._waiting.remove(call)
            self._cancel(call)
            raise

    def _cancel(self, call: CallT) -> None:
        for process in self._processes:
            if call.number in process.running:
                process.send(Cancel(call.number))

    async def _close(self) -> None:
        """Kill the processes and everything that they have started. Cancel all calls."""
        self._closing.set()
        for process in self._processes:
            process.kill()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for call in self._waiting:
            call.answer.cancel()

    def _dispatch(self) -> None:
        """Give waiting calls, in their order, to the processes with the fewest calls. A call that
        must run alone delays the calls after it."""
        while self._waiting and not self._closing.is_set():
            most = 1 if self._waiting[0].alone else self._concurrency
            free = [process for process in self._processes if process.has_room(most)]
            if not free:
                return
            call = self._waiting.popleft()
            # The next look may come at once, and adds LOOK_EVERY_S.
            call.ends, call.late = self._seen_s + LOOK_EVERY_S + self._limit_s, False
            min(free, key=lambda process: len(process.running)).begin(call)

    async def _pause(self, seconds: float) -> None:
        """Wait, at most until the pool closes."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)

    async def _keep_running(self) -> None:
        """Run one process after another, until the pool closes."""
        pause = RESTART_PAUSE_S
        while not self._closing.is_set():
            came_up = await self._run_process()
            pause = RESTART_PAUSE_S if came_up else min(2 * pause, LONGEST_PAUSE_S)
            await self._pause(pause)

    async def _run_process(self) -> bool:
        """Run a process to its end. Returns whether it was ready."""
        try:
            process = await self._start_process()
        except OSError as error:
            self._fail_all(self._not_started(error, None))
            return False
        self._processes.append(process)
        try:
            await self._serve(process)
        except (OSError, EOFError, ValueError, RuntimeError) as error:  # or it sends no JSON
            cause: Exception = error
        code = await process.end()
        self._processes.remove(process)
        if process.ready:
            self._handle_end(process, code)
        elif not self._closing.is_set():
            self._fail_all(self._not_started(cause, code))
        self._dispatch()
        return process.ready

    async def _serve(self, process: ProcessT) -> None:
        """Handle what a process sends, until it ends."""
        if self._closing.is_set():
            process.kill()
        self._accept(process, await asyncio.wait_for(process.read(), START_TIMEOUT_S))
        process.ready, self._problem = True, None
        self._known.set()
        while True:
            self._dispatch()
            message = await process.read()
            if call := process.running.get(message["number"]):
                self._handle(process, call, message)

    async def _watch(self) -> None:
        """Look at all processes that are ready, until the pool closes."""
        while not self._closing.is_set():
            began = time.monotonic()
            await self._pause(LOOK_EVERY_S)
            self._seen_s += min(time.monotonic() - began, MOST_SEEN_S)
            for process in [process for process in self._processes if process.ready]:
                for call in list(process.running.values()):
                    if call.ends <= self._seen_s and not process.killed:
                        self._overdue(process, call)
                if not process.killed:
                    self._look(process)

    def _handle_end(self, process: ProcessT, code: int | None) -> None:
        """Handle the calls that ran in a process when it ended."""
        lost, culprits = list(process.running.values()), process.culprits()
        if not culprits and len(lost) == 1:
            culprits = {lost[0].number: ""}
        alone = not any(call.number in culprits for call in lost)
        for call in reversed(lost):
            process.done(call)
            if self._closing.is_set():
                call.answer.cancel()
            elif call.number in culprits:
                self._culprit(call, culprits[call.number], code)
            elif not call.answer.done():
                self._lost(call, alone)

    def _fail_all(self, problem: Exception) -> None:
        """Fail what waits, unless another process is ready."""
        if any(process.ready for process in self._processes):
            return
        self._problem = problem
        self._known.set()
        while self._waiting:
            self._waiting.popleft().fail(problem)
