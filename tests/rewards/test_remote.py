"""Evaluation's reward processes in a Ray actor, for rewards that need GPUs."""

import psutil
import pytest

from asyncrl.rewards.contract import GroupCall, RewardError
from asyncrl.rewards.remote import RemoteRewardPool


async def test_a_pool_in_an_actor_scores_fails_and_ends_like_one_here(ray_cluster, reward_config):
    pool = RemoteRewardPool(reward_config("names_its_process"))
    try:
        await pool.check()
        call = GroupCall(["p"] * 2, ["a", "bcd"], [[1], [2]])
        with pytest.raises(
            RewardError,
            match=(
                r"^reward names_its_process: .*raised ValueError: no such thing at .*, in"
                r" names_its_process$"
            ),
        ):
            await pool.score(GroupCall(["p"], ["fail"], [[1]]))
        [process, same] = (await pool.score(call)).parts["names_its_process"]
    finally:
        pool.close()
    assert process == same
    try:
        left = [psutil.Process(int(process))]
    except psutil.NoSuchProcess:
        left = []
    assert psutil.wait_procs(left, timeout=30)[1] == []
