"""Arithmetic over resources: what each process needs from one node, and what nodes have registered
and free. Pure, without Ray.

A run that passes may still not fit, because the cluster decides which processes share a node. A run
that does not pass cannot fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from asyncrl.config import Config
from asyncrl.config.placement_rules import shares_of_a_gpu
from asyncrl.preflight.resources.adapter import published_bytes, trained_bytes
from asyncrl.preflight.trials.teacher import reference_parameters
from asyncrl.runtime.ray.defaults import TASK_CPUS
from asyncrl.weights.layout import ITEM_BYTES

COUNTED = ("CPU", "GPU")
"""Resources that processes declare to Ray. A node that does not register one has none of it."""
BYTES = ("memory", "shared memory", "object store")
"""Resources that processes use without declaring them, in bytes. A node that did not answer may
have any amount."""
GENERATORS = ("generator replicas", "generator nodes")
"""Names of the generators' part. With engines of several nodes, it counts their nodes."""
ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Part:
    """A row of the logical CPU table: `count` processes with `cpus` each."""

    name: str
    count: int
    cpus: float


@dataclass(frozen=True, slots=True)
class Need:
    """`count` processes, each of which needs these amounts from a single node."""

    part: str
    count: int
    amounts: Mapping[str, float]
    apart: int = 1
    """Of every so many consecutive processes, no two may share a node."""


@dataclass(frozen=True, slots=True)
class ResourceUser:
    """A user of resources on a node, and the amounts."""

    name: str
    amounts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A machine of the cluster."""

    name: str
    registered: Mapping[str, float]
    free: Mapping[str, float]
    users: tuple[ResourceUser, ...] = ()


Amounts = Literal["registered", "free"]


def logical_cpus(config: Config) -> tuple[Part, ...]:
    """The logical CPUs that each part declares to Ray."""
    return (
        Part("learner ranks", config.learner.world_size, config.learner.num_cpus),
        *(
            [
                Part(
                    GENERATORS[config.engines.nnodes > 1],
                    config.engines.num_replicas * config.engines.nnodes,
                    config.engines.num_cpus,
                )
            ]
            if config.owns_generators
            else []
        ),
        *(
            [Part(_frozen(config), 1, config.algorithm.frozen.num_cpus)]
            if config.algorithm.frozen is not None
            else []
        ),
        Part("rollout workers", config.rollout.num_workers, TASK_CPUS),
        Part("prompt stream", 1, TASK_CPUS),
        Part("scoring stream", config.reward.tasks, config.reward.num_cpus),
        *(
            [Part("evaluation's rewards", 1, config.reward.num_cpus)]
            if config.scores_evaluation_apart
            else []
        ),
    )


def _frozen(config: Config) -> str:
    """Name of the part that only scores tokens."""
    return "reference policy" if config.algorithm.distillation is None else "teacher"


def run_needs(config: Config, version_bytes: int = 0) -> tuple[Need, ...]:
    """The resources that a run needs, part by part.

    Args:
        version_bytes: bytes of one published version; 0 = unknown, and memory is left out. Memory
            counts the minimum: weights, gradients, optimizer states and KV cache, without
            activations, libraries and Ray.
    """
    gpus = {
        "learner ranks": config.rank_gpus,
        "reference policy": config.reference_gpus,
        "teacher": config.reference_gpus,
        **dict.fromkeys(GENERATORS, config.replica_gpus),
    }
    needs = []
    for part in logical_cpus(config):
        amounts = {"CPU": part.cpus}
        if gpus.get(part.name):
            amounts["GPU"] = gpus[part.name]
        if part.name in ("scoring stream", "evaluation's rewards") and config.reward.num_gpus:
            amounts["GPU"] = config.reward.num_gpus
        if version_bytes:
            amounts |= _bytes_of(part.name, config, version_bytes)
        apart = config.engines.nnodes if part.name in GENERATORS else 1
        needs.append(Need(part.name, part.count, amounts, apart))
    if version_bytes:
        published = published_bytes(config, version_bytes)
        needs.append(
            Need(
                "two published versions",
                1,
                {"shared memory": 2.0 * published, "object store": 2.0 * published},
            )
        )
    return tuple(needs)


def _bytes_of(part: str, config: Config, version_bytes: int) -> dict[str, float]:
    learner, generator = config.learner, config.engines
    parameters = version_bytes / ITEM_BYTES[config.model.dtype]
    on_host = learner.device == "cpu" or learner.offload_optimizer == "cpu"
    if part == "learner ranks" and (on_host or config.takes_shifts_on_gpus):
        # Weights and gradients in float32, and AdamW's two moments. Frozen weights have only
        # themselves. With shifts on GPUs, they are in host memory in the generators' shift, and the
        # weights in bfloat16 too.
        item = 8 + 4 * learner.optimizer.moments
        item += 2 if learner.bf16 and config.takes_shifts_on_gpus else 0
        trained = trained_bytes(config, version_bytes, item)
        frozen = 0.0 if config.lora is None else parameters * 4
        return {"memory": (trained + frozen) / learner.world_size}
    if part == "teacher" and learner.device == "cpu":
        parameters = reference_parameters(config.reference_path)
    if part in ("reference policy", "teacher") and learner.device == "cpu":
        return {"memory": parameters * (2 if learner.bf16 else 4)}
    if part in GENERATORS:
        held = (
            {"memory": (version_bytes + generator.kv_cache_memory_bytes) / generator.nnodes}
            if generator.device == "cpu"
            # The weights of an engine that rests.
            else {"memory": float(version_bytes)}
            if config.takes_shifts_on_gpus
            else {}
        )
        return {**held, "shared memory": float(published_bytes(config, version_bytes))}
    return {}


def shortages(needs: Sequence[Need], nodes: Sequence[ClusterNode], which: Amounts) -> list[str]:
    """Why the run does not fit into the registered or free resources.

    Returns:
        A line for each resource whose total is too small, and for each part without enough room.
    """
    lines = []
    for resource in (*COUNTED, *BYTES):
        wanted = _wanted(needs, resource)
        there = sum(_has(node, resource, which) for node in nodes)
        if wanted > there + ROUNDING:
            lines.append(
                f"{resource}: {_amount(resource, wanted)} needed, {_amount(resource, there)}"
                f" {which}"
            )
    for need in needs:
        rooms = [
            (node.name, _room(need, node, which)) for node in nodes
        ]  # two nodes may have the same name
        if sum(count for _, count in rooms) < need.count:
            each = ", ".join(
                f"{resource} {_amount(resource, amount)}"
                for resource, amount in need.amounts.items()
                if amount
            )
            lines.append(
                f"{need.part}: {need.count} x ({each}), each on one node{_apart(need)}, but"
                f" {which} resources"
                " fit "
                + (
                    ", ".join(f"{count:g} on {name}" for name, count in rooms if count)
                    or "none on any node"
                )
            )
    return lines


def _wanted(needs: Sequence[Need], resource: str) -> float:
    """What all parts together need. A process on more than half of a GPU leaves none whole, so it
    counts as one beside those that need whole GPUs."""
    counts = [(need.count, need.amounts.get(resource, 0.0)) for need in needs]
    total = sum(count * amount for count, amount in counts)
    if resource != "GPU":
        return total
    return max(total, sum(count * math.ceil(amount) for count, amount in counts if amount > 0.5))


def with_fewer_replicas(
    config: Config, version_bytes: int, nodes: Sequence[ClusterNode], which: Amounts
) -> Config | None:
    """The config with the most replicas that fit, fewer than requested and at least
    `generator.min_replicas`. None: `generator.min_replicas` do not fit."""
    for replicas in range(config.engines.num_replicas - 1, config.engines.least_replicas - 1, -1):
        fewer = config.model_copy(
            update={"generator": config.engines.model_copy(update={"num_replicas": replicas})}
        )
        if not shortages(run_needs(fewer, version_bytes), nodes, which):
            return fewer
    return None


def placement_text(config: Config, nodes: Sequence[ClusterNode] | None = None) -> str:
    """slime's arithmetic for all placements, in GPUs, with the cluster's numbers if they are
    known."""
    learner, generator = config.learner, config.engines
    actors = learner.world_size * (learner.device == "cuda")
    workers = generator.workers
    rollouts = generator.num_replicas * workers * (generator.device == "cuda")
    engine = "".join(
        f" * {name} {size}"
        for name in ("tensor_parallel_size", "pipeline_parallel_size")
        if (size := getattr(generator, name)) > 1
    ) + (f", each on {generator.nnodes} nodes," if generator.nnodes > 1 else "")
    reference = int(config.algorithm.frozen is not None and learner.device == "cuda")
    rewards = config.reward.num_gpus * (config.reward.tasks + config.scores_evaluation_apart)
    extra = (f" + {_frozen(config).split()[0]} {reference}" if reference else "") + (
        f" + rewards {rewards:g}" if rewards else ""
    )
    total = actors + rollouts + reference + rewards
    return (
        f"# placement, in slime's terms\n  actor_num_nodes * actor_num_gpus_per_node = {actors}"
        f" GPUs (learner.world_size {learner.world_size} on {learner.device})\n  rollout_num_gpus  "
        f"                        = {rollouts} GPUs (generator.num_replicas"
        f" {generator.num_replicas}{engine} on {generator.device})\n  decoupled needs total"
        f" >= {actors} + {rollouts}{extra} = {total:g}{_gpus(nodes)}"
        f"\n  colocate  needs total >= {actors}{extra} = {total - rollouts:g}: ranks and replicas"
        " on the same GPUs, in shifts. No more rollout devices than ranks"
        f"\n  share     needs total >= {actors}: {_shares(config)}"
        f"\n  this run: placement: {config.placement}{_untried(config)}{_range(config)}"
    )


def _shares(config: Config) -> str:
    """What the fullest GPU is shared between."""
    if not config.shares_gpus:
        return "ranks and replicas on the same GPUs, each with a fraction of the memory"
    parts = shares_of_a_gpu(config)
    added = " + ".join(f"{name} {fraction:g}" for name, fraction in parts)
    return f"{added} = {sum(fraction for _, fraction in parts):g} of a GPU's memory, at most 1"


def _untried(config: Config) -> str:
    return ", which has not run on a GPU" if config.replicas_share_gpus else ""


def _range(config: Config) -> str:
    generator = config.engines
    if generator.least_replicas == generator.num_replicas:
        return ""
    return (
        f"\n  generator.min_replicas = {generator.min_replicas}: after placement_timeout_s ="
        f" {config.placement_wait_s:g} s an attempt starts with the replicas that fit,"
        f" {generator.replicas_text}.\n  The batch stays the same, and fewer replicas take longer"
        " for it"
    )


def cluster_text(
    needs: Sequence[Need], nodes: Sequence[ClusterNode], unknown_users: str = ""
) -> str:
    """Needed, registered and free resources of the cluster and of each node, and who uses them.

    Args:
        unknown_users: why the users are unknown; "" = they are known.
    """
    shown = [name for name in (*COUNTED, *BYTES) if any(need.amounts.get(name) for need in needs)]
    rows = [
        f"# cluster, {len(nodes)} node{'s' * (len(nodes) != 1)}",
        f"  {'':<16}{'needed':>12}{'registered':>14}{'free':>12}",
    ]
    for name in shown:
        wanted = sum(need.count * need.amounts.get(name, 0) for need in needs)
        registered, free = (
            sum(_has(node, name, which) for node in nodes) for which in ("registered", "free")
        )
        shares = (_amount(name, share) for share in (wanted, registered, free))
        rows.append("  {:<16}{:>12}{:>14}{:>12}".format(name, *shares))
    for node in nodes:
        rows.append(f"  node {node.name}")
        rows += [
            f"    {name:<26}{_amount(name, _has(node, name, 'registered')):>14}"
            f"{_amount(name, _has(node, name, 'free')):>12}"
            for name in shown
        ]
        rows.append(
            "    room for "
            + ", ".join(
                f"{need.part} {min(need.count, _room(need, node, 'free')):g} of {need.count}"
                for need in needs
            )
        )
        rows += [f"    used by {user.name}: " + _amounts(user.amounts) for user in node.users]
    in_use = any(
        _has(node, name, "free") + ROUNDING < _has(node, name, "registered")
        for node in nodes
        for name in COUNTED
    )
    return "\n".join(
        [
            *rows,
            *(
                [f"  the users of the rest are not known: {unknown_users}"]
                if unknown_users and in_use
                else []
            ),
        ]
    )


def _gpus(nodes: Sequence[ClusterNode] | None) -> str:
    if nodes is None:
        return ""
    return (
        f": {sum(_has(node, 'GPU', 'registered') for node in nodes):g} registered,"
        f" {sum(_has(node, 'GPU', 'free') for node in nodes):g} free"
    )


def _room(need: Need, node: ClusterNode, which: Amounts) -> float:
    """How many of these processes fit on the node, if it gets nothing else."""
    quotients = [
        _has(node, name, which) / amount for name, amount in need.amounts.items() if amount
    ]
    fraction = need.amounts.get("GPU", 0.0)
    if 0 < fraction < 1:  # a process is on one GPU, and cannot use what two have left
        each = math.floor(1 / fraction + ROUNDING)
        quotients.append(_has(node, "GPU", "registered") * each)
    if need.apart > 1:
        quotients.append(need.count // need.apart)
    fewest = min(quotients, default=math.inf)
    return math.floor(fewest + ROUNDING) if math.isfinite(fewest) else math.inf


def _apart(need: Need) -> str:
    return f" and each {need.apart} of an engine on different ones" if need.apart > 1 else ""


def _has(node: ClusterNode, resource: str, which: Amounts) -> float:
    amounts = node.registered if which == "registered" else node.free
    return amounts.get(resource, 0.0 if resource in COUNTED else math.inf)


def _amounts(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_amount(name, amount)}" for name, amount in amounts.items())


def _amount(resource: str, amount: float) -> str:
    if not math.isfinite(amount):
        return "not known"
    if resource in COUNTED:
        return f"{round(amount, 4):g}"
    return f"{amount / 2**30:.2f} GiB" if amount >= 2**30 else f"{amount / 2**20:.1f} MiB"
