"""Reward processes: rewards run in separate processes, which are killed at their deadline with
everything that they have started.

A reward may loop in C code with the interpreter locked, kill its own process, or leave processes
behind. Threads and signals cannot stop that. A reward process runs
`asyncrl.rewards.process`, and `asyncrl.runtime.supervisor` ends it.

    submit ──► one task per group ──► waiting calls ──dispatch──► a process with room
           ──► its answer, or its end

A process runs `concurrency` calls at once. If it dies or must be killed, the call that caused this
is not always known. Then each call that ran in it runs again, alone in a process, where only the
call itself can cause a failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType

from asyncrl.config import RewardConfig
from asyncrl.config.schema import FailRun
from asyncrl.rewards.contract import (
    ContractError,
    FunctionRewards,
    GroupCall,
    RewardError,
    finite_sum,
)
from asyncrl.rewards.process import CANCEL_S, Call, Cancel, Named, ProcessMessage, Setup
from asyncrl.runtime.child_process import ChildProcess
from asyncrl.runtime.single_precision import FLOAT32_MAX
from asyncrl.text.answer import AnswerFormat

START_TIMEOUT_S = 180.0
"""Seconds until a new reward process must be ready, imports included."""
RESTART_PAUSE_S = 0.2
"""Seconds between the end of a process and its restart."""
GUARD_S = CANCEL_S + 1.0
"""Seconds beyond the deadline until the pool kills a process that has not answered. The process
enforces the deadline itself."""
SERVE = "asyncrl.rewards.process:serve"
TEXT_ANSWERS = AnswerFormat()
"""The text of a completion shows where its answer begins."""


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """Rewards of one group of n trajectories. `failure` says why there are none; then all parts are
    None."""

    parts: Mapping[str, list[float | None]] = field(default_factory=dict)
    """Name of the reward function → n rewards, and name/part → n values of each part that it
    returned."""
    failure: str | None = None
    tokens: list[list[float] | None] | None = None
    """Weighted sum of the per-token rewards, trajectory by trajectory; None without a function that
    is `per_token`."""


def no_rewards(config: RewardConfig, n: int, failure: str) -> GroupRewards:
    """The rewards of a failed group of n trajectories: None everywhere, and the reason."""
    return GroupRewards(
        {name: [None] * n for name in config.functions},
        failure,
        [None] * n if config.per_token else None,
    )


def total_rewards(
    parts: Mapping[str, Sequence[float | None]], weights: Mapping[str, float]
) -> list[float | None]:
    """Weighted sum of the parts [n] per trajectory; None if a part that has a weight is None."""
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
        for token in zip(*(tokens or [] for tokens in rewards), strict=True)
    ]


class RewardPool:
    """`config.processes` reward processes and the policy on failures. Use the pool as a context
    manager, or close it."""

    def __init__(
        self,
        config: RewardConfig,
        least: float | None = None,
        answers: AnswerFormat = TEXT_ANSWERS,
    ) -> None:
        """Start the processes.

        Args:
            least: Lowest total reward; a group with a lower one has failed. None = any is allowed.
            answers: How answers are found in the completions of the model in training.
        """
        self._config, self._least, self._answers = config, least, answers
        self._loop = asyncio.new_event_loop()
        self._waiting: deque[_Waiting] = deque()
        self._numbers = itertools.count()
        self._processes = [_Process() for _ in range(config.processes)]
        self._tasks: set[asyncio.Task[object]] = set()
        self._closing = False
        self._ready: Future[Mapping[str, str]] = Future()
        """Set by the first process that is ready: name of a function → why its import failed."""
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
            RewardError: A function cannot be imported, or the import takes longer than
                START_TIMEOUT_S.
        """
        if failed := await asyncio.wrap_future(self._ready):
            raise RewardError(next(iter(failed.values())))

    def submit(self, call: GroupCall) -> Future[GroupRewards]:
        """Rewards of one group, under the policy on failures.

        Under policy `fail`, the future raises RewardError. Under the others, the result of a failed
        group has a `failure`.
        """
        return asyncio.run_coroutine_threadsafe(self._tracked(self._score(call)), self._loop)

    async def score(self, call: GroupCall) -> GroupRewards:
        """`submit` for a caller on an event loop."""
        return await asyncio.wrap_future(self.submit(call))

    def close(self) -> None:
        """Kill the processes and everything that they have started."""
        self._loop.call_soon_threadsafe(self._close)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        keepers = [
            self._loop.create_task(self._keep_running(process)) for process in self._processes
        ]
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
        """Run the work in a task that the pool cancels when it closes."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await work

    async def _score(self, call: GroupCall) -> GroupRewards:
        config = self._config
        for left in reversed(range(config.policy.tries)):
            try:
                results = await self._run_functions(call)
                rewards = {name: result.rewards for name, result in results.items()}
                self._check_totals(rewards)
                parts = {
                    f"{name}/{part}": values
                    for name, result in results.items()
                    for part, values in result.parts.items()
                }
                tokens = self._token_rewards(results)
                return GroupRewards(rewards | parts, tokens=tokens)
            except RewardError as error:
                if isinstance(config.policy, FailRun):
                    raise
                if not left:
                    failure = str(error)
        return no_rewards(config, len(call.completions), failure)

    def _check_totals(self, rewards: Mapping[str, list[float | None]]) -> None:
        """Raise RewardError if a trajectory's total is too large, or too low for the advantage."""
        weights = {name: function.weight for name, function in self._config.functions.items()}
        totals = total_rewards(rewards, weights)
        if not all(abs(total) <= FLOAT32_MAX for total in totals if total is not None):
            raise RewardError(
                f"a total reward of {', '.join(self._config.functions)} is too large; return"
                " smaller rewards, or lower reward weights"
            )
        below = min((total for total in totals if total is not None), default=0.0)
        if self._least is not None and below < self._least:
            raise RewardError(
                f"a total reward of {below:g} of {', '.join(self._config.functions)} is below"
                f" {self._least:g}, where algorithm.advantage: maxrl is not defined; return rewards"
                " >= 0, or use grpo or rloo"
            )

    def _token_rewards(
        self, results: Mapping[str, FunctionRewards]
    ) -> list[list[float] | None] | None:
        """Weighted sum of the per-token rewards; None for a trajectory that a function could not
        score."""
        weights = {name: function.weight for name, function in self._config.functions.items()}
        weighted = [
            (weights[name], result.tokens)
            for name, result in results.items()
            if result.tokens is not None and weights[name]
        ]
        if not weighted:
            return None
        trajectories = zip(*(tokens for _, tokens in weighted), strict=True)
        sums = [
            None if None in tokens else _weighted_sum([weight for weight, _ in weighted], tokens)
            for tokens in trajectories
        ]
        if not all(abs(value) <= FLOAT32_MAX for row in sums if row is not None for value in row):
            raise RewardError(
                f"a token's reward of {', '.join(self._config.functions)} is too large;"
                " return smaller rewards, or lower reward weights"
            )
        return sums

    async def _run_functions(self, call: GroupCall) -> dict[str, FunctionRewards]:
        """Run all functions at once; the first failure cancels the others. Raises RewardError."""
        tasks = {
            name: asyncio.ensure_future(self._run_function(name, call))
            for name in self._config.functions
        }
        try:
            return dict(zip(tasks, await asyncio.gather(*tasks.values()), strict=True))
        finally:
            for task in tasks.values():
                task.cancel()

    async def _run_function(self, name: str, group: GroupCall) -> FunctionRewards:
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
        """Give waiting calls, in their order, to the processes with the fewest calls. A call that
        must run alone delays the calls after it."""
        while self._waiting:
            alone = self._waiting[0].alone
            available = [
                process
                for process in self._processes
                if process.has_room(1 if alone else self._config.concurrency)
            ]
            if not available:
                return
            process = min(available, key=lambda process: len(process.running))
            process.give(self._waiting.popleft(), self._config.deadline_s + GUARD_S)

    async def _keep_running(self, process: _Process) -> None:
        """Run one process after another, until the pool closes."""
        while not self._closing:
            came_up = False
            try:
                await process.start(SERVE, self._setup())
                if self._closing:
                    process.kill()
                ready: ProcessMessage = await asyncio.wait_for(process.read(), START_TIMEOUT_S)
                came_up = process.ready = True
                if not self._ready.done():
                    self._ready.set_result(ready["ready"])
                self._dispatch()
                while True:
                    self._handle_answer(process, await process.read())
                    self._dispatch()
            except TimeoutError:
                problem = f"gave no answer in {START_TIMEOUT_S:g} s"
            except (OSError, EOFError) as error:
                problem = "ended" if isinstance(error, EOFError) else f"failed ({error})"
            code = await process.end()
            if self._closing:
                return
            if came_up:
                self._handle_end(process, code)
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
        return Setup(
            named, config.concurrency, config.deadline_s, config.memory_bytes, self._answers
        )

    def _functions(self) -> list[str]:
        return [reward.function for reward in self._config.functions.values()]

    def _handle_answer(self, process: _Process, message: ProcessMessage) -> None:
        waiting = process.running.get(message["number"])
        if waiting is None:
            return
        if "stuck" in message or ("late" in message and process.has_started_others()):
            # A late call that has ended may have left processes behind. Which call started them is
            # unknown, so the pool kills them all.
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

    def _handle_end(self, process: _Process, code: int | None) -> None:
        """Handle the calls that ran in a process when it ended.

        Calls that are known to be the cause fail, and the others run again. If the cause is
        unknown, each call runs again alone.
        """
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
    """A call, from its submission to its answer. It may run more than once."""

    call: Call
    answer: asyncio.Future[FunctionRewards]
    alone: bool = False
    """Whether no other call may run in its process."""
    guard: asyncio.TimerHandle | None = None

    def give(self, rewards: FunctionRewards) -> None:
        if not self.answer.done():
            self.answer.set_result(rewards)

    def fail(self, error: RewardError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class _Process(ChildProcess):
    """One reward process, and the calls that run in it."""

    def __init__(self) -> None:
        super().__init__()
        self.ready = False
        self.running: dict[int, _Waiting] = {}
        self.blamed: set[int] = set()
        """Numbers of the calls that are the reason to kill it."""

    def has_room(self, concurrency: int) -> bool:
        """Whether it may be given a call, if it runs `concurrency` calls at once."""
        return (
            self.ready
            and not self.killed
            and len(self.running) < concurrency
            and not any(waiting.alone for waiting in self.running.values())
        )

    def give(self, waiting: _Waiting, limit_s: float) -> None:
        """Run a call; kill the process if it has not answered after `limit_s`."""
        waiting.guard = asyncio.get_running_loop().call_later(limit_s, self.kill)
        self.running[waiting.call.number] = waiting
        self.send(waiting.call)

    def cancel(self, number: int) -> None:
        """Cancel a call that the caller no longer waits for."""
        if number in self.running:
            self.send(Cancel(number))

    def done(self, waiting: _Waiting) -> None:
        """Remove a call that has ended, which makes room for another."""
        del self.running[waiting.call.number]
        if waiting.guard is not None:
            waiting.guard.cancel()

    def forget(self) -> tuple[list[_Waiting], set[int], bool]:
        """Reset for a restart. Returns the calls that ran, the numbers of those to blame, and
        whether the pool killed the process."""
        lost, blamed, killed = list(self.running.values()), self.blamed, self.killed
        for waiting in lost:
            self.done(waiting)
        self.blamed, self.ready, self.killed = set(), False, False
        return lost, blamed, killed
