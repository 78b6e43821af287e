"""DeepSpeed ZeRO-3: process group, settings, engine, and the few things that its public interface
does not offer."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from asyncrl.config import LearnerConfig
from asyncrl.learning.optimizer import make_optimizer
from asyncrl.models.isolation import check_isolation
from asyncrl.models.policy import Policy, checkpoint_activations, head_settings, load_policy
from asyncrl.models.ulysses import SequenceGroup

__all__ = [
    "discard_gradients",
    "fresh_optimizer",
    "full_size",
    "gradients_finite",
    "join_process_group",
    "listening_socket",
    "parameters_finite",
    "policy_of",
    "shard_size",
    "start_engine",
]

RENDEZVOUS_TIMEOUT_S = 300
COLLECTIVE_TIMEOUT_S = 3600.0
EVERYTHING = 10**12
"""Above any parameter count: nothing is released between its uses."""


def listening_socket(address: str) -> socket.socket:
    """A listening socket on a port that the system chose. Rank 0 holds it until the store takes it
    over, so nobody else gets the port."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((address, 0))
    listener.listen(128)
    return listener


def join_process_group(
    rank: int,
    world_size: int,
    address: str,
    port: int,
    backend: str,
    listener: socket.socket | None,
    collective_timeout_s: float = COLLECTIVE_TIMEOUT_S,
) -> None:
    """Meet the other ranks at (address, port); rank 0 serves the store on its own listener. Blocks
    until all are there.

    Args:
        collective_timeout_s: seconds that a collective waits for the slowest rank, which may be
            writing a large shard.
    """
    from datetime import timedelta

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK="0",
        WORLD_SIZE=str(world_size),
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
    )
    descriptor = listener.detach() if listener is not None else None
    timeout = timedelta(seconds=RENDEZVOUS_TIMEOUT_S)
    store = dist.TCPStore(  # type: ignore[attr-defined]  # it is there, and not in __all__
        address,
        port,
        world_size,
        rank == 0,
        timeout,
        wait_for_workers=False,
        master_listen_fd=descriptor,
        use_libuv=True,
    )
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=collective_timeout_s),
    )
    # Its shared-memory all-reduce needs a compiler and a minute at first use, and ZeRO-3's
    # reduce-scatter and all-gather never call it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=backend, verbose=False)


def settings(config: LearnerConfig) -> dict[str, Any]:
    """DeepSpeed's configuration. A micro-batch is one packed row, so its own batch sizes are 1;
    gradients are scaled by the caller.

    One rank holds everything anyway: it releases nothing, which saves the bookkeeping of gathers.
    More ranks, and one whose weights lie in host memory, release all but biases and norms.
    Micro-batches and ranks add up in fp32 whatever the weights' type: in bfloat16 many small
    gradients would be lost.
    """
    released = config.world_size > 1 or config.offload_param != "none"
    offload = {
        f"offload_{what}": {"device": place, "pin_memory": config.device == "cuda"}
        for what, place in (
            ("optimizer", config.offload_optimizer),
            ("param", config.offload_param),
        )
        if place != "none"
    }
    return {
        "train_batch_size": config.world_size,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.max_grad_norm,
        "bf16": {"enabled": config.bf16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": config.device == "cuda",
            "contiguous_gradients": True,
            "reduce_bucket_size": 50_000_000,
            "stage3_prefetch_bucket_size": 50_000_000 if config.device == "cuda" else 0,
            "stage3_param_persistence_threshold": 4_096 if released else EVERYTHING,
            **offload,
        },
    }


def start_engine(
    path: str,
    config: LearnerConfig,
    temperature: float,
    entropy_gradient: bool = False,
    values: bool = False,
    sequence_group: SequenceGroup | None = None,
) -> tuple[Any, HfDeepSpeedConfig]:
    """The engine around the policy at `path`. Keep the second value: while it lives, transformers
    loads sharded.

    Raises:
        ValueError: packed trajectories could not be kept apart in the model.
    """
    chosen = settings(config)
    sharded = HfDeepSpeedConfig(chosen)
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    policy = load_policy(
        path,
        dtype,
        temperature,
        entropy_gradient,
        values,
        sequence_group,
        config.packing,
        head_settings(config),
    )
    if config.gradient_checkpointing:
        checkpoint_activations(policy)
    head = policy.model.get_output_embeddings()
    for parameter in head.parameters():
        deepspeed.zero.register_external_parameter(policy, parameter)
    engine, _, _, _ = deepspeed.initialize(
        model=policy, optimizer=make_optimizer(policy, config), config=chosen
    )
    engine.eval()  # where the policy is, and stays
    check_isolation(
        engine,
        policy.model.config.get_text_config().vocab_size,
        engine.device,
        policy.model.dtype,
        path,
        policy.packing,
    )
    return engine, sharded


def policy_of(engine: Any) -> Policy:
    """The policy inside an engine."""
    policy: Policy = engine.module
    return policy


def fresh_optimizer(engine: Any) -> None:
    """Forget AdamW's moments and step counts."""
    engine.optimizer.optimizer.state.clear()


def gradient_shards(engine: Any) -> Iterator[torch.Tensor]:
    """This rank's shards of the gradients of the step in progress. With the optimizer offloaded
    they lie beside its masters."""
    if engine.optimizer.offload_optimizer:
        yield from (
            masters.grad
            for masters in engine.optimizer.fp32_partitioned_groups_flat
            if masters.grad is not None
        )
        return
    for shards in engine.optimizer.averaged_gradients.values():
        yield from (shard for shard in shards or () if shard is not None)


def full_size(parameter: torch.nn.Parameter) -> int:
    """Number of elements of a sharded parameter on all ranks together."""
    return int(parameter.ds_numel)  # type: ignore[attr-defined]  # DeepSpeed adds it


def shard_size(parameter: torch.nn.Parameter) -> int:
    """Number of its elements that this rank owns, padding included."""
    return int(parameter.ds_tensor.numel())  # type: ignore[attr-defined]


def gradients_finite(engine: Any) -> bool:
    """No NaN or Inf in this rank's shards, nor in their norm."""
    shards = list(gradient_shards(engine))
    return not shards or bool(torch.isfinite(torch.nn.utils.get_total_norm(shards)))


def parameters_finite(engine: Any) -> bool:
    """No NaN or Inf in any parameter, nor in their norm, on any rank (a collective)."""
    norm = torch.nn.utils.get_total_norm(
        [_own_part(parameter, dist.get_rank()) for parameter in engine.module.parameters()]
    )
    bad = (~torch.isfinite(norm)).int().to(engine.device)
    dist.all_reduce(bad)
    return not int(bad)


def _own_part(parameter: Any, rank: int) -> torch.Tensor:
    """This rank's shard without its padding, which DeepSpeed leaves as it was allocated."""
    shard: torch.Tensor = parameter.ds_tensor
    return shard.narrow(0, 0, max(0, min(shard.numel(), parameter.ds_numel - rank * shard.numel())))


def discard_gradients(engine: Any) -> None:
    """Drop the gradients of the step in progress, as the engine itself does on an overflow."""
    engine.optimizer._pre_step()
    engine.optimizer._partition_all_parameters()
    engine.optimizer._overflow_clean_up(1.0)
    # Offloaded gradients keep their place, and a parameter that the next step does not reach would
    # still find its old one there.
    for shard in gradient_shards(engine):
        shard.zero_()
