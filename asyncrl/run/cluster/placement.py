"""Room for a run on the live cluster: checked before the start, waited for, and watched during the
run."""

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

import ray
from ray._private.state import actors, available_resources_per_node
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl.config import Config, ConfigError, RunSettings
from asyncrl.contracts.errors import PlacementError, PlacementLostError
from asyncrl.learning.driver import resource_table
from asyncrl.preflight.model_snapshot import Snapshot, difference, in_cache, look, read_snapshot
from asyncrl.preflight.resources.needs import (
    Amounts,
    ClusterNode,
    cluster_text,
    logical_cpus,
    placement_text,
    run_needs,
    shortages,
    with_fewer_replicas,
)
from asyncrl.run.cluster.cluster_address import answering_cluster, without_uv
from asyncrl.run.cluster.resource_usage import users_by_node
from asyncrl.runtime.processes.environment import passed_on
from asyncrl.runtime.ray.shutdown import shut_down_ray
from asyncrl.runtime.redact import print_shown
from asyncrl.sandbox.machine import usable_memory

logger = logging.getLogger("asyncrl")

LOOK_EVERY_S = 0.5
TELL_EVERY_S = 5.0
GIVEN_BACK_S = 5.0
"""Seconds until Ray reports the resources of a removed placement group as free."""
GENERATORS_EVERY_S = 5.0
REPLICA = "ServeReplica"
"""Prefix of the class names of Serve replicas."""
MACHINE_S = 20.0
"""Seconds in which another node must report its memory."""
LOOK_S = 120.0
"""Seconds in which another node must read a model's small files. Downloads from the hub have no
limit."""


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
    """Wait until the cluster has room for every part of the run.

    While a cluster that may grow lacks room, Ray's autoscaler sees what the run needs.

    Args:
        version_bytes: bytes of one published version; 0 = memory is not checked.
        tell: called with a line of progress while this waits.

    Returns:
        The config with as many replicas as have room, and the table of the cluster.

    Raises:
        PlacementError: no room for `generator.min_replicas` after `placement_timeout_s`. Raised at
            once on a cluster that this process started, since no node joins it. The message ends
            with the table.
    """
    limit, clock = config.placement_wait_s, asyncio.get_running_loop().time
    demand: _Demand | None = None
    # Each decision belongs to the time of the look that it rests on, however long it takes.
    looked = settled = clock()
    deadline, last_told = looked + limit, looked - TELL_EVERY_S
    nodes = await asyncio.to_thread(cluster_nodes, bool(version_bytes))
    try:
        while True:
            wanted = run_needs(config, version_bytes)
            never = shortages(wanted, nodes, "registered")
            short = never or shortages(wanted, nodes, "free")
            if not short:
                return config, await _tables(config, version_bytes, nodes)
            # Some of several groups may hold resources that fewer replicas can use.
            given_up = looked >= deadline and config.engines.nnodes > 1
            if demand is not None and (given_up or await asyncio.to_thread(demand.placed)):
                demand.remove()
                demand, settled = None, clock() + GIVEN_BACK_S
            late = looked >= max(deadline, settled)
            if late or (never and own_cluster()):
                which: Amounts = "free" if late else "registered"
                fewer = with_fewer_replicas(config, version_bytes, nodes, which)
                if fewer is None:
                    tables = await _tables(config, version_bytes, nodes)
                    raise PlacementError(f"{_refusal(limit, never, short, late)}\n{tables}")
                tell(_reduced_text(config, fewer, short[0]))
                config = fewer
                continue
            may_grow = settled <= looked < deadline and not own_cluster()
            if demand is None and may_grow and shortages(run_needs(config), nodes, "free"):
                demand = _Demand(config)
            if looked - last_told >= TELL_EVERY_S:
                last_told = looked
                tell(await _waiting_text(max(0.0, deadline - looked), short[0]))
            await asyncio.sleep(LOOK_EVERY_S)
            looked = clock()
            nodes = await asyncio.to_thread(cluster_nodes, bool(version_bytes))
    finally:
        if demand is not None:
            demand.remove()


def _reduced_text(config: Config, fewer: Config, short: str) -> str:
    return (
        f"only {fewer.engines.num_replicas} of generator.num_replicas ="
        f" {config.engines.num_replicas} have room: {short}"
    )


async def _waiting_text(left_s: float, short: str) -> str:
    users = await asyncio.to_thread(_largest_users)
    return f"waiting up to {left_s:.0f} s for room on the cluster: {short}{users}"


def _refusal(limit: float, never: list[str], short: list[str], late: bool) -> str:
    if not never:
        return (
            f"no room on the cluster after placement_timeout_s = {limit:g} s ({'; '.join(short)});"
            " free some, or raise placement_timeout_s"
        )
    waited = f" after placement_timeout_s = {limit:g} s" if late else ""
    nnodes = any("of an engine on different ones" in line for line in never)
    fix = (
        f"lower generator.num_replicas, {'generator.nnodes, ' if nnodes else ''}"
        "generator.tensor_parallel_size, learner.world_size or their num_cpus, or add nodes"
    )
    if any("object store" in line for line in never):
        fix += "; start Ray with a larger --object-store-memory"
    if any(line.startswith("GPU:") for line in never):
        fix += "; without GPUs, set learner.device and generator.device to cpu"
    return f"the cluster is too small for this run{waited} ({'; '.join(never)}); {fix}"


def own_cluster() -> bool:
    """Whether this process started the cluster. Such a cluster ends with the process, and no node
    joins it."""
    node: Any = ray._private.worker._global_node
    return bool(node.is_head())


class _Demand:
    """The run's resources as pending placement groups, for which Ray's autoscaler adds nodes.
    An engine of several nodes has a group of its own, and all other parts have one.

    It counts in addition to what others use, and it ends with this job.
    `ray.autoscaler.sdk.request_resources` would overwrite the requests of other jobs and outlive
    this one.
    """

    def __init__(self, config: Config) -> None:
        packed, spread = [], []
        for need in run_needs(config):
            bundle = {name: amount for name, amount in need.amounts.items() if amount}
            if need.apart > 1:
                spread += [[bundle] * need.apart] * (need.count // need.apart)
            elif bundle:
                packed += [bundle] * need.count
        self._groups = [
            placement_group(packed, strategy="PACK"),
            *(placement_group(engine, strategy="STRICT_SPREAD") for engine in spread),
        ]

    def placed(self) -> bool:
        """Whether all groups are placed. They then occupy their resources until they are
        removed."""
        return all(placement_group_table(group)["state"] == "CREATED" for group in self._groups)

    def remove(self) -> None:
        """Free the resources for the parts of the run."""
        for group in self._groups:
            remove_placement_group(group)


async def check_models(config: RunSettings) -> None:
    """Compare the models on every other node that has CPUs or GPUs, before any part of the run is
    placed there.

    Each node reads the same directory, or downloads the same commit from the hub to the same path.

    Raises:
        ConfigError: a node cannot read a model, or has a different one.
    """
    here = ray.get_runtime_context().get_node_id()
    able = [
        node
        for node in ray.nodes()
        if node["Alive"] and (node["Resources"].get("CPU") or node["Resources"].get("GPU"))
    ]
    others = {node["NodeID"]: node["NodeManagerAddress"] for node in able if node["NodeID"] != here}
    for field, path in config.models.items():
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
        return f"cannot be checked ({str(error).strip().splitlines()[-1]})"


def plan_on_cluster(config: Config, version_bytes: int) -> int:
    """`asyncrl plan --cluster`: print the table of the cluster at RAY_ADDRESS, or of the one on
    this machine, and what `train` would do.

    Returns:
        The exit code: 1 if the run does not fit the registered resources.

    Raises:
        ConfigError: no cluster answers.
    """
    with _connected():
        wanted, nodes = run_needs(config, version_bytes), cluster_nodes(True)
        print_shown(asyncio.run(_tables(config, version_bytes, nodes)))
    if short := shortages(wanted, nodes, "registered"):
        fewer = with_fewer_replicas(config, version_bytes, nodes, "registered")
        start = (
            f", and then start with generator.num_replicas = {fewer.engines.num_replicas}"
            if fewer
            else ""
        )
        wait = (
            f"`asyncrl train` would wait placement_timeout_s = {config.placement_wait_s:g} s for"
            f" more nodes{start}"
        )
        print_shown(f"  this run does not fit here: {'; '.join(short)}; {wait}")
        return 0 if fewer else 1
    short = shortages(wanted, nodes, "free")
    wait = (
        f"  this run does not fit now: {'; '.join(short)}; `asyncrl train` would wait up to"
        f" placement_timeout_s = {config.placement_wait_s:g} s"
    )
    print_shown(wait if short else "  this run fits now")
    return 0


@contextmanager
def _connected() -> Iterator[None]:
    without_uv()
    ray.init(address=answering_cluster("auto"), log_to_driver=False, configure_logging=False)
    try:
        yield
    finally:
        shut_down_ray()


async def _tables(config: Config, version_bytes: int, nodes: list[ClusterNode]) -> str:
    """slime's arithmetic and the table of the cluster, with the users of its resources."""
    users, unknown = await asyncio.to_thread(users_by_node)
    known = [replace(node, users=users.get(node.name, ())) for node in nodes]
    return (
        placement_text(config, nodes)
        + "\n\n"
        + cluster_text(run_needs(config, version_bytes), known, unknown)
    )


def _largest_users() -> str:
    found = [user.name for users in users_by_node()[0].values() for user in users[:2]]
    return f"; used by {', '.join(found[:3])}" if found else ""


def cluster_nodes(with_memory: bool) -> list[ClusterNode]:
    """The live nodes with their registered and free resources.

    Args:
        with_memory: also ask each node for its memory and shared memory. A node that does not
            answer within MACHINE_S seconds has no such entries.
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
            ClusterNode(
                f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})",
                registered | total,
                available | left,
            )
        )
    return nodes


def _machine() -> tuple[dict[str, float], dict[str, float]]:
    """(Total, free) bytes of memory and shared memory of this machine."""
    (total, available), shared = usable_memory(), shutil.disk_usage("/dev/shm")
    return {"memory": total, "shared memory": shared.total}, {
        "memory": available,
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
            continue  # same as a node that does not answer
    return machines


async def wait_for_placement(
    config: Config, application: str, streams: Mapping[str, Callable[[], Awaitable[bool]]]
) -> None:
    """Wait until every generator replica and every actor of this job has a process, and every
    stream has started.

    Other jobs may have taken the room that `wait_for_resources` saw. An actor counts as placed
    while its constructor runs; so does a part whose process is starting.

    Args:
        application: the Serve application of the generators.
        streams: name → whether the stream's task runs.

    Raises:
        PlacementLostError: a part still waits for resources after `placement_timeout_s`.
    """
    deadline = asyncio.get_running_loop().time() + config.placement_wait_s
    while True:
        replicas, waiting = _survey(f"SERVE_REPLICA::{application}#")
        if replicas >= config.engines.num_replicas and not waiting:
            # Last, because a stream's answer may need an actor that has a process.
            waiting = [name for name, started in streams.items() if not await started()]
            if not waiting:
                return
        if waiting and asyncio.get_running_loop().time() > deadline and _unmet_demand(config):
            raise _not_placed(config, waiting)
        await asyncio.sleep(LOOK_EVERY_S)


async def wait_for_actors(config: Config, application: str, started: Callable[[], bool]) -> None:
    """Wait until `started`, as long as every actor of this job except its generators gets room.

    Raises:
        PlacementLostError: an actor still waits for resources after `placement_timeout_s`.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + config.placement_wait_s
    while not started():
        _, waiting = _survey(f"SERVE_REPLICA::{application}#")
        others = [name for name in waiting if not name.startswith(REPLICA)]
        if others and clock() > deadline and _unmet_demand(config):
            raise _not_placed(config, others)
        await asyncio.sleep(LOOK_EVERY_S)


def _not_placed(config: Config, waiting: list[str]) -> PlacementLostError:
    return PlacementLostError(
        f"{', '.join(sorted(waiting))} not placed within placement_timeout_s ="
        f" {config.placement_wait_s:g} s; free or add resources, or lower generator.num_replicas,"
        " generator.tensor_parallel_size or generator.num_cpus"
        f"\n{resource_table(needed(config))}"
    )


async def generators_lost(config: Config, application: str) -> None:
    """Watch the run's generators and other actors until one of them stays without room.

    Raises PlacementLostError after all generators, or another actor of the run, have had no process
    and no room for `placement_timeout_s`: their nodes are gone. The run continues with a single
    replica while Serve waits for room for the others. Errors of Ray's state queries do not count as
    a loss.
    """
    limit, clock = config.placement_wait_s, asyncio.get_running_loop().time
    placed = clock()
    while True:
        try:
            replicas, waiting = await asyncio.to_thread(_survey, f"SERVE_REPLICA::{application}#")
            others = sorted({name for name in waiting if not name.startswith(REPLICA)})
            has_room = (
                not waiting
                or bool(replicas and not others)
                or not await asyncio.to_thread(_unmet_demand, config)
            )
        # Ray's control service may be away for a while, and its functions raise no narrower class.
        except Exception as error:
            logger.warning(
                "Ray does not report whether the run's parts have room: %s: %s",
                type(error).__name__,
                error,
            )
            has_room = True
        if has_room:
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
    """(Placed replicas, by the prefix of their names; class names of the run's actors without a
    process). Ray Data's own actors, whose names start with _, need no resources."""
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
    """Whether something with the CPUs of one of our parts waits for resources: a task, an actor, or
    an engine of several nodes. One that waits for its process to start does not count."""
    ours = {round(part.cpus, 4) for part in logical_cpus(config)}
    demands = get_cluster_status(ray.get_runtime_context().gcs_address).resource_demands
    groups = demands.placement_group_demand if config.engines.nnodes > 1 else []
    return any(
        round(shape.bundle.get("CPU", 0), 4) in ours
        for demand in (*demands.ray_task_actor_demand, *groups)
        for shape in demand.bundles_by_count
    )
