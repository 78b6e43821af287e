"""Memory that one learner rank needs, and the memory of this machine. Reads only the headers of the
checkpoint, no weights."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from asyncrl.algorithms.logit_chunks import LIVE_CHUNKS, chunk_elements
from asyncrl.config import Config, LearnerConfig, OfflineConfig, RunSettings
from asyncrl.config.schema import ZERO_BUCKET_ELEMENTS
from asyncrl.generation.served import text_config
from asyncrl.models.supported import chosen_packing, squares_scores
from asyncrl.preflight.machine import starts_ray_here
from asyncrl.preflight.resources.activations import (
    HEADS,
    LAYERS,
    WIDTH,
    activations,
    size_of,
)
from asyncrl.preflight.resources.adapter import run_outline, trained_elements
from asyncrl.sandbox.machine import usable_memory
from asyncrl.weights.layout import ITEM_BYTES

HEAD_GRADIENTS = 2
"""Gradients of the head's weight that exist at the same time in the backward pass of the log-probs:
a chunk's, and their float32 sum."""
DRIVER_FILES = ("/dev/nvidiactl", "/proc/driver/nvidia", "/dev/dxg")
"""One of them exists where a program can use a GPU, in containers and WSL too. Without them, torch
need not be imported, which takes a second or more."""
HOST_BUFFERS = 1.5
"""Host memory that DeepSpeed's formula counts for each byte that is in use there."""
STAGES = (1, 2, 3)
KEPT_SCORES, LIVE_SCORES = 2, 3
"""Tensors of tokens × tokens per layer in the model's own eager attention: those kept for the
backward pass, and temporary ones."""
VOCABULARY = ("vocab_size",)


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes for one rank, on the device and on the host. With device: cpu, the device's memory is
    host memory."""

    parameters: int
    """Parameters of the model. Tied ones count once."""
    largest_layer: int
    """Parameters of the module with the most, without its submodules."""
    on_device: int
    """Weights, gradients and optimizer states on the device; with ZeRO-3 by DeepSpeed's formula."""
    on_host: int
    """Offloaded states and DeepSpeed's buffers on the host, by the same formula."""
    buckets: int
    """Two weight buckets while a version is published. Host, rank 0."""
    logits: int
    """A chunk of logits, the values computed from it, and the head's gradients. Device."""
    scores: int = 0
    """Attention scores (tokens × tokens) of the longest trajectory, if the model's own attention
    stores them. Device."""
    activations: int = 0
    """What the layers keep for the backward pass, at the same time as `logits`. Device. 0: unknown,
    the model's config.json has other names of sizes."""
    tokens: int = 0
    """Most tokens that a rank processes at once."""
    other_activations: int = 0
    """The same with the other value of learner.gradient_checkpointing."""

    other_stages: Mapping[int, int] = field(default_factory=dict)
    """Stage of ZeRO that these settings allow too → `on_device` with it."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Elements of a model's parameters."""

    total: int
    trained: int
    """Those that are not frozen."""
    largest: int
    """Those of the largest module, without its submodules."""


def parameter_counts(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    """(All parameters, parameters of the largest module without its submodules) of name → shape, as
    DeepSpeed's estimators need them."""
    layers: dict[str, int] = defaultdict(int)
    for name, shape in shapes.items():
        layers[name.rpartition(".")[0]] += prod(shape)
    return sum(layers.values()), max(layers.values())


def device_bytes(needs: Needs) -> int:
    """Bytes that a rank needs on its device at once, without libraries."""
    return needs.on_device + needs.logits + needs.scores + needs.activations


def estimate(config: RunSettings) -> Needs:
    """The needs of one rank, with all ranks on one machine."""
    learner = config.learner
    version = run_outline(config)
    total, largest = parameter_counts(version.parameters)
    # With an adapter, the frozen weights have no gradients and no optimizer states.
    trained = total if config.lora is None else trained_elements(version)
    sizes = Sizes(total, trained, largest)
    device, host = _states(learner, sizes)
    bucket = max(config.bucket_bytes, version.largest * ITEM_BYTES[config.model.dtype])
    tree: dict[str, object] = json.loads((Path(config.model.path) / "config.json").read_text())
    text = text_config(tree)
    vocabulary = size_of(text, VOCABULARY)
    width = size_of(text, WIDTH)
    chunk = min(
        max(chunk_elements(learner.logprob_bytes), vocabulary),
        learner.max_tokens_per_gpu * vocabulary,
    )
    logits = 4 * (
        LIVE_CHUNKS * chunk + (HEAD_GRADIENTS + learner.cast_lm_head_to_fp32) * vocabulary * width
    )
    kept, other = (
        _activations(learner, text, _tokens_of_a_pass(config, tree), logits, checkpointing)
        for checkpointing in (learner.gradient_checkpointing, not learner.gradient_checkpointing)
    )
    return Needs(
        total,
        largest,
        device,
        host,
        2 * min(bucket, version.nbytes(config.model.dtype)),
        logits,
        _scores(config, tree, text),
        kept,
        _tokens_of_a_pass(config, tree),
        other,
        {
            stage: _states(learner.model_copy(update={"zero_stage": stage}), sizes)[0]
            for stage in STAGES
            if stage != learner.zero_stage and not _refused(learner, stage)
        },
    )


def _refused(learner: LearnerConfig, stage: int) -> bool:
    """Whether these settings refuse another stage."""
    shards_more = learner.offload_optimizer != "none" or learner.zero_hpz_partition_size > 1
    return (stage < 3 and shards_more) or (stage == 1 and learner.bf16)


def _states(learner: LearnerConfig, sizes: Sizes) -> tuple[int, int]:
    """Bytes of weights, gradients and optimizer states of one rank: (device, host)."""
    if learner.zero_stage == 3:
        return _sharded_states(learner, sizes)
    ranks, trained = learner.world_size, sizes.trained
    weights = (2 if learner.bf16 else 4) * sizes.total
    masters_and_moments = 4 * (1 + learner.optimizer.moments) * trained // ranks
    if learner.zero_stage == 1:
        # Whole gradients until the step, which copies its shard of them.
        gradients = 4 * trained + 4 * trained // ranks
    else:
        # A bucket to reduce, and the sum over micro-batches. Float32 weights have a shard of one
        # micro-batch beside it; bfloat16 gradients are added to the sum at once.
        shards = 1 if learner.bf16 else 2
        # DeepSpeed allocates whole buckets, and on a GPU fills one while another is reduced. Host
        # memory is used as far as it is filled.
        on_gpu = learner.device == "cuda"
        buckets = 2 * ZERO_BUCKET_ELEMENTS if on_gpu else min(ZERO_BUCKET_ELEMENTS, trained)
        gradients = (2 if learner.bf16 else 4) * buckets + 4 * shards * trained // ranks
    return weights + masters_and_moments + gradients, 0


def _sharded_states(learner: LearnerConfig, sizes: Sizes) -> tuple[int, int]:
    """The same with ZeRO-3, by DeepSpeed's formula (`estimate_zero3_model_states_mem_needs`),
    whose import takes seconds.

    It assumes mixed precision with 18 bytes per parameter, of which AdamW's two moments are 8. In
    float32 it is 16, plus 4 during a step.
    """
    ranks, states = learner.world_size, 8 + 4 * learner.optimizer.moments
    if learner.offload_optimizer != "cpu":
        host = int(4 * sizes.largest * ranks * HOST_BUFFERS)
        device = 4 * sizes.largest + (states + 2) * sizes.trained // ranks
    elif learner.offload_param != "cpu":
        host = int(states * sizes.trained * HOST_BUFFERS)
        device = 4 * sizes.largest + 2 * sizes.trained // ranks
    else:
        host, device = int((states + 2) * sizes.trained * HOST_BUFFERS), 4 * sizes.largest
    element = 2 if learner.bf16 else 4
    if sizes.trained != sizes.total:
        frozen = sizes.total * element // learner.world_size
        if learner.offload_param == "cpu":
            host += frozen * learner.world_size
        else:
            device += frozen
    if learner.zero_hpz_partition_size > 1:
        device += sizes.total * element // learner.zero_hpz_partition_size
    return device, host // learner.world_size


def _scores(config: RunSettings, tree: Mapping[str, object], text: Mapping[str, object]) -> int:
    """Bytes of attention scores, which grow with the square of the longest trajectory.
    gradient_checkpointing keeps the scores of one layer only."""
    if not squares_scores(tree):
        return 0
    layers = 1 if config.learner.gradient_checkpointing else size_of(text, LAYERS)
    return (
        4
        * size_of(text, HEADS)
        * config.longest_trajectory**2
        * (KEPT_SCORES * layers + LIVE_SCORES)
    )


def _tokens_of_a_pass(config: RunSettings, tree: Mapping[str, object]) -> int:
    """Most tokens that a rank processes at once."""
    learner, longest = config.learner, config.longest_trajectory
    if chosen_packing(tree, learner.packing) == "none":
        return min(learner.max_tokens_per_gpu, longest)
    if isinstance(config, OfflineConfig):
        sequences = 2 * config.batch_size  # a pair has two
    elif isinstance(config, Config) and config.environment is None:
        sequences = config.global_batch_size
    else:  # a session may have several paths
        return learner.max_tokens_per_gpu
    ranks = learner.world_size // learner.sequence_parallel_size
    return min(learner.max_tokens_per_gpu, -(-sequences // ranks) * longest)


def _activations(
    learner: LearnerConfig,
    text: Mapping[str, object],
    tokens: int,
    logits: int,
    checkpointing: bool,
) -> int:
    """Bytes beside a chunk of logits. With checkpointing, a layer is computed again when the
    logits are gone, so only what it takes beyond them counts."""
    item = 2 if learner.bf16 else 4
    kept, layer = activations(text, tokens, item, checkpointing)
    return kept + (max(0, layer - logits) if checkpointing else 0)


def memory_text(config: RunSettings, here: bool | None = None) -> str:
    """The estimate for people, and the memory of this machine if the run is on it.

    Args:
        here: whether it is. None: unless there is a cluster at RAY_ADDRESS.
    """
    here = starts_ray_here() if here is None else here
    needs, learner = estimate(config), config.learner
    on_cpu = learner.device == "cpu"
    device = "host" if on_cpu else "GPU"
    rows = [
        ("weights, gradients, optimizer states", device, needs.on_device),
        ("offloaded states and buffers", "host", needs.on_host),
        ("two buckets while a version is published, rank 0", "host", needs.buckets),
        ("a chunk of logits and the head's gradients", device, needs.logits),
    ]
    if needs.activations:
        rows.append((f"activations of {needs.tokens:,} tokens", device, needs.activations))
    if needs.scores:
        rows.append(("scores of the longest trajectory, tokens squared", device, needs.scores))
    totals = {
        memory: sum(size for _, where, size in rows if where == memory)
        for memory in sorted({device, "host"})
    }
    missing = "" if needs.activations else "activations and "
    for memory, total in totals.items():
        rows.append((f"total, without {missing}libraries", memory, total))
    note = (
        "\n  offloading saves nothing with learner.device: cpu, where all memory is host memory"
        if on_cpu and learner.offload_optimizer == "cpu"
        else ""
    )
    sharded, gpus = learner.zero_stage == 3, machine_gpus() if here and not on_cpu else {}
    by_deepspeed = "; the first two rows are DeepSpeed's own estimate" if sharded else ""
    return "\n".join(
        [
            "# learner memory, per rank",
            (
                f"  {needs.parameters / 1e6:.2f} M parameters, largest layer"
                f" {needs.largest_layer / 1e6:.2f} M; {learner.world_size} ranks on one machine,"
                f" zero_stage {learner.zero_stage}, offload_optimizer"
                f" {learner.offload_optimizer}, offload_param"
                f" {learner.offload_param}{by_deepspeed}"
            ),
            *(f"  {name:<50}{memory:<5}{shown(size):>13}" for name, memory, size in rows),
            *_other_stages(needs),
            "  activations grow with max_tokens_per_gpu;"
            f" {_other_activations(needs, learner)}{note}"
            + ("" if on_cpu else limit_text(config.rank_share, totals["GPU"], gpus)),
            *([f"  this machine: {_machine()}"] if here else []),
        ]
    )


def _other_activations(needs: Needs, learner: LearnerConfig) -> str:
    """What the other value of gradient_checkpointing would do."""
    other = f"gradient_checkpointing: {str(not learner.gradient_checkpointing).lower()}"
    if not needs.activations:
        return "they are not included, because config.json has other names of the model's sizes"
    return f"with {other} they would take {shown(needs.other_activations)}"


def _other_stages(needs: Needs) -> list[str]:
    """What another stage of ZeRO would take, in one line; none if the settings refuse the
    others."""
    found = [
        f"{stage} would take {shown(abs(size - needs.on_device))}"
        f" {'more' if size >= needs.on_device else 'less'}"
        for stage, size in needs.other_stages.items()
    ]
    if not found:
        return []
    time = "; 1 and 2 gather no weights, so a step takes less time"
    return [f"  learner.zero_stage: {', '.join(found)}{time}"]


def limit_text(fraction: float, needed: int, gpus: Mapping[str, int]) -> str:
    """What learner.gpu_memory_utilization leaves a rank; empty without a limit.

    Args:
        needed: estimated bytes of a rank.
        gpus: name and bytes of this machine's GPUs.
    """
    if fraction == 1:
        return ""
    text = f"\n  a rank may allocate {fraction:g} of its GPU (learner.gpu_memory_utilization)"
    if not gpus:
        return text
    most = fraction * min(gpus.values())
    enough = "" if needed <= most else ", less than this total: raise it, or learner.world_size"
    return f"{text}, {shown(most)} here{enough}"


def machine_gpus() -> dict[str, int]:
    """Name and bytes of each GPU of this machine; none for a run on a cluster."""
    if not starts_ray_here() or not any(Path(file).exists() for file in DRIVER_FILES):
        return {}
    import torch

    if not torch.cuda.is_available():
        return {}
    found = [
        torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())
    ]
    return {f"{number}: {gpu.name}": gpu.total_memory for number, gpu in enumerate(found)}


def _machine() -> str:
    total, available = usable_memory()
    host = f"{shown(total)} of memory, {shown(available)} of it free"
    gpus = [f"GPU {name} with {shown(size)}" for name, size in machine_gpus().items()]
    return f"{host}; " + (", ".join(gpus) or "no GPU")


def shown(size: float) -> str:
    """Bytes in GiB or MiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
