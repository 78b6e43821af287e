"""Reward processes on the node that has their GPUs: a pool in a Ray actor."""

from __future__ import annotations

import contextlib
from typing import Any

import ray
import ray.exceptions

from asyncrl.config import RewardConfig
from asyncrl.rewards.code import share_settings
from asyncrl.rewards.contract import GroupCall, RewardError
from asyncrl.rewards.pool import GroupRewards, RewardPool

__all__ = ["RemoteRewardPool"]

CALLS_AT_ONCE = 10_000
"""What limits the groups that are scored at once is the pool."""


class RewardActor:
    """The actor around the pool."""

    def __init__(self, config: RewardConfig) -> None:
        share_settings(config.sandbox)
        self._pool = RewardPool(config)

    async def check(self) -> None:
        await self._pool.check()

    async def score(self, call: GroupCall) -> GroupRewards:
        return await self._pool.score(call)


class RemoteRewardPool:
    """As `RewardPool`, with config.num_cpus and config.num_gpus of a node. Ray starts it again if
    it dies, and the call that it took is asked again."""

    def __init__(self, config: RewardConfig) -> None:
        resources = {
            "num_cpus": config.num_cpus,
            "num_gpus": config.num_gpus,
            "max_restarts": -1,
            "max_task_retries": 1,
        }
        remote: Any = ray.remote(RewardActor)
        self._actor = remote.options(**resources, max_concurrency=CALLS_AT_ONCE).remote(config)

    async def check(self) -> None:
        """Wait until a reward process has imported every function. Raises RewardError."""
        await self._ask(self._actor.check.remote())

    async def score(self, call: GroupCall) -> GroupRewards:
        """Rewards of one group, under the policy. Raises RewardError under policy `fail`."""
        scored: GroupRewards = await self._ask(self._actor.score.remote(call))
        return scored

    def close(self) -> None:
        """Kill the actor; its reward processes, and what they have started, end with it."""
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self._actor)

    async def _ask(self, answer: Any) -> Any:
        try:
            return await answer
        except RewardError as error:
            # Its own words, without the traceback that Ray puts around them.
            raise RewardError(str(getattr(error, "cause", None) or error)) from None
