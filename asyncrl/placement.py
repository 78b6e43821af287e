"""Room on the cluster for a whole run: what it needs, what is registered, what is free."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import ray
from ray._private.state import actors
from ray.autoscaler.v2.sdk import get_cluster_status

from asyncrl.config import Config
from asyncrl.learning.group import PlacementError, resource_table
from asyncrl.plan import logical_cpus

__all__ = ["needed", "wait_for_placement", "wait_for_room"]

LOOK_EVERY_S = 0.5


def needed(config: Config) -> dict[str, float]:
    """Logical resources of the whole run."""
    learner, generator = config.learner, config.generator
    ranks = learner.world_size + config.algorithm.has_reference
    gpus = ranks * (learner.device == "cuda") + generator.num_replicas * (generator.device == "cuda")
    cpus = sum(part.count * part.cpus for part in logical_cpus(config))
    return {"CPU": cpus} | ({"GPU": float(gpus)} if gpus else {})


async def wait_for_room(config: Config) -> None:
    """Return when the run's parts can all be placed.

    Raises:
        PlacementError: the cluster is too small (at once), or not free after `placement_timeout_s`.
    """
    wanted, limit = needed(config), config.placement_timeout_s
    short = [name for name, amount in wanted.items() if ray.cluster_resources().get(name, 0) < amount]
    if short:
        fix = "lower generator.num_replicas, learner.world_size or their num_cpus, or add nodes"
        raise PlacementError(f"the cluster is too small for this run ({', '.join(short)}); {fix}\n{resource_table(wanted)}")
    deadline = asyncio.get_running_loop().time() + limit
    while any(ray.available_resources().get(name, 0) < amount for name, amount in wanted.items()):
        if asyncio.get_running_loop().time() > deadline:
            raise PlacementError(f"no room on the cluster after placement_timeout_s = {limit:g} s; free some, or wait longer\n{resource_table(wanted)}")
        await asyncio.sleep(LOOK_EVERY_S)


async def wait_for_placement(config: Config, application: str, streams: Mapping[str, Callable[[], Awaitable[bool]]]) -> None:
    """Return when every generator replica of the Serve application and every actor of this job has a process, and every stream has begun: someone
    else may have taken the room that `wait_for_room` saw. An actor whose constructor runs is placed; so is a part whose process is being started.

    Args:
        streams: by name, whether the stream's task runs.

    Raises:
        PlacementError: a part still waits for resources after `placement_timeout_s`.
    """
    limit = config.placement_timeout_s
    deadline = asyncio.get_running_loop().time() + limit
    while True:
        replicas, waiting = _survey(f"SERVE_REPLICA::{application}#")
        if replicas >= config.generator.num_replicas and not waiting:
            # Asked last: a stream's answer may need an actor that has a process.
            waiting = [name for name, begun in streams.items() if not await begun()]
            if not waiting:
                return
        if waiting and asyncio.get_running_loop().time() > deadline and _unmet_demand(config):
            raise PlacementError(
                f"{', '.join(sorted(waiting))} not placed within placement_timeout_s = {limit:g} s; free or add resources, or lower "
                f"generator.num_replicas or generator.num_cpus\n{resource_table(needed(config))}"
            )
        await asyncio.sleep(LOOK_EVERY_S)


def _survey(prefix: str) -> tuple[int, list[str]]:
    """Placed replicas, by the prefix of their names, and the class names of actors of the run that have no process yet. Ray Data's own actors, whose
    names begin with _, need no resources."""
    job = ray.get_runtime_context().get_job_id()
    ours = [actor for actor in actors().values() if actor["State"] != "DEAD" and (actor["Name"].startswith(prefix) or actor["JobID"] == job)]
    waiting = [actor["ActorClassName"] for actor in ours if actor["State"] != "ALIVE" and not actor["Pid"] and actor["ActorClassName"][0] != "_"]
    return sum(actor["Name"].startswith(prefix) and bool(actor["Pid"]) for actor in ours), waiting


def _unmet_demand(config: Config) -> bool:
    """Whether a task or actor with the CPUs of one of ours waits for resources, rather than for its process to start."""
    ours = {round(part.cpus, 4) for part in logical_cpus(config)}
    demands = get_cluster_status(ray.get_runtime_context().gcs_address).resource_demands.ray_task_actor_demand
    return any(round(shape.bundle.get("CPU", 0), 4) in ours for demand in demands for shape in demand.bundles_by_count)
