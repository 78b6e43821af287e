import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from asyncrl.observe.memory import process_name
from asyncrl.rewards import pool as reward_pool
from asyncrl.rewards.contract import ContractError, GroupCall, RewardError
from asyncrl.rewards.pool import RewardPool, total_rewards


def ask(pool, columns=None):
    return pool.submit(GroupCall(["p"] * 2, ["a", "bcd"], [[1], [2]], columns or {}))


def rewards(pool, columns=None, seconds=60):
    return ask(pool, columns).result(timeout=seconds)


def test_total_is_the_weighted_sum_and_none_where_a_weighted_part_is_none() -> None:
    parts = {"a": [1.0, None, 3.0], "b": [0.5, 0.5, None], "shown": [None, None, 9.0]}
    assert total_rewards(parts, {"a": 1.0, "b": 2.0, "shown": 0.0}) == [2.0, None, None]
    assert total_rewards({"shown": [None, 1.0]}, {"shown": 0.0}) == [0.0, 0.0]


@pytest.fixture
def short_guard(monkeypatch):
    """The pool kills a process that does not answer soon after the deadline."""
    monkeypatch.setattr(reward_pool, "GUARD_S", 0.5)


def test_a_hang_in_c_code_is_killed_at_the_deadline_and_the_pool_continues(
    reward_config, short_guard
):
    with RewardPool(reward_config("hangs_in_c", deadline_s=1.0, policy="drop_group")) as pool:
        rewards(pool, {"slow": "0"})
        began = time.monotonic()
        group = rewards(pool, {"slow": "1"})
        assert 1.0 <= time.monotonic() - began < 20.0
        assert (
            "hangs_in_c" in group.failure
            and "killed after reward.deadline_s = 1 s" in group.failure
        )
        assert group.parts == {"hangs_in_c": [None, None]}
        assert rewards(pool, {"slow": "0"}).parts == {"hangs_in_c": [1.0, 1.0]}


def test_a_reward_that_ends_its_process_is_survived(reward_config):
    with RewardPool(reward_config("dies", policy="drop_group")) as pool:
        assert "ended its process (exit code 7)" in rewards(pool, {"slow": "1"}).failure
        assert rewards(pool, {"slow": "0"}).failure is None


def test_a_reward_that_allocates_without_end_fails_before_the_machine_does(reward_config):
    with RewardPool(reward_config("allocates", policy="drop_group", memory_bytes=1 << 30)) as pool:
        assert (
            "'tests.rewards.rewards_under_test:allocates' needs more memory than"
            " reward.memory_bytes allows" in rewards(pool, {"slow": "1"}).failure
        )
        assert rewards(pool, {"slow": "0"}).parts == {"allocates": [1.0, 1.0]}


def test_policy_fail_names_function_and_cause(reward_config):
    with (
        RewardPool(reward_config("by_length", "raises", "too_few")) as pool,
        pytest.raises(RewardError, match=r"reward raises: .*KeyError"),
    ):
        rewards(pool)
    with (
        RewardPool(reward_config("too_few")) as pool,
        pytest.raises(ContractError, match="reward too_few"),
    ):
        rewards(pool)


def test_a_total_below_the_least_is_a_failure_under_the_policy(reward_config, tmp_path):
    """A negative total under maxrl once ended the scoring stream."""
    words = r"a total reward of -1 of negative_once is below 0, where algorithm.advantage: maxrl"
    with (
        RewardPool(reward_config("negative_once"), 0.0) as pool,
        pytest.raises(RewardError, match=words),
    ):
        rewards(pool, {"marker": str(tmp_path / "fail")})
    with RewardPool(reward_config("negative_once", policy="drop_group"), 0.0) as pool:
        assert re.search(words, rewards(pool, {"marker": str(tmp_path / "drop")}).failure)
    with RewardPool(
        reward_config("negative_once", policy={"name": "retry", "retries": 1}), 0.0
    ) as pool:
        assert rewards(pool, {"marker": str(tmp_path / "retry")}).parts == {
            "negative_once": [1.0, 1.0]
        }
    with RewardPool(reward_config("negative_once")) as pool:
        assert rewards(pool, {"marker": str(tmp_path / "any")}).parts == {
            "negative_once": [1.0, -1.0]
        }


def test_policy_retry_tries_again_then_drops(reward_config, tmp_path):
    with RewardPool(reward_config("fails_once", policy={"name": "retry", "retries": 1})) as pool:
        assert rewards(pool, {"marker": str(tmp_path / "tried")}).parts == {
            "fails_once": [1.0, 1.0]
        }
    with RewardPool(reward_config("raises", policy={"name": "retry", "retries": 1})) as pool:
        assert "KeyError" in rewards(pool).failure


def test_a_function_that_cannot_be_imported_is_an_error_of_the_call(reward_config):
    with (
        RewardPool(reward_config("no_such_function")) as pool,
        pytest.raises(RewardError, match="cannot be imported"),
    ):
        rewards(pool)


def test_an_async_client_that_is_kept_serves_every_call(reward_config):
    """With one event loop per call, the client's state from the first call would be dead."""
    with RewardPool(reward_config("asks_a_kept_client", deadline_s=10.0)) as pool:
        assert [rewards(pool).parts["asks_a_kept_client"] for _ in range(3)] == [[1.0, 3.0]] * 3


@pytest.mark.parametrize("name", ["meets_others", "meets_others_async"])
def test_one_process_scores_at_most_concurrency_groups_at_once(reward_config, name):
    with RewardPool(reward_config(name, concurrency=4)) as pool:
        groups = [ask(pool, {"others": 4}) for _ in range(12)]
        assert [group.result(timeout=60).parts for group in groups] == [{name: [4.0, 4.0]}] * 12


@pytest.mark.parametrize("does", ["waits forever", "blocks the loop", "ends the process"])
def test_what_one_group_does_to_its_process_is_not_charged_to_the_others(
    reward_config, short_guard, does
):
    with RewardPool(
        reward_config("waits_or_tells", concurrency=4, deadline_s=2.0, policy="drop_group")
    ) as pool:
        rewards(pool, {"does": "nothing"})
        others, harmful = (
            [ask(pool, {"does": "takes its time"}) for _ in range(3)],
            ask(pool, {"does": does}),
        )
        failure = (
            "ended its process (exit code 7)"
            if does == "ends the process"
            else "was killed after reward.deadline_s = 2 s"
        )
        assert failure in harmful.result(timeout=60).failure
        assert all(other.result(timeout=60).failure is None for other in others)
        assert rewards(pool, {"does": "nothing"}).failure is None


def test_an_async_reward_past_its_deadline_ends_without_its_process(reward_config):
    with RewardPool(
        reward_config("waits_or_tells", concurrency=2, deadline_s=1.0, policy="drop_group")
    ) as pool:
        before = rewards(pool, {"does": "nothing"}).parts
        assert "was killed after" in rewards(pool, {"does": "waits forever"}).failure
        assert rewards(pool, {"does": "nothing"}).parts == before


def test_a_thread_past_its_deadline_ends_with_its_process_and_the_others_run_again(reward_config):
    with RewardPool(
        reward_config("blocks_a_thread", concurrency=3, deadline_s=2.5, policy="drop_group")
    ) as pool:
        groups = [ask(pool, {"does": does}) for does in ("takes its time", "waits forever")]
        first, second = (group.result(timeout=60) for group in groups)
        assert first.failure is None and "was killed after" in second.failure


def test_a_machine_that_stood_still_is_nobodys_fault(reward_config):
    with RewardPool(
        reward_config("waits_or_tells", deadline_s=3.0, policy="drop_group", processes=1)
    ) as pool:
        rewards(pool, {"does": "nothing"})
        stopped = [
            child
            for child in psutil.Process().children(recursive=True)
            if process_name(child) == "reward process"
        ]
        group = ask(pool, {"does": "takes its time"})
        for child in stopped:
            child.suspend()
        pool._loop.call_soon_threadsafe(time.sleep, 4.0)
        time.sleep(4.2)
        for child in stopped:
            child.resume()
        assert group.result(timeout=60).failure is None


def users(path):
    """Processes that have the file open."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(
                os.path.realpath(f"/proc/{process.pid}/fd/{number}") == str(path)
                for number in os.listdir(f"/proc/{process.pid}/fd")
            ):
                found.append(process)
        except (OSError, psutil.Error):
            continue
    return found


def until_started(marker):
    """The processes that a reward has left behind, once all have started."""
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        if marker.exists() and "started" in marker.read_text() and len(found := users(marker)) >= 6:
            return found
        time.sleep(0.02)
    raise AssertionError("it left none")


@pytest.mark.parametrize("then", ["hangs", "dies"])
def test_what_a_reward_has_started_dies_with_it(reward_config, tmp_path, then):
    """Children, new sessions, double forks, ignored signals."""
    marker = tmp_path / "marker"
    with RewardPool(reward_config("leaves_processes", deadline_s=2.0, policy="drop_group")) as pool:
        assert (
            rewards(pool, {"how": "all", "marker": str(marker), "then": then}).failure is not None
        )
        assert "started" in marker.read_text() and users(marker) == []


def test_what_a_reward_has_left_dies_with_the_pool(reward_config, tmp_path):
    marker = tmp_path / "marker"
    with RewardPool(reward_config("leaves_processes")) as pool:
        assert (
            rewards(pool, {"how": "all", "marker": str(marker), "then": "returns"}).failure is None
        )
        until_started(marker)
    assert users(marker) == []


def test_what_a_late_async_reward_has_started_dies_with_it(reward_config, tmp_path):
    marker = tmp_path / "marker"
    with RewardPool(
        reward_config("leaves_a_process_async", deadline_s=1.0, policy="drop_group")
    ) as pool:
        assert "was killed after" in rewards(pool, {"marker": str(marker)}).failure
        assert marker.exists() and users(marker) == []


def test_reward_processes_and_what_they_started_die_with_the_process_of_the_pool(
    tmp_path: Path,
) -> None:
    marker = tmp_path / "marker"
    script = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from asyncrl.config import RewardConfig
from asyncrl.rewards.contract import GroupCall
from asyncrl.rewards.pool import RewardPool
functions = {{"f": {{"function": "tests.rewards.rewards_under_test:leaves_processes"}}}}
config = RewardConfig.model_validate({{"functions": functions, "processes": 1}})
pool = RewardPool(config)
pool.submit(GroupCall(["p"], ["a"], [[1]], {{"how": "all", "marker": {str(marker)!r},
    "then": "hangs"}})).result()
"""
    process = subprocess.Popen([sys.executable, "-c", script])
    try:
        left = until_started(marker)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert psutil.wait_procs(left, timeout=30)[1] == [] and users(marker) == []


def test_a_module_that_raises_while_it_is_imported_is_named(reward_config, tmp_path, monkeypatch):
    (tmp_path / "raises_at_import.py").write_text("raise ValueError('no license')")
    (tmp_path / "ends_at_import.py").write_text("import os; os._exit(5)")
    monkeypatch.syspath_prepend(tmp_path)
    config = reward_config("by_length", policy="drop_group")

    def named(module):
        functions = {
            "f": config.functions["by_length"].model_copy(update={"function": f"{module}:f"})
        }
        return RewardPool(config.model_copy(update={"functions": functions}))

    with named("raises_at_import") as pool:
        assert (
            "'raises_at_import:f' cannot be imported (ValueError: no license at "
            in rewards(pool).failure
        )
    with named("ends_at_import") as pool:
        with pytest.raises(
            RewardError, match=r"ended \(exit code 5\) while it imported \['ends_at_import:f'\]"
        ):
            asyncio.run(pool.check())
        assert "exit code 5" in rewards(pool).failure


def test_parts_of_a_function_are_kept_next_to_its_reward(reward_config):
    with RewardPool(reward_config("parts_with_a_total", "by_length")) as pool:
        parts = rewards(pool).parts
    assert parts == {
        "parts_with_a_total": [2.0, 2.0],
        "by_length": [1.0, 3.0],
        "parts_with_a_total/length": [1.0, 3.0],
    }


def test_rewards_of_tokens_are_weighted_and_kept(reward_config):
    config = reward_config("of_each_token", "none_for_one", "by_length")
    per_token = {
        name: config.functions[name].model_copy(update={"per_token": True, "weight": 2.0})
        for name in ("of_each_token", "none_for_one")
    }
    config = config.model_copy(update={"functions": config.functions | per_token})
    with RewardPool(config) as pool:
        scored = pool.submit(GroupCall(["p"] * 2, ["a", "bcd"], [[1, 2], [3]])).result(timeout=60)
    assert scored.tokens == [None, [7.0]] and scored.parts["of_each_token"] == [3.0, 3.0]


def test_a_reward_process_has_a_name_in_memory_reports(reward_config):
    with RewardPool(reward_config("names_its_process")) as pool:
        process = psutil.Process(int(rewards(pool).parts["names_its_process"][0]))
        assert process_name(process) == process_name(process.parent()) == "reward process"


@pytest.mark.parametrize("name", ["interrupts", "interrupts_later"])
@pytest.mark.parametrize("concurrency", [1, 4])
def test_what_derives_from_base_exception_is_a_failure_like_any_other(
    reward_config, name, concurrency
):
    with RewardPool(reward_config(name, concurrency=concurrency, policy="drop_group")) as pool:
        assert "raised KeyboardInterrupt" in rewards(pool).failure


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("finds_nothing", "raised StopIteration"),
        ("too_large", "at index 0; return a finite number"),
        ("parts_too_large", "sum of parts' returned 6e\\+38 at index 0"),
        ("a_set", "returned set; return a list"),
        ("raises_what_cannot_be_read", "raised UnreadableError: .a UnreadableError without a text"),
        ("returns_what_cannot_be_read", r"\(UnreadableError\) at index 0"),
    ],
)
def test_an_unusual_failure_is_named_at_once_and_not_taken_for_a_hang(reward_config, name, message):
    with (
        RewardPool(reward_config(name, deadline_s=120.0)) as pool,
        pytest.raises(RewardError, match=message),
    ):
        rewards(pool)


@pytest.mark.parametrize("name", ["large", "large_tokens"])
def test_a_total_that_does_not_fit_a_float_fails(reward_config, name):
    config = reward_config(name)
    function = config.functions[name].model_copy(
        update={"weight": 10.0, "per_token": name == "large_tokens"}
    )
    with (
        RewardPool(config.model_copy(update={"functions": {name: function}})) as pool,
        pytest.raises(RewardError, match="is too large"),
    ):
        rewards(pool)
