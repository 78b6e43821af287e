"""Scoring on real Ray Data, with rollout workers around a fake generator."""

import asyncio
import os
import queue
import signal
import sys
import time
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import ray
import torch
from fake_clock import FakeClock
from ray.data._internal.execution.streaming_executor import StreamingExecutor
from transformers import AutoModelForCausalLM

from asyncrl.config import Config
from asyncrl.contracts.group_table import groups_from_table, table_from_ipc
from asyncrl.contracts.rows import Prompt, ReferenceLogprobs, TopLogprobs
from asyncrl.learning.examples.batches import examples_of
from asyncrl.learning.frozen.reference import start_reference
from asyncrl.preflight.specs import reference_spec, scoring_spec, worker_spec
from asyncrl.rewards import scoring
from asyncrl.rewards.contract import RewardError
from asyncrl.rewards.scoring import RayScores
from asyncrl.rollout.driver import start_rollouts
from asyncrl.runtime import pace
from asyncrl.testing import FakeGenerate

# Workers cannot import this file.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def make_config(reward, algorithm=None, **settings):
    return Config.model_validate(
        {
            "name": "scoring",
            "algorithm": algorithm or {},
            "max_steps": 1,
            "model": {"path": "unused"},
            "data": {"train": "unused"},
            "rollout": {"n_samples_per_prompt": 4, "max_completion_length": 8},
            "reward": {
                "functions": {"tested": {"function": f"tests.rewards.rewards_under_test:{reward}"}},
                **settings,
            },
        }
    )


def prompt(ordinal, **columns):
    return Prompt(ordinal, 0, f"prompt {ordinal}", (ordinal % 50 + 1,), columns)


class Station:
    """Rollout workers with scoring; both are closed afterwards."""

    def __init__(self, config, directory, reference=None):
        self.rollouts = start_rollouts(worker_spec(config, "run", 1, FakeGenerate))
        self.scores = RayScores(
            scoring_spec(config), 1, self.rollouts.workers, self.rollouts, directory, reference
        )

    async def __aenter__(self):
        await self.rollouts.ready()
        return self

    async def __aexit__(self, *error):
        await self.scores.close()
        await self.rollouts.close()

    async def take(self, count):
        """Groups from `next`, acknowledged on arrival, as the coordinator does."""
        groups = []
        async with asyncio.timeout(120):
            while len(groups) < count:
                groups += (arrived := await self.scores.next())
                await self.rollouts.ack([group.ordinal for group in arrived])
        return groups

    async def until_all_acknowledged(self):
        """Wait for the acknowledgments, which are sent without waiting for an answer."""
        async with asyncio.timeout(60):
            while any([await worker.unacknowledged.remote() for worker in self.rollouts.workers]):  # noqa: ASYNC110
                await asyncio.sleep(0.02)


def test_the_groups_of_eight_steps_come_once_each_in_one_execution(
    ray_cluster, tmp_path, monkeypatch
):
    executions = []
    execute = StreamingExecutor.execute
    monkeypatch.setattr(
        StreamingExecutor,
        "execute",
        lambda self, *a, **k: executions.append(self) or execute(self, *a, **k),
    )

    async def scenario():
        async with Station(make_config("by_length"), tmp_path) as station:
            groups = []
            for step in range(8):
                made = [
                    station.rollouts.rollout(prompt(step * 4 + index, answer="x"), 0)
                    for index in range(4)
                ]
                await asyncio.gather(*made)
                some = await station.take(4)
                on_disk = set(pyarrow.parquet.read_table(tmp_path)["ordinal"].to_pylist())
                assert {group.ordinal for group in some} <= on_disk
                groups += some
            await station.until_all_acknowledged()
            return groups, [
                groups_from_table(table_from_ipc(ray.get(group.ref[0])).slice(group.ref[1], 1))[0]
                for group in groups
            ]

    groups, rows = asyncio.run(scenario())
    assert len(executions) == 1
    assert [group.ordinal for group in groups] == [row.ordinal for row in rows]
    assert sorted(row.ordinal for row in rows) == list(range(32))
    for group, row in zip(groups, rows, strict=True):
        assert row.prompt == prompt(row.ordinal, answer="x")
        assert [t.reward for t in row.trajectories] == [
            len(t.completion.text) for t in row.trajectories
        ]
        assert group.usable == 4 and group.tokens == sum(
            len(t.completion.token_ids) for t in row.trajectories
        )
    [merged] = tmp_path.iterdir()
    assert sorted(pyarrow.parquet.read_table(merged)["ordinal"].to_pylist()) == list(range(32))


def test_closing_ends_rewards_that_still_run(ray_cluster, tmp_path):
    """All places are taken, so the task takes no more groups. It still learns that it must end."""

    async def scenario():
        config = make_config("takes_its_time", processes=1)
        async with Station(config, tmp_path) as station:
            await station.rollouts.rollout(prompt(0, slow="0"), 0)
            await station.take(1)
            await asyncio.gather(
                *(station.rollouts.rollout(prompt(o, slow="an hour"), 0) for o in range(1, 5))
            )
            await station.scores.close()
            return [thread.name for thread in station.scores._threads if thread.is_alive()]

    assert asyncio.run(scenario()) == []


@pytest.mark.slow
def test_a_slow_reward_holds_back_no_other_group(ray_cluster, tmp_path):
    async def scenario():
        async with Station(make_config("takes_its_time", processes=2), tmp_path) as station:
            await asyncio.gather(station.rollouts.rollout(prompt(0, slow="0"), 0))
            await station.take(1)
            began = time.monotonic()
            await station.rollouts.rollout(prompt(1, slow="1"), 0)
            await asyncio.gather(
                *(
                    station.rollouts.rollout(prompt(ordinal, slow="0"), 0)
                    for ordinal in range(2, 12)
                )
            )
            groups = await station.take(10)
            assert time.monotonic() - began < 8.0
            return [group.ordinal for group in [*groups, *await station.take(1)]]

    ordinals = asyncio.run(scenario())
    assert sorted(ordinals[:10]) == list(range(2, 12)) and ordinals[10] == 1


@pytest.mark.slow
def test_policies_drop_group_and_fail(ray_cluster, tmp_path):
    async def scenario(policy):
        async with Station(
            make_config("hangs_in_c", deadline_s=1.0, processes=1, policy=policy), tmp_path / policy
        ) as station:
            await station.rollouts.rollout(prompt(0, slow="1"), 0)
            await station.rollouts.rollout(prompt(1, slow="0"), 0)
            return {group.ordinal: group for group in await station.take(2)}

    groups = asyncio.run(scenario("drop_group"))
    assert "tested" in groups[0].failure and "killed" in groups[0].failure and groups[0].usable == 0
    assert groups[1].failure is None and groups[1].usable == 4
    with pytest.raises(
        RewardError,
        match=(
            r"group 0: reward tested \(tests.rewards.rewards_under_test:hangs_in_c\) was killed"
            r" after reward.deadline_s = 1 s"
        ),
    ):
        asyncio.run(scenario("fail"))


def test_a_baseline_without_a_reward_costs_its_group_under_policy_fail_too(ray_cluster, tmp_path):
    async def scenario():
        config = make_config("last_none", algorithm={"advantage": "remax"})
        async with Station(config, tmp_path) as station:
            await station.rollouts.rollout(prompt(0, skip=True), 0)
            await station.rollouts.rollout(prompt(1, skip=False), 0)
            scored = {group.ordinal: group for group in await station.take(2)}
            await station.scores.save(scored.values(), tmp_path / "buffer.parquet")
            again = await station.scores.load(tmp_path / "buffer.parquet")
            return scored, {group.ordinal: group for group in again}

    scored, again = asyncio.run(scenario())
    assert scored[0].failure == "no baseline: the greedy completion could not be scored"
    assert scored[1].failure is None and scored[1].baseline.reward == 2.0
    assert [scored[ordinal].usable for ordinal in (0, 1)] == [4, 4]
    for ordinal, group in again.items():
        assert replace(group, ref=None) == replace(scored[ordinal], ref=None), "as after a resume"
    (tmp_path / "buffer.parquet").unlink()
    for row in pyarrow.parquet.read_table(tmp_path).to_pylist():
        expected = [None] * 4 if row["ordinal"] == 0 else [r - 2.0 for r in row["reward"]]
        assert row["advantage"] == expected and len(row["completion_ids"]) == 4


def test_when_the_read_task_dies_its_groups_are_scored_by_the_next_one(ray_cluster, tmp_path):
    marker = tmp_path / "reader"

    async def scenario():
        async with Station(
            make_config("names_its_reader", processes=1), tmp_path / "groups"
        ) as station:
            # Groups of the first reader must not be taken for groups of the second.
            for ordinal in range(2, 8):
                await station.rollouts.rollout(prompt(ordinal, marker=str(marker), slow="0"), 0)
            await station.take(6)
            marker.unlink(missing_ok=True)
            await station.rollouts.rollout(prompt(0, marker=str(marker), slow="1"), 0)
            async with asyncio.timeout(120):
                while not marker.exists() or not marker.read_text():  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            await station.rollouts.rollout(prompt(1, marker=str(marker), slow="0"), 0)
            os.kill(int(marker.read_text()), signal.SIGKILL)
            groups = await station.take(2)
            await station.until_all_acknowledged()
            return sorted(group.ordinal for group in groups)

    assert asyncio.run(scenario()) == [0, 1]
    assert sorted(pyarrow.parquet.read_table(tmp_path / "groups")["ordinal"].to_pylist()) == [
        *range(8)
    ]


@pytest.mark.slow
def test_several_tasks_share_the_groups_and_one_that_dies_loses_none(ray_cluster, tmp_path):
    folder = tmp_path / "met"
    folder.mkdir()
    reader = folder / "reader"

    async def scenario():
        config = make_config("meets_another_pool", tasks=2, processes=1, deadline_s=120.0)
        async with Station(config, tmp_path / "groups") as station:
            # More than one task can have at a time.
            for ordinal in range(6):
                await station.rollouts.rollout(prompt(ordinal, folder=str(folder), slow="0"), 0)
            groups = await station.take(6)
            await station.rollouts.rollout(prompt(6, folder=str(folder), slow="1"), 0)
            async with asyncio.timeout(120):
                while not reader.exists() or not reader.read_text():  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            os.kill(int(reader.read_text()), signal.SIGKILL)
            await station.rollouts.rollout(prompt(7, folder=str(folder), slow="0"), 0)
            groups += await station.take(2)
            await station.until_all_acknowledged()
            return sorted(group.ordinal for group in groups)

    assert asyncio.run(scenario()) == [*range(8)]
    assert sorted(pyarrow.parquet.read_table(tmp_path / "groups")["ordinal"].to_pylist()) == [
        *range(8)
    ]


async def test_a_second_copy_of_a_group_is_acknowledged_and_dropped(ray_cluster, tmp_path):
    # One process: with two, the copy may come after the group that the test waits for.
    async with Station(make_config("by_length", processes=1), tmp_path) as station:
        await station.rollouts.rollout(prompt(0), 0)
        await station.take(1)
        await station.rollouts.rollout(prompt(0), 0)
        await station.rollouts.rollout(prompt(1), 0)
        assert [group.ordinal for group in await station.take(1)] == [1]
        await station.until_all_acknowledged()
    assert sorted(pyarrow.parquet.read_table(tmp_path)["ordinal"].to_pylist()) == [0, 1]


def test_what_has_ended_is_forgotten_and_a_late_copy_is_dropped(ray_cluster, tmp_path):
    async def scenario():
        async with Station(make_config("by_length", processes=1), tmp_path) as station:
            for ordinal in range(3):
                await station.rollouts.rollout(prompt(ordinal), 0)
            await station.take(3)
            station.scores.ended_below(2)
            await station.rollouts.rollout(prompt(1), 0)
            await station.rollouts.rollout(prompt(3), 0)
            assert [group.ordinal for group in await station.take(1)] == [3]
            await station.until_all_acknowledged()
            return station.scores._seen

    assert asyncio.run(scenario()) == {2, 3}
    assert sorted(pyarrow.parquet.read_table(tmp_path)["ordinal"].to_pylist()) == [0, 1, 2, 3]


def two_groups(config, directory, policy):
    """Two scored groups by ordinal, with an actor of this class as the reference policy or teacher.
    The second group's prompt has two tokens."""
    actor = ray.remote(policy).options(num_cpus=0).remote()

    async def scenario():
        async with Station(config, directory, actor) as station:
            await station.rollouts.rollout(prompt(0), 0)
            await station.rollouts.rollout(replace(prompt(1), token_ids=(4, 5)), 0)
            return {one.ordinal: one for one in await station.take(2)}

    try:
        return asyncio.run(scenario())
    finally:
        ray.kill(actor)


class OddReference:
    """Fails at one group, like a model that runs out of memory on a long one."""

    def versioned_logprobs(self, rows, scored=None):
        if len(rows[0][0]) == 2:
            raise ValueError("too long for me")
        return ReferenceLogprobs(0, [np.zeros(len(ids), np.float32) for _, ids in rows])


def test_a_reference_that_fails_at_one_group_costs_that_group_under_every_policy(
    ray_cluster, tmp_path
):
    config = make_config("by_length", policy="fail")
    config = Config.model_validate(
        config.model_dump() | {"algorithm": {"advantage": "rloo", "reference": {"kl_coef": 0.1}}}
    )
    scored = two_groups(config, tmp_path / "groups", OddReference)
    assert scored[0].failure is None and scored[0].usable > 0
    assert (scored[0].reference_version, scored[1].reference_version) == (0, None)
    first, _, stack = scored[1].failure.partition("\n")
    assert (
        first.startswith("not foreseen: the reference policy failed: ")
        and "too long for me" in stack
        and scored[1].usable == 0
    )


class OddTeacher:
    """Returns two other tokens for each token. Fails at one group."""

    def top_logprobs(self, rows, scored=None):
        if len(rows[0][0]) == 2:
            raise ValueError("too long for me")
        return [
            TopLogprobs(
                np.full(len(ids), -1.0, np.float32),
                np.arange(2 * len(ids), dtype=np.int32).reshape(-1, 2),
                np.full((len(ids), 2), -2.0, np.float32),
            )
            for _, ids in rows
        ]


def test_the_tokens_of_a_teacher_reach_the_learner_and_the_files(ray_cluster, tmp_path):
    distillation = {"teacher": "/teacher", "use": {"name": "top_k", "top_k": 2}}
    config = Config.model_validate(
        make_config("by_length").model_dump() | {"algorithm": {"distillation": distillation}}
    )
    scored = two_groups(config, tmp_path / "groups", OddTeacher)
    assert scored[0].usable > 0 and scored[1].usable == 0
    [stream, place] = scored[0].ref
    examples = examples_of(table_from_ipc(ray.get(stream)).slice(place, 1))
    for example in examples:
        count = len(example.loss_mask)
        assert example.teacher_ids.tolist() == np.arange(2 * count).reshape(-1, 2).tolist()
        assert example.teacher_logprobs.tolist() == [[-2.0, -2.0]] * count
    written = pyarrow.parquet.read_table(tmp_path / "groups").sort_by("ordinal")
    lengths = [len(ids) for ids in written["completion_ids"].to_pylist()[0]]
    assert [len(ids) for ids in written["teacher_ids"].to_pylist()[0]] == [2 * n for n in lengths]
    assert written["teacher_failure"].to_pylist() == [None, "ValueError: too long for me"]
    assert set(written["status"].to_pylist()[1]) == {"no_teacher"}


@pytest.mark.slow
def test_a_reference_policy_gives_its_log_probs_to_every_trajectory(
    ray_cluster, tiny_model, tmp_path
):
    """The real actor on a real checkpoint, against transformers; the KL term reaches the reward."""
    config = make_config("by_length")
    config = Config.model_validate(
        config.model_dump()
        | {
            "model": {"path": str(tiny_model)},
            "algorithm": {"advantage": "rloo", "reference": {"kl_coef": 0.1}},
        }
    )
    reference = start_reference(reference_spec(config))

    async def scenario():
        async with Station(config, tmp_path / "groups", reference) as station:
            for ordinal in range(6):
                await station.rollouts.rollout(prompt(ordinal), 0)
            return await station.take(6)

    try:
        scored = asyncio.run(scenario())
    finally:
        ray.kill(reference)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    groups = [
        group
        for one in scored
        for group in groups_from_table(table_from_ipc(ray.get(one.ref[0])).slice(one.ref[1], 1))
    ]
    assert sorted(group.ordinal for group in groups) == list(range(6))
    assert {one.reference_version for one in scored} == {0}
    assert {group.reference_version for group in groups} == {0}
    for group in groups:
        for trajectory in group.trajectories:
            ids = torch.tensor([[*group.prompt.token_ids, *trajectory.completion.token_ids]])
            with torch.no_grad():
                expected = torch.log_softmax(
                    model(ids).logits[0, len(group.prompt.token_ids) - 1 : -1], -1
                )
            expected = expected.gather(1, torch.tensor(trajectory.completion.token_ids)[:, None])[
                :, 0
            ]
            assert trajectory.reference_logprobs == pytest.approx(expected.tolist(), abs=1e-5)
            apart = sum(trajectory.completion.logprobs) - sum(trajectory.reference_logprobs)
            assert trajectory.reward == pytest.approx(
                trajectory.reward_parts["tested"] - 0.1 * apart, rel=1e-4
            )


def test_a_quiet_stream_is_written_at_once_and_a_busy_one_in_few_files(monkeypatch):
    tables = [pa.table({"ordinal": [number]}) for number in range(4)]
    arrived, waits, clock = queue.Queue(), [], FakeClock()

    def sleep(seconds):
        waits.append(seconds)
        if seconds:
            arrived.put(tables[2])
            arrived.put(tables[3])

    clock.sleep = sleep
    monkeypatch.setattr(scoring, "time", clock)
    monkeypatch.setattr(pace, "time", clock)
    paced = pace.Pace(0.5)
    arrived.put(tables[0])
    assert scoring._waiting_tables(arrived, paced) == ([tables[0]], None)
    arrived.put(tables[1])
    clock.s = 0.125
    assert scoring._waiting_tables(arrived, paced) == (tables[1:], None)
    assert waits == [0, 0.375], "nothing was written before the first one"
