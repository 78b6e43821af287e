"""Rules of `placement`: what each way to place generators and learner cannot be combined with."""

from __future__ import annotations

from asyncrl.config.schema import AttachedGenerators
from asyncrl.config.settings import Settings

ROUNDING = 1e-6
HALF = 0.5 + ROUNDING


NOT_ATTACHED = {
    "colocate": ": generators would rest while others use them",
    "share": ", whose generators have devices of their own",
}
"""Placement → why the generators must be the run's own."""


def check_placement(config: Settings) -> None:
    """Raise ValueError for the first rule of `placement` that does not hold."""
    placement, generator = config.placement, config.generator
    if placement == "decoupled":
        return
    if isinstance(generator, AttachedGenerators):
        raise ValueError(
            f"placement: {placement} does not work with generator.attach ="
            f" {generator.attach!r}{NOT_ATTACHED[placement]}; remove attach, or use placement:"
            " decoupled"
        )
    if placement == "colocate":
        _check_shifts(config)
    if config.learner.device != generator.device:
        raise ValueError(
            f"placement: {placement} needs one device for both sides, but learner.device ="
            f" {config.learner.device} and generator.device = {generator.device}; use placement:"
            " decoupled"
        )
    if config.replicas_share_gpus:
        _check_gpus(config)


def _check_shifts(config: Settings) -> None:
    if config.staleness.max_staleness:
        raise ValueError(
            f"placement: colocate needs staleness.max_staleness: 0, not"
            f" {config.staleness.max_staleness}: nothing is generated during a step, so a larger"
            " bound gains nothing; set 0, or use placement: decoupled"
        )
    if config.rollout.num_steps_per_rollout > 1:
        raise ValueError(
            "placement: colocate needs rollout.num_steps_per_rollout: 1, not"
            f" {config.rollout.num_steps_per_rollout}: the later steps of a round would train stale"
            " groups; set 1, or use placement: decoupled"
        )
    if config.engines.in_flight == "drain":
        raise ValueError(
            "placement: colocate does not work with generator.in_flight = 'drain': generators rest"
            " at once, with unfinished completions; use recompute or keep"
        )


def _check_gpus(config: Settings) -> None:
    """A GPU has at most one rank and one replica. Ray puts processes on one GPU as long as their
    fractions fit, and two ranks or two starting engines there would disturb each other."""
    generator, ranks = config.engines, config.learner.world_size
    if generator.workers > 1:
        raise ValueError(
            f"placement: {config.placement} does not work with generator.tensor_parallel_size *"
            f" pipeline_parallel_size = {generator.workers} on GPUs: Ray gives a process fractions"
            " of one GPU only; use 1, or placement: decoupled"
        )
    if generator.num_replicas > ranks:
        raise ValueError(
            f"placement: {config.placement} puts one rank and at most one replica on a GPU, but"
            f" generator.num_replicas = {generator.num_replicas} is above learner.world_size ="
            f" {ranks}; lower it, or use placement: decoupled"
        )
    if config.placement == "colocate":
        _check_shifts_on_gpus(config)
    else:
        _check_shares(config)


def _check_shifts_on_gpus(config: Settings) -> None:
    if config.engines.in_flight == "keep":
        raise ValueError(
            "placement: colocate does not work with generator.in_flight = 'keep' on GPUs: a rest"
            " frees the KV cache; use recompute"
        )
    if 0 < config.reward.num_gpus < 1:
        raise ValueError(
            f"placement: colocate does not work with reward.num_gpus = {config.reward.num_gpus:g}"
            " on GPUs: a reward could take the GPU of a replica beside a rank; use 0, 1 or more"
        )


def _check_shares(config: Settings) -> None:
    rank, replica = config.rank_gpus, config.replica_gpus
    if config.learner.world_size > 1 and rank <= HALF:
        raise ValueError(
            "placement: share needs learner.gpu_memory_utilization above 0.5 with several ranks,"
            f" not {rank:g}: Ray would put two ranks on one GPU; raise it"
        )
    if config.engines.num_replicas > 1 and rank + 2 * replica <= 1 + ROUNDING:
        raise ValueError(
            "placement: share needs generator.gpu_memory_utilization above"
            f" {(1 - rank) / 2:g} with several replicas, not {replica:g}: Ray would put two"
            " replicas on one GPU; raise it"
        )
    parts = shares_of_a_gpu(config)
    total = sum(fraction for _, fraction in parts)
    if total > 1 + ROUNDING:
        added = " + ".join(f"{name} {fraction:g}" for name, fraction in parts)
        raise ValueError(
            f"placement: share: the parts on one GPU take {added} = {total:g} of its memory, more"
            " than 1; lower them (rewards with reward.num_gpus of 1 or more have GPUs of their own)"
        )


def shares_of_a_gpu(config: Settings) -> list[tuple[str, float]]:
    """Part → its fraction of the fullest GPU under `placement: share`. Rewards with whole GPUs
    have others."""
    scoring = config.reward.tasks + config.scores_evaluation_apart
    parts = [
        ("learner.gpu_memory_utilization", config.rank_gpus),
        ("generator.gpu_memory_utilization", config.replica_gpus),
    ]
    if config.algorithm.frozen is not None:
        parts.append((f"{config.frozen_setting}.gpu_memory_utilization", config.reference_gpus))
    if 0 < config.reward.num_gpus < 1:
        parts.append((f"reward.num_gpus x {scoring}", scoring * config.reward.num_gpus))
    return parts
