"""DeepSpeed ZeRO: process group, settings, engine, and functions that its public interface lacks.

ZeRO-3 is the default. `asyncrl.learning.engine.whole` has what differs for ZeRO-1 and ZeRO-2.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import deepspeed
import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from asyncrl.config import LearnerConfig, LoraConfig
from asyncrl.config.schema import ZERO_BUCKET_ELEMENTS
from asyncrl.learning.engine import whole
from asyncrl.learning.engine.optimizer import make_optimizer
from asyncrl.models.adapters import add_adapter, load_adapter, share_weights_with_dora
from asyncrl.models.isolation import NOT_FINITE, check_isolation
from asyncrl.models.policy import Policy, checkpoint_activations, head_settings, load_policy
from asyncrl.models.ulysses import SequenceRanks
from asyncrl.weights.gather import ShardedParameter

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

RENDEZVOUS_TIMEOUT_S = 300
COLLECTIVE_TIMEOUT_S = 3600.0
EVERYTHING = 10**12
"""A threshold above any parameter count: no parameter is released between uses."""


def listening_socket(address: str) -> socket.socket:
    """A listening socket on a port that the system chooses. Rank 0 keeps it open until the store
    takes it over, so no other process gets the port."""
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
    """Meet the other ranks at (address, port). Rank 0 serves the store on its own listener. Blocks
    until all ranks have joined.

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
    store = dist.TCPStore(  # type: ignore[attr-defined]  # missing in __all__
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
        # A rank sees one GPU. Without this NCCL guesses which from the rank's number, and warns.
        device_id=torch.device("cuda", 0) if backend == "nccl" else None,
    )
    # DeepSpeed's shared-memory all-reduce compiles for a minute at first use. ZeRO-3 never calls
    # it: it uses reduce-scatter and all-gather. ZeRO-1 and ZeRO-2 use gloo's all-reduce instead.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=backend, verbose=False)


def settings(config: LearnerConfig) -> dict[str, object]:
    """DeepSpeed's configuration. A micro-batch is one packed row, so its batch sizes are 1. The
    caller scales the gradients.

    Gradients are summed in fp32 for any dtype of the weights: bfloat16 would lose small ones.
    """
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
            "stage": config.zero_stage,
            "reduce_bucket_size": ZERO_BUCKET_ELEMENTS,
            **(_sharded_weights(config) if config.zero_stage == 3 else _whole_weights(config)),
        },
    }


def _sharded_weights(config: LearnerConfig) -> dict[str, object]:
    """ZeRO-3's own settings.

    A single rank has all weights anyway, so it releases no parameter and saves the bookkeeping of
    gathers. Several ranks, or one with weights in host memory, release all parameters except biases
    and norms.
    """
    released = config.world_size > 1 or config.offload_param != "none"
    offload = {
        f"offload_{what}": {"device": device, "pin_memory": config.device == "cuda"}
        for what, device in (
            ("optimizer", config.offload_optimizer),
            ("param", config.offload_param),
        )
        if device != "none"
    }
    return {
        "overlap_comm": config.device == "cuda",
        "contiguous_gradients": True,
        "stage3_prefetch_bucket_size": ZERO_BUCKET_ELEMENTS if config.device == "cuda" else 0,
        "stage3_param_persistence_threshold": 4_096 if released else EVERYTHING,
        "zero_hpz_partition_size": config.zero_hpz_partition_size,
        **offload,
    }


def _whole_weights(config: LearnerConfig) -> dict[str, object]:
    """ZeRO-1's or ZeRO-2's own settings.

    ZeRO-1 reduces the gradients once, after the last micro-batch. Neither overlapping that nor
    copying them into a buffer pays, and without both DeepSpeed needs no hook on a parameter.
    """
    shards_gradients = config.zero_stage == 2
    return {
        "overlap_comm": shards_gradients and config.device == "cuda",
        "contiguous_gradients": shards_gradients,
    }


def start_engine(
    path: str,
    config: LearnerConfig,
    temperature: float,
    entropy_gradient: bool = False,
    values: bool = False,
    sequence_group: SequenceRanks | None = None,
    lora: LoraConfig | None = None,
    seed: int = 0,
    value_bias: bool = True,
) -> tuple[DeepSpeedEngine, HfDeepSpeedConfig | None]:
    """Load the policy at `path` and build its engine (a collective). Keep the second value as long
    as the engine: while it exists, transformers loads models sharded. It is None if each rank has
    all weights.

    Args:
        lora: the adapter to train instead of the model's own weights.
        seed: of the adapter's first values.
        value_bias: see `load_policy`.

    Raises:
        ValueError: the model cannot isolate packed trajectories from each other, cannot have the
            adapter, or has weights that are no finite numbers.
    """
    chosen = settings(config)
    exact = computed_buffers(path) if config.zero_stage == 3 and config.bf16 else {}
    sharded = HfDeepSpeedConfig(chosen) if config.zero_stage == 3 else None
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
        value_bias,
    )
    for name, buffer in exact.items():
        rounded = policy.model.get_buffer(name)
        owner, _, own = name.rpartition(".")
        setattr(policy.model.get_submodule(owner), own, buffer.to(rounded.device))
    if lora is not None:
        add_adapter(policy.model, lora, seed)
        if lora.load is not None:
            load_adapter(policy.model, Path(lora.load))
    if config.gradient_checkpointing:
        checkpoint_activations(policy)
    if config.zero_stage == 3:
        _name_shared_parameters(policy)
    engine, _, _, _ = deepspeed.initialize(
        model=policy, optimizer=make_optimizer(policy, config), config=chosen
    )
    engine.eval()  # no dropout: the policy is in eval mode and stays there
    if not parameters_finite(engine):
        raise ValueError(NOT_FINITE.format(path=path))
    check_isolation(
        engine,
        policy.model.config.get_text_config().vocab_size,
        engine.device,
        policy.model.dtype,
        path,
        policy.packing,
    )
    return engine, sharded


def computed_buffers(path: str) -> dict[str, torch.Tensor]:
    """The floating-point buffers that the model computes itself, such as the frequencies of rotary
    position embeddings: name → buffer.

    While ZeRO-3 shards a model that loads, DeepSpeed makes every new tensor in the dtype of the
    weights. In bfloat16, frequencies would be wrong by up to 0.4%, and positions with them.
    """
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    saved = model.state_dict().keys()
    return {
        name: buffer
        for name, buffer in model.named_buffers()
        if name not in saved and buffer.is_floating_point()
    }


def _name_shared_parameters(policy: Policy) -> None:
    """Tell ZeRO-3 which modules read parameters of other modules, so that it gathers these too."""
    share = deepspeed.zero.register_external_parameter
    share_weights_with_dora(policy.model, share)
    for parameter in policy.model.get_output_embeddings().parameters():
        share(policy, parameter)


def policy_of(engine: DeepSpeedEngine) -> Policy:
    """The policy inside an engine."""
    policy: Policy = engine.module
    return policy


def fresh_optimizer(engine: DeepSpeedEngine) -> None:
    """Reset the optimizer's state: moments and step counts."""
    engine.optimizer.optimizer.state.clear()


def gradient_shards(engine: DeepSpeedEngine) -> Iterator[torch.Tensor]:
    """This rank's shards of the gradients of the current step. An offloaded optimizer keeps them
    with its fp32 master weights."""
    if whole.keeps_whole(engine):
        yield from whole.gradient_parts(engine)
        return
    if engine.optimizer.offload_optimizer:
        yield from (
            masters.grad
            for masters in engine.optimizer.fp32_partitioned_groups_flat
            if masters.grad is not None
        )
        return
    for shards in engine.optimizer.averaged_gradients.values():
        yield from (shard for shard in shards or () if shard is not None)


def full_size(parameter: ShardedParameter) -> int:
    """Number of elements of a sharded parameter over all ranks."""
    return int(parameter.ds_numel)


def shard_size(parameter: ShardedParameter) -> int:
    """Number of elements of a sharded parameter that this rank owns, including padding."""
    return int(parameter.ds_tensor.numel())


def gradients_finite(engine: DeepSpeedEngine) -> bool:
    """Whether this rank's gradient shards and their norm are free of NaN and Inf."""
    shards = list(gradient_shards(engine))
    return not shards or bool(torch.isfinite(torch.nn.utils.get_total_norm(shards)))


def parameters_finite(engine: DeepSpeedEngine) -> bool:
    """Whether all parameters and their norm are free of NaN and Inf on every rank (a
    collective)."""
    rank = dist.get_rank()
    parts = (
        whole.parameter_parts(engine, rank)
        if whole.keeps_whole(engine)
        else [_own_part(parameter, rank) for parameter in engine.module.parameters()]
    )
    norm = torch.nn.utils.get_total_norm(parts)
    bad = (~torch.isfinite(norm)).int().to(engine.device)
    dist.all_reduce(bad)
    return not int(bad)


def _own_part(parameter: ShardedParameter, rank: int) -> torch.Tensor:
    """This rank's shard without its padding, which DeepSpeed leaves uninitialized."""
    shard = parameter.ds_tensor
    return shard.narrow(0, 0, max(0, min(shard.numel(), parameter.ds_numel - rank * shard.numel())))


def discard_gradients(engine: DeepSpeedEngine) -> None:
    """Drop the gradients of the current step, as the engine does on an overflow."""
    if whole.keeps_whole(engine):
        whole.discard(engine)
        return
    engine.optimizer._pre_step()
    engine.optimizer._partition_all_parameters()
    engine.optimizer._overflow_clean_up(1.0)
    # Offloaded gradients stay allocated. Without zeroing, a parameter that the next step does not
    # reach would get its old gradient.
    for shard in gradient_shards(engine):
        shard.zero_()
