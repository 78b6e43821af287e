"""Room on the cluster for a whole run: what it needs, what is registered, what is free."""

from __future__ import annotations

import asyncio

import ray

from asyncrl.config import Config
from asyncrl.learning.group import PlacementError, resource_table
from asyncrl.plan import logical_cpus

__all__ = ["needed", "wait_for_room"]


def needed(config: Config) -> dict[str, float]:
    """Logical resources of the whole run."""
    learner, generator = config.learner, config.generator
    gpus = learner.world_size * (learner.device == "cuda") + generator.num_replicas * (generator.device == "cuda")
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
        await asyncio.sleep(0.5)
