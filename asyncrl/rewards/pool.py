"""Reward processes: rewards run outside every process of ours, and are killed at their deadline.

A reward may loop in C code with the interpreter locked, or kill its own process; neither threads nor signals stop that. Pebble's
process pool kills the one process at a task's timeout, reports a process that died, and replaces it, while the others go on.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from pebble import ProcessExpired, ProcessPool

from asyncrl.config import RewardConfig
from asyncrl.rewards.contract import RewardError, call_reward, import_reward

__all__ = ["GroupRewards", "RewardPool", "no_rewards", "total_rewards"]

GROUPS_AT_ONCE = 64
"""Groups that wait for reward processes at once, in one thread each."""
PR_SET_PDEATHSIG = 1
START_TIMEOUT_S = 180.0
"""Seconds in which a new reward process must answer, imports included."""


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """Rewards of one group of n trajectories. `failure` says why there are none (then all parts are None)."""

    parts: Mapping[str, list[float | None]] = field(default_factory=dict)
    """Name of the reward function → n rewards."""
    failure: str | None = None


def no_rewards(config: RewardConfig, n: int, failure: str) -> GroupRewards:
    """A group of n trajectories that was given up."""
    return GroupRewards({name: [None] * n for name in config.functions}, failure)


def total_rewards(parts: Mapping[str, Sequence[float | None]], weights: Mapping[str, float]) -> list[float | None]:
    """Weighted sum of the parts [n] per trajectory; None if a part with weight is None."""
    weighted = [(weights[name], values) for name, values in parts.items() if weights[name]]
    if not weighted:
        return [0.0 for _ in next(iter(parts.values()))]
    columns = zip(*(values for _, values in weighted), strict=True)
    return [None if None in row else sum(weight * value for (weight, _), value in zip(weighted, row, strict=True)) for row in columns]


class RewardPool:
    """`config.processes` reward processes and the policy on failures. Use as a context manager, or close it."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._threads = ThreadPoolExecutor(GROUPS_AT_ONCE, thread_name_prefix="rewards")
        # The processes die with the thread that starts them (PR_SET_PDEATHSIG): a thread of this pool lives as long as they shall.
        self._processes = self._threads.submit(self._start).result()

    def _start(self) -> ProcessPool:
        functions = [reward.function for reward in self._config.functions.values()]
        # Not fork: this process has threads. A spawned child imports the main module anew, as everywhere in multiprocessing.
        context = multiprocessing.get_context("spawn")
        pool = ProcessPool(self._config.processes, initializer=_start_process, initargs=(functions, self._config.memory_bytes), context=context)
        pool.schedule(_nothing)  # the first task starts the processes, from this thread
        return pool

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    async def check(self) -> None:
        """Wait until a reward process has imported every function.

        Raises:
            RewardError: one cannot be imported, or that takes longer than START_TIMEOUT_S.
        """
        functions = [reward.function for reward in self._config.functions.values()]
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await asyncio.wrap_future(self._processes.schedule(_import_all, args=(functions,)))
        except TimeoutError:
            raise RewardError(f"reward processes gave no answer in {START_TIMEOUT_S:g} s; does importing one of {functions} hang?") from None

    def submit(
        self, prompts: Sequence[str], completions: Sequence[str], completion_ids: Sequence[Sequence[int]], columns: Mapping[str, Any]
    ) -> Future[GroupRewards]:
        """Rewards of one group (lists of length n), under the policy.

        The future raises RewardError under policy `fail`. Under the others it gives a group with a `failure`.
        """
        return self._threads.submit(self._score, list(prompts), list(completions), completion_ids, dict(columns))

    def close(self) -> None:
        """Kill the processes, whatever they do."""
        self._processes.stop()  # type: ignore[no-untyped-call]
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._processes.join()

    def _score(self, prompts: list[str], completions: list[str], completion_ids: Sequence[Sequence[int]], columns: dict[str, Any]) -> GroupRewards:
        config = self._config
        tries = config.retries + 1 if config.policy == "retry" else 1
        for left in reversed(range(tries)):
            try:
                return GroupRewards(self._try(prompts, completions, completion_ids, columns))
            except RewardError as error:
                if config.policy == "fail":
                    raise
                if not left:
                    failure = str(error)
        return no_rewards(config, len(completions), failure)

    def _try(
        self, prompts: list[str], completions: list[str], completion_ids: Sequence[Sequence[int]], columns: dict[str, Any]
    ) -> dict[str, list[float | None]]:
        """All functions side by side, one task each, so that a failure has a name. Raises RewardError."""
        calls = {
            name: self._processes.schedule(call_reward, args=(reward.function, prompts, completions, completion_ids, columns), timeout=self._config.deadline_s)
            for name, reward in self._config.functions.items()
        }
        try:
            return {name: self._result(name, call) for name, call in calls.items()}
        finally:
            for call in calls.values():
                call.cancel()  # type: ignore[no-untyped-call]

    def _result(self, name: str, call: Future[list[float | None]]) -> list[float | None]:
        function = f"{name} ({self._config.functions[name].function})"
        try:
            return call.result()
        except TimeoutError:
            limit = f"reward.deadline_s = {self._config.deadline_s:g} s"
            raise RewardError(f"reward {function} was killed after {limit}; raise that, or set reward.policy: drop_group") from None
        except ProcessExpired as error:
            raise RewardError(f"reward {function} ended its process (exit code {error.exitcode}); a reward must return") from None
        except RewardError as error:
            raise type(error)(f"reward {name}: {error}") from None


def _import_all(functions: Sequence[str]) -> None:
    for function in functions:
        import_reward(function)


def _nothing() -> None:
    """What a pool that has started can do."""


def _start_process(functions: Sequence[str], memory_bytes: int) -> None:
    """Die with the parent, leave Ctrl-C to it, take no more memory than that, and import the functions before a deadline runs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    for function in functions:
        try:
            import_reward(function)
        except RewardError:
            # Each call of it says so, under its name; a process that fails to start would break the whole pool without one.
            continue
