"""The users of a cluster's resources: actors, placement groups and running tasks, from Ray's public
state API."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TypedDict

import ray
from ray._private.worker import get_dashboard_url
from ray.util.state import list_actors, list_nodes, list_placement_groups, list_tasks
from ray.util.state.common import ActorState, PlacementGroupState, TaskState

from asyncrl.preflight.resources.needs import ResourceUser

SHOWN = ("CPU", "GPU")
LIST_TIMEOUT_S = 10
MOST = 1000
REPLICA = "SERVE_REPLICA::"


class _ListOptions(TypedDict):
    """Arguments that every `list_…` function of Ray's state API takes."""

    address: str
    limit: int
    timeout: int
    raise_on_missing_output: bool


def users_by_node() -> tuple[dict[str, tuple[ResourceUser, ...]], str]:
    """Who uses CPUs and GPUs on each node, largest first. Nodes have the names of
    `asyncrl.run.cluster.placement.cluster_nodes`.

    Returns:
        (ClusterNode → users, "" or why the users are unknown).
    """
    url = get_dashboard_url()
    if not url:
        return (
            {},
            (
                "this cluster has no dashboard, which Ray's state API needs (`ray start --head`"
                " with ray[default] starts one)"
            ),
        )
    address = url if url.startswith("http") else f"http://{url}"
    options: _ListOptions = {
        "address": address,
        "limit": MOST,
        "timeout": LIST_TIMEOUT_S,
        "raise_on_missing_output": False,
    }
    try:
        names = {
            node.node_id: f"{node.node_ip} ({node.node_id[:6]})" for node in list_nodes(**options)
        }
        if ray.get_runtime_context().get_node_id() not in names:
            # A head without a dashboard still reports the default port, where the dashboard of
            # another cluster may listen.
            return {}, f"the dashboard at {address} belongs to another cluster"
        groups = list_placement_groups(**options, detail=True, filters=[("state", "=", "CREATED")])
        living = list_actors(**options, detail=True, filters=[("state", "=", "ALIVE")])
        running = list_tasks(**options, detail=True, filters=[("state", "=", "RUNNING")])
    except Exception as error:  # Ray's client lets errors of requests and of parsing through
        return {}, f"Ray's state API does not answer: {' '.join(str(error).split())[:200]}"
    found = group_users(_claims(groups, living, running))
    return {names.get(node, node): users for node, users in found.items()}, ""


def group_users(
    claims: Iterable[tuple[str, str, dict[str, float]]],
) -> dict[str, tuple[ResourceUser, ...]]:
    """Node → users, from (node, name, amounts) of each. Users with the same name are merged and
    counted."""
    claimed: dict[str, dict[str, list[dict[str, float]]]] = defaultdict(lambda: defaultdict(list))
    for node, name, amounts in claims:
        if shown := {
            resource: amount for resource, amount in amounts.items() if resource in SHOWN and amount
        }:
            claimed[node][name].append(shown)
    return {
        node: tuple(sorted((_user(name, parts) for name, parts in by_name.items()), key=_weight))
        for node, by_name in claimed.items()
    }


def _user(name: str, parts: Sequence[dict[str, float]]) -> ResourceUser:
    sums = {resource: sum(part.get(resource, 0.0) for part in parts) for resource in SHOWN}
    return ResourceUser(
        name if len(parts) == 1 else f"{len(parts)} x {name}",
        {resource: amount for resource, amount in sums.items() if amount},
    )


def _weight(user: ResourceUser) -> tuple[float, float, str]:
    return -user.amounts.get("GPU", 0.0), -user.amounts.get("CPU", 0.0), user.name


def _claims(
    groups: Iterable[PlacementGroupState],
    living: Iterable[ActorState],
    running: Iterable[TaskState],
) -> Iterable[tuple[str, str, dict[str, float]]]:
    """(node, name, amounts) of each user. Actors and tasks in a placement group count as that
    group, which reserves its bundles even when they are idle."""
    inside: dict[str, list[str]] = defaultdict(list)
    for actor in living:
        if actor.placement_group_id:
            inside[actor.placement_group_id].append(_title(actor.name, actor.class_name))
        else:
            yield (
                actor.node_id or "",
                f"{_title(actor.name, actor.class_name)} of job {actor.job_id}",
                actor.required_resources or {},
            )
    for group in groups:
        used_by = (
            f" ({', '.join(sorted(set(inside[group.placement_group_id])))})"
            if inside[group.placement_group_id]
            else ""
        )
        for bundle in group.bundles or []:
            yield (
                bundle.get("node_id", ""),
                f"placement group{used_by} of job {group.creator_job_id}",
                bundle.get("unit_resources") or {},
            )
    for task in running:
        if task.type == "NORMAL_TASK" and not task.placement_group_id:
            yield (
                task.node_id or "",
                f"task {task.func_or_class_name} of job {task.job_id}",
                task.required_resources or {},
            )


def _title(name: str | None, class_name: str) -> str:
    """The application and deployment of a Serve replica, or the class of another actor."""
    if name and name.startswith(REPLICA):
        return f"Serve replica {'#'.join(name.removeprefix(REPLICA).split('#')[:2])}"
    return class_name
