import time

import pytest

from asyncrl.rewards.contract import ContractError, RewardError
from asyncrl.rewards.pool import RewardPool, total_rewards


def rewards(pool, columns=None, seconds=60):
    return pool.submit(["p"] * 2, ["a", "bcd"], [[1], [2]], columns or {}).result(timeout=seconds)


def test_total_is_the_weighted_sum_and_none_where_a_weighted_part_is_none():
    parts = {"a": [1.0, None, 3.0], "b": [0.5, 0.5, None], "shown": [None, None, 9.0]}
    assert total_rewards(parts, {"a": 1.0, "b": 2.0, "shown": 0.0}) == [2.0, None, None]
    assert total_rewards({"shown": [None, 1.0]}, {"shown": 0.0}) == [0.0, 0.0]


def test_a_hang_in_c_code_is_killed_at_the_deadline_and_the_pool_goes_on(reward_config):
    with RewardPool(reward_config("hangs_in_c", deadline_s=1.0, policy="drop_group")) as pool:
        rewards(pool, {"slow": "0"})
        began = time.monotonic()
        group = rewards(pool, {"slow": "1"})
        assert 1.0 <= time.monotonic() - began < 20.0
        assert "hangs_in_c" in group.failure and "killed after reward.deadline_s = 1 s" in group.failure
        assert group.parts == {"hangs_in_c": [None, None]}
        assert rewards(pool, {"slow": "0"}).parts == {"hangs_in_c": [1.0, 1.0]}


def test_a_reward_that_ends_its_process_is_survived(reward_config):
    with RewardPool(reward_config("dies", policy="drop_group")) as pool:
        assert "ended its process (exit code 7)" in rewards(pool, {"slow": "1"}).failure
        assert rewards(pool, {"slow": "0"}).failure is None


def test_a_reward_that_allocates_without_end_fails_before_the_machine_does(reward_config):
    with RewardPool(reward_config("allocates", policy="drop_group", memory_bytes=1 << 30)) as pool:
        assert "'tests.rewards.rewards_under_test:allocates' asked for more memory than reward.memory_bytes leaves it" in rewards(pool, {"slow": "1"}).failure
        assert rewards(pool, {"slow": "0"}).parts == {"allocates": [1.0, 1.0]}


def test_policy_fail_names_function_and_cause(reward_config):
    with RewardPool(reward_config("by_length", "raises", "too_few")) as pool, pytest.raises(RewardError, match=r"reward raises: .*KeyError"):
        rewards(pool)
    with RewardPool(reward_config("too_few")) as pool, pytest.raises(ContractError, match="reward too_few"):
        rewards(pool)


def test_policy_retry_tries_again_then_drops(reward_config, tmp_path):
    with RewardPool(reward_config("fails_once", policy="retry", retries=1)) as pool:
        assert rewards(pool, {"marker": str(tmp_path / "tried")}).parts == {"fails_once": [1.0, 1.0]}
    with RewardPool(reward_config("raises", policy="retry", retries=1)) as pool:
        assert "KeyError" in rewards(pool).failure


def test_a_function_that_cannot_be_imported_is_an_error_of_the_call(reward_config):
    with RewardPool(reward_config("no_such_function")) as pool, pytest.raises(RewardError, match="cannot be imported"):
        rewards(pool)
