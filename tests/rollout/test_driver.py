"""The driver's side of the rollout workers, with real Ray actors and a fake generator."""

import asyncio
import contextlib
import sys

import pytest
import ray
from fake_actors import FakeMethod
from ray.exceptions import ActorDiedError, ActorUnavailableError, RpcError

from asyncrl.config import Config
from asyncrl.contracts.errors import RolloutFailedError, StaleReplicaError
from asyncrl.contracts.group_table import table_from_ipc
from asyncrl.contracts.messages import Finished
from asyncrl.contracts.rows import Prompt
from asyncrl.preflight.specs import worker_spec
from asyncrl.rollout import driver as group_module
from asyncrl.rollout.driver import RayRollouts, start_rollouts
from asyncrl.testing import FakeGenerate

# Workers cannot import this file.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class SlowOne(FakeGenerate):
    """Prompt 2 hangs while the file exists; prompt 3 gets only stale replicas."""

    def __init__(self, gate):
        super().__init__()
        self.gate = gate

    async def generate(self, request):
        if request.prompt_ids == (3,):
            raise StaleReplicaError("behind")
        while request.prompt_ids == (2,) and self.gate.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return await super().generate(request)


def make_spec(gate, deadline_s=60.0):
    config = Config.model_validate(
        {
            "name": "rollouts",
            "max_steps": 1,
            "model": {"path": "unused"},
            "data": {"train": "unused"},
            "rollout": {
                "n_samples_per_prompt": 2,
                "max_completion_length": 4,
                "num_workers": 2,
                "deadline_s": deadline_s,
            },
            "reward": {"functions": {"exact": {"function": "asyncrl.rewards.builtin:exact_match"}}},
        }
    )
    return worker_spec(config, "run", 1, lambda: SlowOne(gate))


def prompt(ordinal):
    return Prompt(ordinal, 0, "p", (ordinal,))


async def held(rollouts):
    return [await worker.unacknowledged.remote() for worker in rollouts.workers]


async def until_held(rollouts, groups):
    """Wait until the workers keep this many groups. Acknowledgments are sent without waiting for an
    answer, and a worker that was killed may still be starting."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(ray.exceptions.ActorUnavailableError):
                if sum(await held(rollouts)) == groups:
                    return
            await asyncio.sleep(0.05)


async def test_groups_are_spread_over_workers_and_forgotten_when_acknowledged(
    ray_cluster, tmp_path
):
    rollouts = start_rollouts(make_spec(tmp_path / "gate", deadline_s=4.0))
    try:
        await rollouts.ready()
        finished = await asyncio.gather(
            rollouts.rollout(prompt(0), 0), rollouts.rollout(prompt(1), 0)
        )
        assert [group.ordinal for group in finished] == [0, 1]
        assert await held(rollouts) == [1, 1]
        await rollouts.ack([0, 1, 77])
        await until_held(rollouts, 0)
        with pytest.raises(
            RolloutFailedError,
            match=(
                r"^group 3 was not generated within rollout.deadline_s = 4 s"
                r" .*StaleReplicaError:"
                r" behind"
            ),
        ):
            await rollouts.rollout(prompt(3), 0)
        await until_held(rollouts, 0)
    finally:
        await rollouts.close()


async def test_the_groups_of_a_dead_worker_are_made_again_under_their_ordinals(
    ray_cluster, tmp_path
):
    gate = tmp_path / "gate"
    gate.touch()

    rollouts = start_rollouts(make_spec(gate))
    try:
        await rollouts.ready()
        first = await rollouts.rollout(prompt(0), 0)
        in_flight = asyncio.create_task(rollouts.rollout(prompt(2), 0))
        await asyncio.sleep(0)
        for worker in rollouts.workers:
            ray.kill(worker, no_restart=False)
        gate.unlink()
        assert (await asyncio.wait_for(in_flight, 60)).ordinal == 2

        await until_held(rollouts, 2)
        streams = [
            stream
            for worker in rollouts.workers
            if (stream := await worker.take.remote("reader", 8, 0.1)) is not None
        ]
        rows = {
            row["ordinal"]: row["completion_ids"]
            for stream in streams
            for row in table_from_ipc(stream).to_pylist()
        }
        assert set(rows) == {0, 2} and sum(map(len, rows[0])) == first.tokens
    finally:
        await rollouts.close()


def again_tasks(rollouts):
    """The tasks that make lost groups again."""
    return [task for task in rollouts._tasks if task.get_coro().__name__ == "_make_again"]


@pytest.mark.slow
async def test_only_a_group_that_is_still_needed_counts_as_lost(ray_cluster, tmp_path):
    """Two groups are lost with their workers and cannot be generated again in time, but the scored
    row of one arrives."""
    gate = tmp_path / "gate"

    rollouts, lost = start_rollouts(make_spec(gate, deadline_s=2.0)), []
    reported = asyncio.Event()

    def when_lost(ordinal, error):
        lost.append((ordinal, type(error), str(error)))
        reported.set()

    rollouts.when_lost = when_lost
    try:
        await rollouts.ready()
        await asyncio.gather(
            *(rollouts.rollout(Prompt(ordinal, 0, "p", (2,)), 0) for ordinal in (5, 6))
        )
        gate.touch()
        for worker in rollouts.workers:
            ray.kill(worker, no_restart=False)
        while len(again_tasks(rollouts)) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        again = list(again_tasks(rollouts))
        await rollouts.ack([5])
        await asyncio.wait_for(asyncio.gather(*again), 60)
        await asyncio.wait_for(reported.wait(), 60)
    finally:
        await rollouts.close()
    ((ordinal, kind, message),) = lost
    assert (ordinal, kind) == (
        6,
        RolloutFailedError,
    ) and "was not generated within rollout.deadline_s = 2 s" in message


async def test_a_worker_gives_up_a_cancelled_rollout(ray_cluster, tmp_path):
    gate = tmp_path / "gate"
    gate.touch()

    async with asyncio.timeout(100):
        rollouts = start_rollouts(make_spec(gate))
        try:
            await rollouts.ready()
            hangs = asyncio.create_task(rollouts.rollout(prompt(2), 0))
            await rollouts.rollout(prompt(0), 0)
            hangs.cancel()
            await asyncio.gather(hangs, return_exceptions=True)
            assert hangs.cancelled()
            while sum([await worker.under_way.remote() for worker in rollouts.workers]):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            gate.unlink()
            await rollouts.rollout(prompt(1), 0)
            assert sum(await held(rollouts)) == 2, "only the groups that were not given up"
        finally:
            await rollouts.close()


class FakeWorker:
    """A worker whose `ended` raises each of the errors in turn, once it has made a group."""

    def __init__(self, dies):
        self.dies = iter(dies)
        self.made, self.calls, self.told = [], [], False
        self.changed = asyncio.Event()

    def __getattr__(self, method):
        return FakeMethod(getattr(self, f"_{method}", self._nothing))

    async def _ended(self, life, received):
        while not self.made:
            self.changed.clear()
            await self.changed.wait()
        made, self.made = self.made, []
        if made[0] == "dies":
            raise next(self.dies)
        return "life", received + 1, [(ordinal, Finished(ordinal, 0, 1)) for ordinal in made]

    async def _begin(self, prompts, committed):
        self.calls.append(len(prompts))
        self.made += [prompt.ordinal for prompt in prompts]
        self.changed.set()

    def die(self):
        self.made.append("dies")
        self.changed.set()

    async def _end_sessions(self):
        self.told = True

    def _nothing(self, *arguments):
        return None


def test_one_error_of_the_network_costs_no_group_and_a_later_death_is_noticed(monkeypatch):
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    monkeypatch.setattr(group_module, "RESTART_PAUSE_S", 0.001)

    async def scenario():
        again = []
        worker = FakeWorker([RpcError("GCS is away"), ActorDiedError()])
        rollouts = RayRollouts([worker], 60.0)
        make_again = rollouts._make_again

        async def _make_again(held):
            again.append(held.prompt.ordinal)
            await make_again(held)

        rollouts._make_again = _make_again
        await rollouts.rollout(prompt(0), 0)
        worker.die()  # the network's error
        await rollouts.rollout(prompt(1), 0)
        assert again == []
        worker.die()
        while len(again) < 2 or again_tasks(rollouts):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await rollouts.close()
        return again

    assert asyncio.run(asyncio.wait_for(scenario(), 20)) == [0, 1]


def test_prompts_of_one_moment_share_a_call(monkeypatch):
    """Holds the cost of a group down: 64 prompts make one call."""
    monkeypatch.setattr(ray, "kill", lambda actor: None)

    async def scenario():
        worker = FakeWorker([])
        rollouts = RayRollouts([worker], 60.0)
        await asyncio.gather(*(rollouts.rollout(prompt(ordinal), 0) for ordinal in range(64)))
        await rollouts.close()
        return worker.calls, worker.told

    calls, told = asyncio.run(asyncio.wait_for(scenario(), 20))
    assert calls == [64] and told  # environments get a moment before the kill


class Restarts(FakeWorker):
    """A worker that dies with its first groups, and answers again before the driver notices."""

    def __init__(self):
        super().__init__([])
        self.questions = []

    async def _ended(self, life, received):
        self.questions.append(life)
        if life == "":
            return "first", 0, []
        if life == "first":
            while not self.made:
                self.changed.clear()
                await self.changed.wait()
            if self.questions.count("first") == 1:
                raise ActorUnavailableError("the network", None)
            self.made = []
            return "second", 0, []
        _, received, ended = await super()._ended(life, received)
        return "second", received, ended


def test_groups_of_a_worker_that_restarts_unnoticed_begin_again(monkeypatch):
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    monkeypatch.setattr(group_module, "RESTART_PAUSE_S", 0.001)

    async def scenario():
        worker = Restarts()
        rollouts = RayRollouts([worker], 60.0)
        finished = await asyncio.gather(*(rollouts.rollout(prompt(n), 0) for n in (0, 1)))
        await rollouts.close()
        return [group.ordinal for group in finished], worker.calls

    assert asyncio.run(asyncio.wait_for(scenario(), 20)) == ([0, 1], [2, 2])
