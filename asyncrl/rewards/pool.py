"""Reward processes: rewards run in separate processes, which are killed at their deadline with
everything that they have started.

A reward may loop in C code with the interpreter locked, kill its own process, or leave processes
behind. Threads and signals cannot stop that. A reward process runs
`asyncrl.rewards.process`, and `asyncrl.runtime.processes.supervisor` ends it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from asyncrl.config import RewardConfig
from asyncrl.config.schema import FailRun
from asyncrl.rewards.contract import (
    ContractError,
    FunctionRewards,
    GroupCall,
    RewardError,
    finite_sum,
)
from asyncrl.rewards.process import CANCEL_S, Named, Score, Setup
from asyncrl.runtime.processes.child_process import Cancel
from asyncrl.runtime.processes.pool import START_TIMEOUT_S, Call, PoolProcess, ProcessPool
from asyncrl.runtime.single_precision import FLOAT32_MAX
from asyncrl.text.answer import AnswerFormat

GUARD_S = CANCEL_S + 1.0
"""Seconds that a process has to answer after the deadline, until the pool kills it."""
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


@dataclass(slots=True, eq=False)
class _Call(Call[FunctionRewards]):
    """A reward function on a group."""

    work: Score


_Process: TypeAlias = PoolProcess[_Call]


class RewardPool(ProcessPool[_Call, _Process]):
    """`config.processes` reward processes and the policy on failures. Use the pool as a context
    manager, or close it. It has an event loop of its own, in a thread."""

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
        super().__init__(config.processes, config.concurrency, config.deadline_s)
        self._config, self._least = config, least
        named = {
            name: Named(reward.function, reward.arguments, reward.per_token)
            for name, reward in config.functions.items()
        }
        self._setup = Setup(named, config.concurrency, config.memory_bytes, answers)
        self._failed_imports: Mapping[str, str] = {}
        """Name of a function → why its import failed."""
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._work, daemon=True, name="rewards")
        self._thread.start()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def check(self) -> None:
        """Wait until a reward process has imported every function.

        Raises:
            RewardError: A function cannot be imported, or the import takes longer than
                START_TIMEOUT_S.
        """
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.start(), self._loop))
        if self._failed_imports:
            raise RewardError(next(iter(self._failed_imports.values())))

    def submit(self, call: GroupCall) -> Future[GroupRewards]:
        """Rewards of one group, under the policy on failures.

        Under policy `fail`, the future raises RewardError. Under the others, the result of a failed
        group has a `failure`.
        """
        return asyncio.run_coroutine_threadsafe(self._score(call), self._loop)

    async def score(self, call: GroupCall) -> GroupRewards:
        """`submit` for a caller on an event loop."""
        return await asyncio.wrap_future(self.submit(call))

    def close(self) -> None:
        """Kill the processes and everything that they have started."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        self._thread.join()

    def _work(self) -> None:
        async def until_closed() -> None:
            self._begin()
            await asyncio.gather(*self._tasks)

        with self._runner:  # at its end it cancels what still waits
            self._runner.run(until_closed())

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
        rewards: FunctionRewards = await self._run(_Call(Score(name, group)))
        return rewards

    async def _start_process(self) -> _Process:
        return await _Process.start(SERVE, self._setup)

    def _accept(self, process: _Process, ready: Mapping[str, Any]) -> None:
        self._failed_imports = ready["ready"]

    def _not_started(self, cause: Exception, code: int | None) -> RewardError:
        problem = f"failed ({cause})"
        if isinstance(cause, TimeoutError):
            problem = f"gave no answer in {START_TIMEOUT_S:g} s"
        elif isinstance(cause, EOFError):
            problem = "ended"
        functions = [reward.function for reward in self._config.functions.values()]
        return RewardError(
            f"a reward process {problem} (exit code {code}) while it imported {functions};"
            " import them by hand"
        )

    def _handle(self, process: _Process, call: _Call, message: Mapping[str, Any]) -> None:
        if "stuck" in message and not call.late:
            return  # nobody waits for it, and it has until its deadline
        if "stuck" in message or (call.late and process.has_started_others()):
            # A late call that has ended may have left processes behind. Which call started them is
            # unknown, so the pool kills them all.
            process.blame(call.number, self._killed(call))
            return
        process.done(call)
        if call.late:
            call.fail(RewardError(self._killed(call)))
        elif "rewards" in message:
            call.give(FunctionRewards(**message["rewards"]))
        else:
            kind = ContractError if message["error"] == ContractError.__name__ else RewardError
            failure = kind(f"reward {call.work.name}: {message['message']}")
            for note in message.get("notes", []):
                failure.add_note(note)
            call.fail(failure)

    def _overdue(self, process: _Process, call: _Call) -> None:
        """Cancel a call at its deadline. If the process does not answer to that, kill it."""
        if not call.late:
            call.late, call.ends = True, self._seen_s + GUARD_S
            process.send(Cancel(call.number))
        elif len(process.running) == 1:
            process.blame(call.number, self._killed(call))
        else:
            process.kill()

    def _culprit(self, call: _Call, why: str, code: int | None) -> None:
        died = f"{self._named(call)} ended its process (exit code {code}); a reward must return"
        call.fail(RewardError(why or died))

    def _killed(self, call: _Call) -> str:
        return (
            f"{self._named(call)} was killed after reward.deadline_s = {self._config.deadline_s:g}"
            " s; raise that, or set reward.policy: drop_group"
        )

    def _named(self, call: _Call) -> str:
        name = call.work.name
        return f"reward {name} ({self._config.functions[name].function})"
