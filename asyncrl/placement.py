"""Room on the cluster: what a run needs, what is registered, what is free."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import ray

from asyncrl.config import Config
from asyncrl.plan import logical_cpus

__all__ = ["PlacementError", "needed", "table", "wait_for_room"]


class PlacementError(RuntimeError):
    """The cluster has no room for a part. The message holds the table."""


def needed(config: Config) -> dict[str, float]:
    """Logical resources of the whole run."""
    gpus = (config.learner.world_size if config.learner.device == "cuda" else 0) + (config.generator.num_replicas if config.generator.device == "cuda" else 0)
    cpus = sum(part.count * part.cpus for part in logical_cpus(config))
    return {"CPU": cpus} | ({"GPU": float(gpus)} if gpus else {})


def table(wanted: Mapping[str, float]) -> str:
    """Needed, registered and free, a line per resource; nodes behind it."""
    registered, free = ray.cluster_resources(), ray.available_resources()
    rows = [f"  {name:<5} needed {amount:g}, registered {registered.get(name, 0):g}, free {free.get(name, 0):g}" for name, amount in wanted.items()]
    nodes = [
        f"  node {node['NodeManagerAddress']}: {node['Resources'].get('CPU', 0):g} CPU, {node['Resources'].get('GPU', 0):g} GPU"
        for node in ray.nodes()
        if node["Alive"]
    ]
    return "\n".join([*rows, *nodes])


async def wait_for_room(config: Config) -> None:
    """Return when the run's parts can all be placed.

    Raises:
        PlacementError: the cluster is too small (at once), or not free after `placement_timeout_s`.
    """
    wanted = needed(config)
    short = [name for name, amount in wanted.items() if ray.cluster_resources().get(name, 0) < amount]
    if short:
        raise PlacementError(
            f"the cluster can never hold this run ({', '.join(short)} short); lower generator.num_replicas or learner.world_size\n{table(wanted)}"
        )
    deadline = asyncio.get_running_loop().time() + config.placement_timeout_s
    while any(ray.available_resources().get(name, 0) < amount for name, amount in wanted.items()):
        if asyncio.get_running_loop().time() > deadline:
            raise PlacementError(
                f"no room on the cluster after placement_timeout_s = {config.placement_timeout_s:g}; free some, or wait longer\n{table(wanted)}"
            )
        await asyncio.sleep(0.5)
