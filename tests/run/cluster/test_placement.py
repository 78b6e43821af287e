"""Room for a run: an immediate refusal if no node can join, else a timeout, fewer replicas, and a
new attempt after a lost placement."""

import asyncio
import contextlib
import json
import re
import time
from unittest.mock import create_autospec

import pytest
from fake_actors import FakeActor
from ray.exceptions import RpcError
from small_config import small_config as config

from asyncrl.contracts.errors import PartDiedError, PlacementError, PlacementLostError
from asyncrl.data.prompt_stream import RayPromptSource
from asyncrl.data.prompts import check_prompts
from asyncrl.preflight.plan.text import Plan
from asyncrl.preflight.resources.needs import ClusterNode
from asyncrl.preflight.specs import data_spec
from asyncrl.run import launch, supervise, train as run
from asyncrl.run.cluster import placement
from asyncrl.run.cluster.placement import needed, wait_for_placement, wait_for_resources
from asyncrl.run.launch import Stations
from asyncrl.rundir.checkpoint import CheckpointStore
from asyncrl.rundir.directory import RunDirectory


@pytest.fixture
def holder(ray_cluster):
    """`holder(cpus)`: an actor that occupies this many logical CPUs. It ends with the test, and its
    resources are free again."""
    held, free = [], ray_cluster.available_resources()["CPU"]

    class Holder:
        def here(self):
            return True

    def hold(cpus, wait=True):
        actor = ray_cluster.remote(Holder).options(num_cpus=cpus).remote()
        held.append(actor)
        if wait:
            ray_cluster.get(actor.here.remote(), timeout=60)
        return actor

    yield hold
    for actor in held:
        ray_cluster.kill(actor)
    while ray_cluster.available_resources().get("CPU", 0) < free - 1e-6:
        time.sleep(0.05)


def test_needed_includes_every_part():
    assert needed(config())["CPU"] == pytest.approx(0.4 + 0.4 + 0.1 + 0.1 + 0.1)
    assert (
        needed(
            config(
                learner={"device": "cuda", "world_size": 2},
                generator={"device": "cuda", "num_replicas": 3},
            )
        )["GPU"]
        == 5
    )


@pytest.mark.timeout(120)
async def test_a_local_cluster_that_is_too_small_is_refused_at_once(ray_cluster):
    with pytest.raises(
        PlacementError,
        match=(
            r"too small for this run \(CPU: 40\.7 needed, 2 registered; .*\); lower"
            r" generator.num_replicas"
        ),
    ) as error:
        await wait_for_resources(config(generator={"num_replicas": 100}, placement_timeout_s=600))
    text = str(error.value)
    assert (
        re.search(r"\n +needed +registered +free\n +CPU +40\.7 +2 ", text)
        and "decoupled needs total >=" in text
    )


@pytest.mark.timeout(120)
async def test_a_full_cluster_is_refused_after_the_timeout(ray_cluster, holder):
    free = ray_cluster.available_resources()["CPU"]
    lines = []
    holder(free - 0.5)
    with pytest.raises(
        PlacementError,
        match=(
            r"after placement_timeout_s = 1 s \(CPU: 1\.1 needed, 0\.\d+ free.*\); free some, or"
            r" raise placement_timeout_s\n"
        ),
    ) as error:
        await wait_for_resources(config(placement_timeout_s=1), tell=lines.append)
    assert "the users of the rest are not known: this cluster has no dashboard" in str(error.value)
    # Processes of earlier tests may free their resources during this one.
    assert re.match(
        r"waiting up to 1 s for room on the cluster: CPU: 1\.1 needed, 0\.\d+ free", lines[0]
    )


@pytest.mark.timeout(120)
async def test_resources_freed_in_time_are_used(ray_cluster, holder):
    other, lines = holder(ray_cluster.available_resources()["CPU"] - 0.5), []

    waiting = asyncio.create_task(
        wait_for_resources(config(placement_timeout_s=100), 1 << 20, lines.append)
    )
    while not lines:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    ray_cluster.kill(other)
    _, text = await waiting
    assert "# cluster, 1 node\n" in text and re.search(r"\n  shared memory +3\.0 MiB ", text)


@pytest.mark.timeout(120)
async def test_memory_that_no_node_has_is_refused_at_once(ray_cluster):
    with pytest.raises(
        PlacementError, match=r"too small for this run \(memory: .* GiB needed, .* registered"
    ):
        await wait_for_resources(config(placement_timeout_s=600), 1 << 44)


@pytest.mark.timeout(120)
async def test_an_actor_without_room_is_named(ray_cluster, holder):
    free = ray_cluster.available_resources()["CPU"]
    holder(free - 0.1)
    holder(config().generator.num_cpus, wait=False)
    with pytest.raises(
        PlacementLostError,
        match=r"Holder not placed within placement_timeout_s = 1 s.*\nresource.*\nCPU",
    ):
        await wait_for_placement(config(placement_timeout_s=1), "no-such-application", {})


async def started():
    return True


async def not_started():
    return False


@pytest.mark.timeout(120)
async def test_placement_ends_when_replicas_have_processes_and_streams_have_started(generators):
    await wait_for_placement(config(), generators.name, {"prompt stream": started})


@pytest.mark.timeout(180)
async def test_a_stream_without_room_is_named(
    generators, tiny_model, ray_cluster, holder, tmp_path
):
    """The real prompt stream, in a cluster that another job has filled."""
    write_prompts(tmp_path / "p.jsonl")
    free = ray_cluster.available_resources()["CPU"]
    other = holder(free - 0.01)
    wanted = config(
        placement_timeout_s=1,
        model={"path": str(tiny_model)},
        data={"train": str(tmp_path / "p.jsonl"), "max_prompt_length": 8},
    )

    with pytest.raises(
        PlacementLostError, match=r"^prompt stream not placed within placement_timeout_s = 1 s"
    ):
        prompts = RayPromptSource(data_spec(wanted), check_prompts(data_spec(wanted)))
        try:
            await wait_for_placement(
                wanted,
                generators.name,
                {"prompt stream": prompts.started, "scoring stream": started},
            )
        finally:
            ray_cluster.kill(other)  # otherwise the test would wait for the stream
            await prompts.close()


def write_prompts(path):
    path.write_text("".join(json.dumps({"prompt": f"{n}+{n}="}) + "\n" for n in range(20)))


@pytest.fixture
def nodes_seen(monkeypatch):
    """`nodes_seen(first, second, …)`: CPUs of a standing cluster's only node in successive looks;
    the last value stays. Returns the calls to Ray."""

    def script(*cpus, placed=False):
        looks, calls = [*cpus], []

        class Demand:
            def __init__(self, config):
                calls.append(("demand", config.engines.num_replicas))

            def placed(self):
                return placed

            def remove(self):
                calls.append("removed")

        def seen(with_memory):
            have = {"CPU": looks.pop(0) if len(looks) > 1 else looks[0], "GPU": 0.0}
            return [ClusterNode("n", have, have)]

        monkeypatch.setattr(placement, "own_cluster", lambda: False)
        monkeypatch.setattr(placement, "cluster_nodes", seen)
        monkeypatch.setattr(placement, "users_by_node", lambda: ({}, ""))
        monkeypatch.setattr(placement, "_Demand", Demand)
        monkeypatch.setattr(placement, "LOOK_EVERY_S", 0.001)
        return calls

    return script


RANGE = {"num_replicas": 4, "min_replicas": 2, "num_cpus": 1.0}


async def test_missing_nodes_are_requested_and_waited_for(nodes_seen):
    calls = nodes_seen(0, 0, 1, 8)
    chosen, table = await wait_for_resources(config(generator=RANGE, placement_timeout_s=600))
    assert (
        chosen.generator.num_replicas == 4 and "starts with the replicas that fit, 2 to 4." in table
    )
    assert calls == [("demand", 4), "removed"]


def test_an_engine_of_several_nodes_asks_for_different_nodes(monkeypatch):
    groups, placed, removed = [], [], []

    def group(bundles, strategy):
        groups.append((strategy, bundles))
        return len(groups) - 1

    def table(group):
        return {"state": "CREATED" if group in placed else "PENDING"}

    monkeypatch.setattr(placement, "placement_group", group)
    monkeypatch.setattr(placement, "placement_group_table", table)
    monkeypatch.setattr(placement, "remove_placement_group", removed.append)
    engines = {"tensor_parallel_size": 4, "nnodes": 2, "num_cpus": 1, "num_replicas": 2}
    demand = placement._Demand(config(generator={"device": "cuda", **engines}))
    others = [0.4, 0.1, 0.1, 0.1]
    assert groups == [
        ("PACK", [{"CPU": pytest.approx(cpus)} for cpus in others]),
        *[("STRICT_SPREAD", [{"CPU": 1, "GPU": 2}] * 2)] * 2,
    ]
    placed += [0, 2]
    assert not demand.placed()
    placed.append(1)
    assert demand.placed()
    demand.remove()
    assert removed == [0, 1, 2]


@pytest.mark.parametrize(
    ("nnodes", "fix"),
    [
        (2, "lower generator.num_replicas, generator.nnodes, generator.tensor_parallel_size,"),
        (1, "lower generator.num_replicas, generator.tensor_parallel_size,"),
    ],
)
async def test_too_few_nodes_for_an_engine_are_a_reason_to_lower_nnodes(
    nodes_seen, monkeypatch, nnodes, fix
):
    monkeypatch.setattr(placement, "GIVEN_BACK_S", 0.01)
    nodes_seen(8 if nnodes > 1 else 1)
    engines = {"tensor_parallel_size": 2, "nnodes": nnodes, "num_cpus": 1}
    with pytest.raises(PlacementError, match=re.escape(f"; {fix}")) as error:
        await wait_for_resources(config(generator=engines, placement_timeout_s=0.01))
    assert ("generator nodes 1 of 2" in str(error.value)) == (nnodes > 1)


async def test_resources_of_a_removed_demand_are_waited_for_until_free(nodes_seen):
    calls = nodes_seen(0, 0, 0, 0, 0, 8, placed=True)
    await wait_for_resources(config(generator=RANGE, placement_timeout_s=600))
    assert calls == [("demand", 4), "removed"]


async def test_resources_that_others_always_take_are_refused_after_the_timeout(
    nodes_seen, monkeypatch
):
    monkeypatch.setattr(placement, "GIVEN_BACK_S", 0.01)
    nodes_seen(0, placed=True)
    with pytest.raises(PlacementError, match="too small for this run after placement_timeout_s"):
        await asyncio.wait_for(
            wait_for_resources(config(generator=RANGE, placement_timeout_s=0.1)), 60
        )


async def test_after_the_timeout_a_run_starts_with_the_replicas_that_fit(nodes_seen):
    nodes_seen(3.8)
    lines = []
    chosen, table = await wait_for_resources(
        config(generator=RANGE, placement_timeout_s=0.05), tell=lines.append
    )
    assert chosen.generator.num_replicas == 3 and chosen.generator.min_replicas == 2
    assert (
        lines[-1]
        == "only 3 of generator.num_replicas = 4 have room: CPU: 4.7 needed, 3.8 registered"
    )
    assert "generator replicas 3 of 3" in table


async def test_a_demand_that_is_partly_placed_frees_its_part_for_fewer_replicas(
    nodes_seen, monkeypatch
):
    calls = nodes_seen(0)

    def two_nodes(with_memory):
        free = {"CPU": 4.0 if "removed" in calls else 0.5}
        return [ClusterNode(name, {"CPU": 4.0}, free) for name in "ab"]

    monkeypatch.setattr(placement, "cluster_nodes", two_nodes)
    # The nodes that were seen before the removal decide nothing after it, however late it is.
    monkeypatch.setattr(placement, "GIVEN_BACK_S", 0)
    engines = config(
        generator={**RANGE, "tensor_parallel_size": 2, "nnodes": 2}, placement_timeout_s=0.5
    )
    chosen, _ = await wait_for_resources(engines)
    assert chosen.generator.num_replicas == 3 and calls == [("demand", 4), "removed"]


@pytest.mark.parametrize("generator", [RANGE, {**RANGE, "min_replicas": None}])
async def test_after_the_timeout_fewer_than_min_replicas_are_refused(nodes_seen, generator):
    calls = nodes_seen(2.0)
    with pytest.raises(
        PlacementError,
        match=(
            r"too small for this run after placement_timeout_s = 0\.5 s \(CPU: 4\.7 needed, 2"
            r" registered"
        ),
    ) as error:
        await wait_for_resources(config(generator=generator, placement_timeout_s=0.5))
    assert not isinstance(error.value, PartDiedError) and calls == [("demand", 4), "removed"]


def test_a_new_attempt_starts_automatically_after_a_lost_placement(monkeypatch, tmp_path):
    """Two attempts lose their placement, and the third ends. Each one requests all replicas
    again."""
    attempts = []

    async def train(job, directory, *_):
        attempts.append((job.config.resume, job.config.engines.num_replicas))
        if len(attempts) < 3:
            raise PlacementLostError("1 learner ranks were not placed")
        return supervise.Summary(tmp_path, 0.0)

    wanted = config(runs_root=str(tmp_path), generator=RANGE)
    monkeypatch.setattr(supervise, "_train", train)
    monkeypatch.setattr(run, "resolve_models", lambda config: config)
    monkeypatch.setattr(
        run, "make_plan", lambda config: create_autospec(Plan, instance=True, prompts=None)
    )
    monkeypatch.setattr(
        run, "reward_trial", lambda config: contextlib.nullcontext(lambda report: None)
    )
    monkeypatch.setattr(supervise, "_announce", lambda *args, **named: None)
    monkeypatch.setattr(supervise, "_print_summary", lambda *args: None)
    checkpoints = create_autospec(CheckpointStore, instance=True)
    checkpoints.newest_first.return_value = []
    directory = create_autospec(
        RunDirectory, instance=True, checkpoints=checkpoints, checkpoint=None, logs=tmp_path
    )
    monkeypatch.setattr(supervise, "RunDirectory", lambda *_: contextlib.nullcontext(directory))
    assert run.run_training(wanted, ["asyncrl", "train"]) == 0
    assert attempts == [("never", 4), ("auto", 4), ("auto", 4)]
    ends = [call.args[0] for call in directory.end.call_args_list]
    assert ends == ["failed", "failed", "finished"]
    attempts.clear()
    assert (
        run.run_training(wanted.model_copy(update={"max_restarts": 1}), ["asyncrl", "train"]) == 1
    )
    assert len(attempts) == 2


@pytest.fixture
def replicas_seen(monkeypatch):
    """`replicas_seen((replicas, waiting, unmet), …)`: Ray's state in successive looks; the last one
    stays. Returns the Stations that look."""

    def script(*looks, **changes):
        left = [*looks]

        def survey(prefix):
            assert prefix == "SERVE_REPLICA::app#"
            replicas, waiting, _ = left[0]
            return replicas, (
                ["ServeReplica:app:Generator"] * waiting if isinstance(waiting, int) else waiting
            )

        def unmet(config):
            return (left.pop(0) if len(left) > 1 else left[0])[2]

        monkeypatch.setattr(placement, "_survey", survey)
        monkeypatch.setattr(placement, "_unmet_demand", unmet)
        monkeypatch.setattr(placement, "resource_table", lambda needed: "the table")
        monkeypatch.setattr(placement, "GENERATORS_EVERY_S", 0.001)
        stations = Stations.__new__(Stations)
        stations.placed, stations.application = config(placement_timeout_s=0.05, **changes), "app"
        return stations

    return script


@pytest.mark.parametrize(
    ("waiting", "unmet", "lost"),
    [
        (["Reference", "ServeReplica:app:Generator"], True, True),
        (["Reference"], False, False),
        (["ServeReplica:app:Generator"], True, False),
        ([], True, False),
    ],
    ids=["no room", "its process starts", "only a generator waits", "its model loads"],
)
async def test_a_reference_policy_that_gets_no_gpu_has_lost_its_placement(
    replicas_seen, monkeypatch, waiting, unmet, lost
):
    """The generators' start waits for it where they share GPUs."""
    monkeypatch.setattr(placement, "LOOK_EVERY_S", 0.001)
    placed = replicas_seen((0, waiting, unmet)).placed

    refused = pytest.raises(
        PlacementLostError,
        match=r"^Reference not placed within placement_timeout_s = 0\.05 s; free",
    )
    with refused if lost else contextlib.nullcontext():
        ready = asyncio.get_running_loop().create_future()
        if not lost:  # after four times the placement timeout
            asyncio.get_running_loop().call_later(0.2, ready.set_result, None)
        reference = FakeActor(ready=lambda: ready)
        learner = asyncio.create_task(asyncio.sleep(0.001))
        await asyncio.wait_for(launch._started_alone(placed, "app", learner, reference), 20)


async def test_a_run_without_room_for_any_generator_has_lost_its_placement(replicas_seen):
    ended = []

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("work")

    stations = replicas_seen((0, 1, False), (0, 1, True))
    with pytest.raises(
        PartDiedError,
        match=(
            r"no generator replica has had room for placement_timeout_s = 0\.05 s, and none is"
            r" left; add nodes.*\nthe table"
        ),
    ):
        await stations.while_placed(work())
    assert ended == ["work"]


async def test_another_actor_without_room_has_lost_its_placement(replicas_seen):
    """The node of the reference policy is gone, so scoring would wait forever."""

    async def work():
        await asyncio.Event().wait()

    stations = replicas_seen((1, ["ServeReplica:app:Generator", "Reference"], True))
    with pytest.raises(
        PartDiedError,
        match=(
            r"^Reference of this run has had no room for placement_timeout_s = 0\.05 s; add"
            r" nodes\nthe table"
        ),
    ):
        await asyncio.wait_for(stations.while_placed(work()), 20)


@pytest.mark.parametrize(
    "look",
    [(1, 1, True), (0, 1, False), (0, 0, True)],
    ids=["one is left", "one is being started", "Serve asks for none yet"],
)
async def test_slow_generators_do_not_end_the_attempt(replicas_seen, look):
    async def work():
        await asyncio.sleep(0.2)  # four times the placement timeout

    await replicas_seen(look).while_placed(work())


async def test_an_unavailable_control_service_does_not_end_the_attempt(replicas_seen, monkeypatch):
    stations, looks = replicas_seen((0, 1, True)), []

    def away(config):
        looks.append(config)
        raise RpcError("GCS is away")

    monkeypatch.setattr(placement, "_unmet_demand", away)

    async def work():
        while len(looks) < 20:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    await asyncio.wait_for(stations.while_placed(work()), 20)


async def test_an_error_and_a_cancellation_of_the_work_pass_through(replicas_seen):
    async def fails():
        raise RuntimeError("the work's own")

    with pytest.raises(RuntimeError, match="the work's own"):
        await replicas_seen((1, 0, False)).while_placed(fails())

    started_work, ended = asyncio.Event(), []

    async def work():
        started_work.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    task = asyncio.create_task(replicas_seen((1, 0, False)).while_placed(work()))
    await started_work.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]
