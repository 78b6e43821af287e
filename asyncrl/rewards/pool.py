"""Reward processes: rewards run outside every process of ours, and are killed at their deadline
with all that they have started.

A reward may loop in C code with the interpreter locked, kill its own process, or leave processes
behind; neither threads nor signals stop that. `asyncrl.rewards.supervisor` says how a process ends,
`asyncrl.rewards.process` what it does.

    submit ──► one task per group ──► waiting calls ──dispatch──► a process with room
           ──► its answer, or its end

A process runs `concurrency` calls at once. When it ends or must be killed, whoever did it is not
always known. Then each call that ran in it runs again, alone in a process; what fails there has
failed by itself.
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
import threading
from collections import deque
from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from types import TracebackType

import psutil

from asyncrl.config import RewardConfig
from asyncrl.rewards.contract import (
    ContractError,
    FunctionRewards,
    GroupCall,
    RewardError,
    finite_sum,
)
from asyncrl.rewards.process import CANCEL_S, HEADER, Answer, Call, Cancel, Named, Setup
from asyncrl.rewards.supervisor import command

__all__ = ["GroupRewards", "RewardPool", "no_rewards", "total_rewards"]

START_TIMEOUT_S = 180.0
"""Seconds in which a new reward process must answer, imports included."""
RESTART_PAUSE_S = 0.2
"""Seconds before a process is started again that did not come to its first call."""
GUARD_S = CANCEL_S + 1.0
"""Seconds beyond the deadline, which the process keeps itself, until one that says nothing is
killed."""
END_S = 5.0
"""Seconds that a supervisor gets to end everything."""


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """Rewards of one group of n trajectories. `failure` says why there are none (then all parts are
    None)."""

    parts: Mapping[str, list[float | None]] = field(default_factory=dict)
    """Name of the reward function → n rewards, and name/part → n values of each part that it told
    of."""
    failure: str | None = None
    tokens: list[list[float] | None] | None = None
    """Weighted sum of the functions that reward each token, trajectory by trajectory; None without
    such a function."""


def no_rewards(config: RewardConfig, n: int, failure: str) -> GroupRewards:
    """A group of n trajectories that was given up."""
    return GroupRewards(
        {name: [None] * n for name in config.functions},
        failure,
        [None] * n if config.per_token else None,
    )


def total_rewards(
    parts: Mapping[str, Sequence[float | None]], weights: Mapping[str, float]
) -> list[float | None]:
    """Weighted sum of the parts [n] per trajectory; None if a part with weight is None."""
    weighted = [(weights[name], values) for name, values in parts.items() if weights[name]]
    if not weighted:
        return [0.0 for _ in next(iter(parts.values()))]
    columns = zip(*(values for _, values in weighted), strict=True)
    return [
        (
            None
            if None in row
            else sum(weight * value for (weight, _), value in zip(weighted, row, strict=True))
        )
        for row in columns
    ]


def _weighted_sum(weights: Sequence[float], rewards: Sequence[list[float] | None]) -> list[float]:
    return [
        finite_sum(weight * value for weight, value in zip(weights, token, strict=True))
        for token in zip(*(some or [] for some in rewards), strict=True)
    ]


class RewardPool:
    """`config.processes` reward processes and the policy on failures. Use as a context manager, or
    close it."""

    def __init__(self, config: RewardConfig, least: float | None = None) -> None:
        """`least`: a group with a total reward below it failed; None = any total is allowed."""
        self._config, self._least = config, least
        self._loop = asyncio.new_event_loop()
        self._waiting: deque[_Waiting] = deque()
        self._numbers = itertools.count()
        self._processes = [_Process() for _ in range(config.processes)]
        self._tasks: set[asyncio.Task[object]] = set()
        self._closing = False
        self._ready: Future[Mapping[str, str]] = Future()
        """Of the first process that has imported the functions: name → why it could not."""
        self._thread = threading.Thread(target=self._run, daemon=True, name="rewards")
        self._thread.start()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def check(self) -> None:
        """Wait until a reward process has imported every function.

        Raises:
            RewardError: one cannot be imported, or that takes longer than START_TIMEOUT_S.
        """
        if failed := await asyncio.wrap_future(self._ready):
            raise RewardError(next(iter(failed.values())))

    def submit(self, call: GroupCall) -> Future[GroupRewards]:
        """Rewards of one group, under the policy.

        The future raises RewardError under policy `fail`. Under the others it gives a group with a
        `failure`.
        """
        return asyncio.run_coroutine_threadsafe(self._tracked(self._score(call)), self._loop)

    async def score(self, call: GroupCall) -> GroupRewards:
        """As `submit`, on the caller's event loop."""
        return await asyncio.wrap_future(self.submit(call))

    def close(self) -> None:
        """Kill the processes and what they have started, whatever they do."""
        self._loop.call_soon_threadsafe(self._close)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        keepers = [self._loop.create_task(self._keep(process)) for process in self._processes]
        self._loop.run_until_complete(asyncio.gather(*keepers))
        for task in self._tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def _close(self) -> None:
        self._closing = True
        for process in self._processes:
            process.kill()

    async def _tracked(self, work: Awaitable[GroupRewards]) -> GroupRewards:
        """The pool ends its groups' tasks with itself."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await work

    async def _score(self, call: GroupCall) -> GroupRewards:
        config = self._config
        tries = config.retries + 1 if config.policy == "retry" else 1
        for left in reversed(range(tries)):
            try:
                given = await self._try(call)
                rewards = self._allowed({name: one.rewards for name, one in given.items()})
                parts = {
                    f"{name}/{part}": values
                    for name, one in given.items()
                    for part, values in one.parts.items()
                }
                tokens = self._token_rewards(given)
                return GroupRewards(rewards | parts, tokens=tokens)
            except RewardError as error:
                if config.policy == "fail":
                    raise
                if not left:
                    failure = str(error)
        return no_rewards(config, len(call.completions), failure)

    def _allowed(self, rewards: dict[str, list[float | None]]) -> dict[str, list[float | None]]:
        """The rewards. Raises RewardError if a trajectory's total is below the least one that the
        advantage is defined for."""
        weights = {name: function.weight for name, function in self._config.functions.items()}
        totals = total_rewards(rewards, weights)
        if not all(math.isfinite(total) for total in totals if total is not None):
            raise RewardError(
                f"a total reward of {', '.join(self._config.functions)} is no finite number; return"
                " smaller rewards, or lower reward weights"
            )
        below = min((total for total in totals if total is not None), default=0.0)
        if self._least is not None and below < self._least:
            raise RewardError(
                f"a total reward of {below:g} of {', '.join(self._config.functions)} is below"
                f" {self._least:g}, and algorithm.advantage: maxrl is not defined there; return"
                " rewards of 0 and above, or use grpo or rloo"
            )
        return rewards

    def _token_rewards(
        self, given: Mapping[str, FunctionRewards]
    ) -> list[list[float] | None] | None:
        """Weighted sum of what functions gave for each token; None for a trajectory that one of
        them could not score."""
        weights = {name: function.weight for name, function in self._config.functions.items()}
        weighted = [
            (weights[name], one.tokens)
            for name, one in given.items()
            if one.tokens is not None and weights[name]
        ]
        if not weighted:
            return None
        trajectories = zip(*(tokens for _, tokens in weighted), strict=True)
        sums = [
            None if None in some else _weighted_sum([weight for weight, _ in weighted], some)
            for some in trajectories
        ]
        if not all(math.isfinite(value) for some in sums if some is not None for value in some):
            raise RewardError(
                f"a token's reward of {', '.join(self._config.functions)} is no finite number;"
                " return smaller rewards, or lower reward weights"
            )
        return sums

    async def _try(self, call: GroupCall) -> dict[str, FunctionRewards]:
        """All functions side by side; the first that fails ends the others. Raises RewardError."""
        tasks = {
            name: asyncio.ensure_future(self._ask(name, call)) for name in self._config.functions
        }
        try:
            return dict(zip(tasks, await asyncio.gather(*tasks.values()), strict=True))
        finally:
            for task in tasks.values():
                task.cancel()

    async def _ask(self, name: str, group: GroupCall) -> FunctionRewards:
        waiting = _Waiting(Call(next(self._numbers), name, group), self._loop.create_future())
        self._waiting.append(waiting)
        self._dispatch()
        try:
            return await waiting.answer
        except asyncio.CancelledError:
            with contextlib.suppress(ValueError):
                self._waiting.remove(waiting)
            for process in self._processes:
                process.cancel(waiting.call.number)
            raise

    def _dispatch(self) -> None:
        """Give waiting calls, in their order, to the processes with the least to do. One that must
        be alone holds back those behind it."""
        while self._waiting:
            alone = self._waiting[0].alone
            able = [
                process
                for process in self._processes
                if process.has_room(1 if alone else self._config.concurrency)
            ]
            if not able:
                return
            process = min(able, key=lambda process: len(process.running))
            process.give(self._waiting.popleft(), self._config.deadline_s + GUARD_S)

    async def _keep(self, process: _Process) -> None:
        """Run one process after the other, until the pool closes."""
        while not self._closing:
            came_up = False
            try:
                await process.start(self._setup())
                if self._closing:
                    process.kill()
                ready = await asyncio.wait_for(process.read(), START_TIMEOUT_S)
                came_up = process.ready = True
                if not self._ready.done():
                    self._ready.set_result(ready["ready"])
                self._dispatch()
                while True:
                    self._answered(process, await process.read())
                    self._dispatch()
            except TimeoutError:
                problem = f"gave no answer in {START_TIMEOUT_S:g} s"
            except (OSError, EOFError) as error:
                problem = "ended" if isinstance(error, EOFError) else f"failed ({error})"
            code = await process.end()
            if self._closing:
                return
            if came_up:
                self._after_the_end(process, code)
            else:
                self._not_started(
                    RewardError(
                        f"a reward process {problem} (exit code {code}) while it imported"
                        f" {self._functions()}; import them by hand"
                    )
                )
            await asyncio.sleep(RESTART_PAUSE_S)

    def _setup(self) -> Setup:
        config = self._config
        named = {
            name: Named(reward.function, reward.arguments, reward.per_token)
            for name, reward in config.functions.items()
        }
        return Setup(named, config.concurrency, config.deadline_s, config.memory_bytes)

    def _functions(self) -> list[str]:
        return [reward.function for reward in self._config.functions.values()]

    def _answered(self, process: _Process, message: Answer) -> None:
        waiting = process.running.get(message["number"])
        if waiting is None:
            return
        if "stuck" in message or ("late" in message and process.has_started_others()):
            # A call that was late and has ended may have left processes: nobody knows whose they
            # are, so all of them go.
            process.blamed.add(waiting.call.number)
            process.kill()
            return
        process.done(waiting)
        if "rewards" in message:
            waiting.give(FunctionRewards(**message["rewards"]))
        elif "late" in message:
            waiting.fail(self._killed(waiting))
        else:
            kind = ContractError if message["error"] == ContractError.__name__ else RewardError
            failure = kind(f"reward {waiting.call.name}: {message['message']}")
            for note in message.get("notes", []):
                failure.add_note(note)
            waiting.fail(failure)

    def _after_the_end(self, process: _Process, code: int | None) -> None:
        """Answer the calls that a process took with it, or have them run again: in their turn if it
        is known who ended it, else alone."""
        lost, blamed, killed = process.forget()
        if not blamed and len(lost) == 1:
            blamed = {lost[0].call.number}
        for waiting in reversed(lost):
            if waiting.call.number in blamed:
                waiting.fail(self._killed(waiting) if killed else self._died(waiting, code))
            elif not waiting.answer.done():
                waiting.alone = not blamed
                self._waiting.appendleft(waiting)

    def _not_started(self, error: RewardError) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)
        while self._waiting:
            self._waiting.popleft().fail(error)

    def _named(self, waiting: _Waiting) -> str:
        return f"{waiting.call.name} ({self._config.functions[waiting.call.name].function})"

    def _killed(self, waiting: _Waiting) -> RewardError:
        limit = f"reward.deadline_s = {self._config.deadline_s:g} s"
        return RewardError(
            f"reward {self._named(waiting)} was killed after {limit}; raise that, or set"
            " reward.policy: drop_group"
        )

    def _died(self, waiting: _Waiting, code: int | None) -> RewardError:
        return RewardError(
            f"reward {self._named(waiting)} ended its process (exit code {code}); a reward must"
            " return"
        )


@dataclass(slots=True, eq=False)
class _Waiting:
    """A call, from when it is asked to its answer. It may run more than once."""

    call: Call
    answer: asyncio.Future[FunctionRewards]
    alone: bool = False
    """No other call may run in its process."""
    guard: asyncio.TimerHandle | None = None

    def give(self, rewards: FunctionRewards) -> None:
        if not self.answer.done():
            self.answer.set_result(rewards)

    def fail(self, error: RewardError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class _Process:
    """One reward process and its supervisor, seen from the pool. It may be started again after its
    end. All on the pool's loop."""

    def __init__(self) -> None:
        self.ready = False
        self.running: dict[int, _Waiting] = {}
        self.blamed: set[int] = set()
        """Calls because of which it is killed."""
        self._killed = False
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._lifeline: int | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    def has_room(self, concurrency: int) -> bool:
        """Whether it may be given a call, if it runs so many at once."""
        return (
            self.ready
            and not self._killed
            and len(self.running) < concurrency
            and not any(waiting.alone for waiting in self.running.values())
        )

    async def start(self, setup: Setup) -> None:
        """Start the process and tell it what it is for. Its first message comes when it is
        ready."""
        ours, theirs = socket.socketpair()
        end, self._lifeline = os.pipe()
        try:
            # A session of its own: the terminal's Ctrl-C is for the driver.
            self._supervisor = await asyncio.to_thread(
                subprocess.Popen,
                command(end, theirs.fileno()),
                stdin=subprocess.DEVNULL,
                pass_fds=(end, theirs.fileno()),
                start_new_session=True,
            )
        finally:
            os.close(end)
            theirs.close()
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        self._send(setup)

    async def read(self) -> Answer:
        """The next message. Raises EOFError or OSError at the process's end."""
        assert self._reader is not None
        size = HEADER.unpack(await self._reader.readexactly(HEADER.size))[0]
        message: Answer = json.loads(await self._reader.readexactly(size))
        return message

    def give(self, waiting: _Waiting, limit_s: float) -> None:
        """Run a call; kill the process if it says nothing of it for so long."""
        waiting.guard = asyncio.get_running_loop().call_later(limit_s, self.kill)
        self.running[waiting.call.number] = waiting
        self._send(waiting.call)

    def cancel(self, number: int) -> None:
        """Nobody waits for this call any more."""
        if number in self.running:
            self._send(Cancel(number))

    def done(self, waiting: _Waiting) -> None:
        """The call has ended, and its place is free."""
        del self.running[waiting.call.number]
        if waiting.guard is not None:
            waiting.guard.cancel()

    def kill(self) -> None:
        """Have the supervisor end it and whatever it has started."""
        self._killed = True
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    def has_started_others(self) -> bool:
        """Whether anything lives that the process has started."""
        assert self._supervisor is not None
        with contextlib.suppress(psutil.Error):
            return len(psutil.Process(self._supervisor.pid).children(recursive=True)) > 1
        return False

    async def end(self) -> int | None:
        """End it; its exit code, 128 + n after signal n."""
        killed = self._killed
        self.kill()
        self._killed = killed
        if self._writer is not None:
            self._writer.close()
        if self._supervisor is None:
            return None
        try:
            code = await asyncio.to_thread(self._supervisor.wait, END_S)
        except subprocess.TimeoutExpired:
            return None  # it goes on trying
        if code < 0:
            # It was killed itself: at least those go that stayed in its process group.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._supervisor.pid, signal.SIGKILL)
        return code

    def forget(self) -> tuple[list[_Waiting], set[int], bool]:
        """Be new. Returns the calls that it ran, those that are to blame, and whether we killed
        it."""
        lost, blamed, killed = list(self.running.values()), self.blamed, self._killed
        for waiting in lost:
            self.done(waiting)
        self.blamed, self.ready, self._killed = set(), False, False
        return lost, blamed, killed

    def _send(self, message: Setup | Call | Cancel) -> None:
        assert self._writer is not None
        payload = ForkingPickler.dumps(message)
        if not self._writer.is_closing():
            self._writer.write(HEADER.pack(len(payload)) + payload)
