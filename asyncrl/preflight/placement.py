"""Room on the live cluster for a whole run: looked for before anything starts, waited for where
others hold it, and again when it is lost meanwhile."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private.state import actors, available_resources_per_node
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl.config import Config, ConfigError
from asyncrl.contracts.errors import PlacementError, PlacementLostError
from asyncrl.learning.group import resource_table
from asyncrl.preflight.cluster_address import answering_cluster
from asyncrl.preflight.model_snapshot import Snapshot, difference, in_cache, look, read_snapshot
from asyncrl.preflight.resource_usage import users_by_node
from asyncrl.preflight.resources import (
    Node,
    cluster_text,
    logical_cpus,
    placement_text,
    run_needs,
    shortages,
    with_fewer_replicas,
)
from asyncrl.runtime.environment import passed_on
from asyncrl.runtime.redact import print_shown

__all__ = [
    "check_models",
    "cluster_nodes",
    "generators_lost",
    "needed",
    "own_cluster",
    "plan_on_cluster",
    "wait_for_placement",
    "wait_for_resources",
]

logger = logging.getLogger("asyncrl")

LOOK_EVERY_S = 0.5
TELL_EVERY_S = 5.0
GIVEN_BACK_S = 5.0
"""Seconds in which Ray shows what a placement group held as free."""
GENERATORS_EVERY_S = 5.0
REPLICA = "ServeReplica"
"""How the class names of Serve's replicas begin."""
MACHINE_S = 20.0
"""Seconds that another node gets to say how much memory it has."""
LOOK_S = 120.0
"""Seconds that another node gets to read a model's small files; fetching one from the hub takes as
long as it takes."""


def needed(config: Config) -> dict[str, float]:
    """Logical resources of the whole run."""
    amounts = {
        name: sum(need.count * need.amounts.get(name, 0) for need in run_needs(config))
        for name in ("CPU", "GPU")
    }
    return {name: amount for name, amount in amounts.items() if amount or name == "CPU"}


async def wait_for_resources(
    config: Config, version_bytes: int = 0, tell: Callable[[str], None] = lambda line: None
) -> tuple[Config, str]:
    """Return the config with the replicas that have room, and the cluster's table, when nothing
    speaks against the run's parts being placed. While it waits on a cluster that may grow, Ray's
    autoscaler sees what is needed.

    Args:
        version_bytes: bytes of one published version; 0 = memory is not looked at.
        tell: gets a line while room is waited for.

    Raises:
        PlacementError: no room for `generator.min_replicas` after `placement_timeout_s`, or at once
            on a cluster of this process's own, which no node joins. The message ends with the
            table.
    """
    limit, clock = config.placement_wait_s, asyncio.get_running_loop().time
    demand: _Demand | None = None
    nodes = await asyncio.to_thread(cluster_nodes, bool(version_bytes))
    deadline, given_back, told = clock() + limit, clock(), clock() - TELL_EVERY_S
    try:
        while True:
            wanted = run_needs(config, version_bytes)
            never = shortages(wanted, nodes, "registered")
            short = never or shortages(wanted, nodes, "free")
            if not short:
                return config, await _tables(config, version_bytes, nodes)
            if demand is not None and await asyncio.to_thread(demand.placed):
                demand.remove()
                demand, given_back = None, clock() + GIVEN_BACK_S
            late = clock() > max(deadline, given_back)
            if late or (never and own_cluster()):
                fewer = with_fewer_replicas(
                    config, version_bytes, nodes, "free" if late else "registered"
                )
                if fewer is None:
                    refusal = _refusal(limit, never, short, late)
                    raise PlacementError(
                        f"{refusal}\n{await _tables(config, version_bytes, nodes)}"
                    )
                tell(
                    f"only {fewer.generator.num_replicas} of generator.num_replicas ="
                    f" {config.generator.num_replicas} have room: {short[0]}"
                )
                config = fewer
                continue
            if (
                demand is None
                and given_back < clock() < deadline
                and not own_cluster()
                and shortages(run_needs(config), nodes, "free")
            ):
                demand = _Demand(config)
            if clock() - told >= TELL_EVERY_S:
                told = clock()
                tell(
                    f"waiting up to {deadline - told:.0f} s for room on the cluster:"
                    f" {short[0]}{await asyncio.to_thread(_largest_users)}"
                )
            await asyncio.sleep(LOOK_EVERY_S)
            nodes = await asyncio.to_thread(cluster_nodes, bool(version_bytes))
    finally:
        if demand is not None:
            demand.remove()


def _refusal(limit: float, never: list[str], short: list[str], late: bool) -> str:
    if not never:
        return (
            f"no room on the cluster after placement_timeout_s = {limit:g} s ({'; '.join(short)});"
            " free some, or wait longer"
        )
    waited = f" after placement_timeout_s = {limit:g} s" if late else ""
    fix = "lower generator.num_replicas, learner.world_size or their num_cpus, or add nodes"
    fix += (
        "; start Ray with a larger --object-store-memory"
        if any("object store" in line for line in never)
        else ""
    )
    fix += (
        "; without GPUs, set learner.device and generator.device to cpu"
        if any(line.startswith("GPU:") for line in never)
        else ""
    )
    return f"the cluster is too small for this run{waited} ({'; '.join(never)}); {fix}"


def own_cluster() -> bool:
    """Whether this process started the cluster: it ends with this process, and no node joins it."""
    node: Any = ray._private.worker._global_node
    return bool(node.is_head())


class _Demand:
    """What the run declares to Ray, as a placement group that waits: Ray's autoscaler adds nodes
    for it, beside what others use. It ends with this job, where
    `ray.autoscaler.sdk.request_resources` would overwrite other jobs' requests and outlive ours.
    """

    def __init__(self, config: Config) -> None:
        amounts = [
            ({name: amount for name, amount in need.amounts.items() if amount}, need.count)
            for need in run_needs(config)
        ]
        self._group = placement_group(
            [bundle for bundle, count in amounts if bundle for _ in range(count)], strategy="PACK"
        )

    def placed(self) -> bool:
        """Whether all of it has a place, which it holds until it is removed."""
        return bool(placement_group_table(self._group)["state"] == "CREATED")

    def remove(self) -> None:
        """Give the place to the run's parts."""
        remove_placement_group(self._group)


async def check_models(config: Config) -> None:
    """Have every other node that has CPUs or GPUs look at the models, before any part of the run is
    placed there: it reads the same directory, or fetches the same commit of the hub into the same
    place.

    Raises:
        ConfigError: a node cannot read one, or reads another.
    """
    here = ray.get_runtime_context().get_node_id()
    able = [
        node
        for node in ray.nodes()
        if node["Alive"] and (node["Resources"].get("CPU") or node["Resources"].get("GPU"))
    ]
    others = {node["NodeID"]: node["NodeManagerAddress"] for node in able if node["NodeID"] != here}
    models = {"model.path": config.model.path} | (
        {"algorithm.ref_load": config.reference_path} if config.algorithm.has_reference else {}
    )
    for field, path in models.items():
        expected = await asyncio.to_thread(read_snapshot, Path(path))
        answers = await asyncio.gather(*(_look_at(path, node) for node in others))
        for address, found in zip(others.values(), answers, strict=True):
            if found != expected:
                raise ConfigError(
                    f"{field} = {path!r} {difference(found, expected)} on node {address}; put the"
                    " same model at this path of every node, or on shared storage"
                )


async def _look_at(path: str, node: str) -> Snapshot | str:
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    task = ray.remote(look).options(
        num_cpus=0,
        max_retries=0,
        scheduling_strategy=strategy,
        runtime_env={"env_vars": passed_on(os.environ)},
    )
    limit = None if in_cache(path) else LOOK_S
    try:
        return await asyncio.wait_for(task.remote(path), limit)
    except TimeoutError:
        return f"was not read within {LOOK_S:g} s"
    except ray.exceptions.RayError as error:
        return f"cannot be looked at ({str(error).strip().splitlines()[-1]})"


def plan_on_cluster(config: Config, version_bytes: int) -> int:
    """`asyncrl plan --cluster`: print the table of the cluster that RAY_ADDRESS names, or that runs
    here, and what `train` would do. Exit code: 1 if the run does not fit into what is registered.

    Raises:
        ConfigError: no cluster answers.
    """
    with _connected():
        wanted, nodes = run_needs(config, version_bytes), cluster_nodes(True)
        print_shown(asyncio.run(_tables(config, version_bytes, nodes)))
    if short := shortages(wanted, nodes, "registered"):
        fewer = with_fewer_replicas(config, version_bytes, nodes, "registered")
        begin = (
            f", and then begin with generator.num_replicas = {fewer.generator.num_replicas}"
            if fewer
            else ""
        )
        wait = (
            f"`asyncrl train` would wait placement_timeout_s = {config.placement_wait_s:g} s for"
            f" more nodes{begin}"
        )
        print_shown(f"  this run does not fit here: {'; '.join(short)}; {wait}")
        return 0 if fewer else 1
    short = shortages(wanted, nodes, "free")
    wait = (
        f"  not now: {'; '.join(short)}; `asyncrl train` would wait up to placement_timeout_s ="
        f" {config.placement_wait_s:g} s"
    )
    print_shown(wait if short else "  nothing speaks against placing this run now")
    return 0


@contextmanager
def _connected() -> Iterator[None]:
    ray.init(address=answering_cluster("auto"), log_to_driver=False, configure_logging=False)
    try:
        yield
    finally:
        ray.shutdown()


async def _tables(config: Config, version_bytes: int, nodes: list[Node]) -> str:
    """slime's arithmetic and the cluster's table, with who holds what."""
    held, unknown = await asyncio.to_thread(users_by_node)
    known = [replace(node, users=held.get(node.name, ())) for node in nodes]
    return (
        placement_text(config, nodes)
        + "\n\n"
        + cluster_text(run_needs(config, version_bytes), known, unknown)
    )


def _largest_users() -> str:
    found = [holder.name for users in users_by_node()[0].values() for holder in users[:2]]
    return f"; held by {', '.join(found[:3])}" if found else ""


def cluster_nodes(with_memory: bool) -> list[Node]:
    """The nodes that live, by what they have registered and free.

    Args:
        with_memory: ask each for its memory and shared memory as well; one that does not answer in
            MACHINE_S seconds is left without.
    """
    here = ray.get_runtime_context().get_node_id()
    free = available_resources_per_node()
    alive = [node for node in ray.nodes() if node["Alive"]]
    machines = (
        _machines([node["NodeID"] for node in alive if node["NodeID"] != here])
        if with_memory
        else {}
    )
    if with_memory:
        machines[here] = _machine()
    nodes = []
    for node in alive:
        total, left = machines.get(node["NodeID"], ({}, {}))
        registered = {name: node["Resources"].get(name, 0.0) for name in ("CPU", "GPU")}
        available = {name: free.get(node["NodeID"], {}).get(name, 0.0) for name in ("CPU", "GPU")}
        if "object_store_memory" in node["Resources"]:
            registered["object store"] = node["Resources"]["object_store_memory"]
            available["object store"] = free.get(node["NodeID"], {}).get(
                "object_store_memory", registered["object store"]
            )
        nodes.append(
            Node(
                f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})",
                registered | total,
                available | left,
            )
        )
    return nodes


def _machine() -> tuple[dict[str, float], dict[str, float]]:
    """Bytes of memory and shared memory of this machine: in all, and free."""
    memory, shared = psutil.virtual_memory(), shutil.disk_usage("/dev/shm")
    return {"memory": memory.total, "shared memory": shared.total}, {
        "memory": memory.available,
        "shared memory": shared.free,
    }


def _machines(node_ids: list[str]) -> dict[str, tuple[dict[str, float], dict[str, float]]]:
    ask = ray.remote(_machine)
    calls = {
        ask.options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        ).remote(): node_id
        for node_id in node_ids
    }
    answered = ray.wait(list(calls), num_returns=len(calls), timeout=MACHINE_S)[0] if calls else []
    machines = {}
    for call in answered:
        try:
            machines[calls[call]] = ray.get(call)
        except ray.exceptions.RayError:
            continue  # as one that does not answer
    return machines


async def wait_for_placement(
    config: Config, application: str, streams: Mapping[str, Callable[[], Awaitable[bool]]]
) -> None:
    """Return when every generator replica of the Serve application and every actor of this job has
    a process, and every stream has begun: someone else may have taken the room that
    `wait_for_resources` saw. An actor whose constructor runs is placed; so is a part whose process
    is being started.

    Args:
        streams: by name, whether the stream's task runs.

    Raises:
        PlacementLostError: a part still waits for resources after `placement_timeout_s`.
    """
    limit = config.placement_wait_s
    deadline = asyncio.get_running_loop().time() + limit
    while True:
        replicas, waiting = _survey(f"SERVE_REPLICA::{application}#")
        if replicas >= config.generator.num_replicas and not waiting:
            # Asked last: a stream's answer may need an actor that has a process.
            waiting = [name for name, begun in streams.items() if not await begun()]
            if not waiting:
                return
        if waiting and asyncio.get_running_loop().time() > deadline and _unmet_demand(config):
            raise PlacementLostError(
                f"{', '.join(sorted(waiting))} not placed within placement_timeout_s = {limit:g} s;"
                " free or add resources, or lower generator.num_replicas or"
                f" generator.num_cpus\n{resource_table(needed(config))}"
            )
        await asyncio.sleep(LOOK_EVERY_S)


async def generators_lost(config: Config, application: str) -> None:
    """Raise PlacementLostError once all generators of the run, or another actor of it, have had no
    process and no room for one, for as long as a part may wait. Else go on for ever.

    Their nodes are gone then. As long as one replica runs, the run goes on with it, while Serve
    waits for room for the others. What Ray does not say is no loss.
    """
    limit, clock = config.placement_wait_s, asyncio.get_running_loop().time
    placed = clock()
    while True:
        try:
            replicas, waiting = await asyncio.to_thread(_survey, f"SERVE_REPLICA::{application}#")
            others = sorted({name for name in waiting if not name.startswith(REPLICA)})
            there = (
                not waiting
                or bool(replicas and not others)
                or not await asyncio.to_thread(_unmet_demand, config)
            )
        # Ray's control service may be away for a while, and its functions raise no narrower class
        except Exception as error:
            logger.warning(
                "nobody says whether the run's parts have room: %s: %s", type(error).__name__, error
            )
            there = True
        if there:
            placed = clock()
        elif clock() - placed > limit:
            table = resource_table(needed(config))
            if replicas:
                raise PlacementLostError(
                    f"{', '.join(others)} of this run has had no room for placement_timeout_s ="
                    f" {limit:g} s; add nodes\n{table}"
                )
            raise PlacementLostError(
                f"no generator replica has had room for placement_timeout_s = {limit:g} s, and none"
                f" is left; add nodes, or lower generator.num_cpus\n{table}"
            )
        await asyncio.sleep(GENERATORS_EVERY_S)


def _survey(prefix: str) -> tuple[int, list[str]]:
    """Placed replicas, by the prefix of their names, and the class names of actors of the run that
    have no process yet. Ray Data's own actors, whose names begin with _, need no resources."""
    job = ray.get_runtime_context().get_job_id()
    ours = [
        actor
        for actor in actors().values()
        if actor["State"] != "DEAD" and (actor["Name"].startswith(prefix) or actor["JobID"] == job)
    ]
    waiting = [
        actor["ActorClassName"]
        for actor in ours
        if actor["State"] != "ALIVE" and not actor["Pid"] and actor["ActorClassName"][0] != "_"
    ]
    return sum(actor["Name"].startswith(prefix) and bool(actor["Pid"]) for actor in ours), waiting


def _unmet_demand(config: Config) -> bool:
    """Whether a task or actor with the CPUs of one of ours waits for resources, rather than for its
    process to start."""
    ours = {round(part.cpus, 4) for part in logical_cpus(config)}
    demands = get_cluster_status(
        ray.get_runtime_context().gcs_address
    ).resource_demands.ray_task_actor_demand
    return any(
        round(shape.bundle.get("CPU", 0), 4) in ours
        for demand in demands
        for shape in demand.bundles_by_count
    )
