"""A reward pool in a Ray actor, on the node that has the GPUs of its processes."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable
from typing import TypeVar

import ray
import ray.exceptions

from asyncrl.config import RewardConfig
from asyncrl.rewards.code import share_settings
from asyncrl.rewards.contract import GroupCall, RewardError
from asyncrl.rewards.pool import TEXT_ANSWERS, GroupRewards, RewardPool
from asyncrl.runtime.ray.objects import Actor
from asyncrl.text.answer import AnswerFormat

T = TypeVar("T")

CALLS_AT_ONCE = 10_000
"""Calls that the actor accepts at once. The pool limits how many run."""


class RewardActor:
    """The actor that contains the pool."""

    def __init__(self, config: RewardConfig, answers: AnswerFormat) -> None:
        share_settings(config.sandbox)
        self._pool = RewardPool(config, answers=answers)

    async def check(self) -> None:
        await self._pool.check()

    async def score(self, call: GroupCall) -> GroupRewards:
        return await self._pool.score(call)


class RemoteRewardPool:
    """A `RewardPool` with config.num_cpus and config.num_gpus of a node. If its actor dies, Ray
    restarts it and repeats the calls that were running, once."""

    def __init__(self, config: RewardConfig, answers: AnswerFormat = TEXT_ANSWERS) -> None:
        resources = {
            "num_cpus": config.num_cpus,
            "num_gpus": config.num_gpus,
            "max_restarts": -1,
            "max_task_retries": 1,
        }
        remote: Actor = ray.remote(RewardActor)
        self._actor = remote.options(**resources, max_concurrency=CALLS_AT_ONCE).remote(
            config, answers
        )

    async def check(self) -> None:
        """Wait until a reward process has imported every function.

        Raises:
            RewardError: A function cannot be imported, or the import takes too long.
        """
        await self._ask(self._actor.check.remote())

    async def score(self, call: GroupCall) -> GroupRewards:
        """Rewards of one group, under the policy on failures.

        Raises:
            RewardError: A reward failed under policy `fail`.
        """
        scored: GroupRewards = await self._ask(self._actor.score.remote(call))
        return scored

    def close(self) -> None:
        """Kill the actor. Its reward processes, and what they have started, end with it."""
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self._actor)

    async def _ask(self, answer: Awaitable[T]) -> T:
        try:
            return await answer
        except RewardError as error:
            # The original message, without the traceback that Ray adds.
            raise RewardError(str(getattr(error, "cause", None) or error)) from None
