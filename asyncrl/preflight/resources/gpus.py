"""Whether the parts of a run fit the memory of a GPU. A plan can name one that this machine does
not have (`asyncrl plan CONFIG --gpu h100:8`)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from asyncrl.config import Config, ConfigError, RunSettings
from asyncrl.preflight.resources.memory_estimate import device_bytes, estimate, machine_gpus, shown
from asyncrl.preflight.resources.model_limits import kv_bytes_per_token

GIB = 1 << 30
KINDS = {
    "l4": 22.0,
    "a10": 22.0,
    "rtx4090": 23.5,
    "rtx5090": 31.3,
    "a100-40": 39.4,
    "l40s": 44.4,
    "a100": 79.1,
    "h100": 79.1,
    "h20": 95.0,
    "rtxpro6000": 94.9,
    "h200": 139.8,
    "b200": 178.3,
}
"""GiB that CUDA reports for these GPUs."""
ENGINE_EXTRA = 3 * GIB
"""What an engine takes beside weights and KV cache: activations of a step, and CUDA graphs."""
SURELY = 1.1
"""Share of the memory above which a run is refused. The estimate was 1.06 of a measured peak."""
NEARLY_FULL = 0.9
"""Share of the memory above which a plan warns: the estimate leaves out libraries."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """GPUs of one kind."""

    name: str
    count: int
    """GPUs of one machine."""
    size: int
    """Bytes of each."""


def named_gpus(text: str) -> Gpus:
    """The GPUs of a name and a number, such as `h100:8` or `h100`.

    Raises:
        ConfigError: the name is not known, or the number is not one.
    """
    found = re.fullmatch(r"([\w-]+)(?::([1-9][0-9]*))?", text.lower())
    if found is None or found[1] not in KINDS:
        raise ConfigError(
            f"--gpu {text!r} is not a kind of GPU and a number, such as h100:8; known kinds:"
            f" {', '.join(KINDS)}"
        )
    return Gpus(found[1], int(found[2] or 1), int(KINDS[found[1]] * GIB))


def _here(count: int) -> Gpus | None:
    """The smallest of this machine's largest `count` GPUs; None without any, or for a run on a
    cluster."""
    sizes = sorted(machine_gpus().values(), reverse=True)[:count]
    return Gpus("this machine's GPUs", len(sizes), sizes[-1]) if sizes else None


def refuse_small_gpus(config: RunSettings, version_bytes: int, gpus: Gpus | None = None) -> None:
    """Raise ConfigError if a learner rank, or the weights of an engine, cannot fit a GPU.

    Args:
        version_bytes: bytes of the whole model as it is published.
        gpus: those of other machines. None: this one's, if the run is here.
    """
    if config.learner.device == "cuda":
        on = gpus or _here(config.learner.world_size)
        needed = device_bytes(estimate(config))
        if on is not None and needed > SURELY * config.rank_share * on.size:
            raise ConfigError(
                f"a learner rank needs about {shown(needed)} of GPU memory, and may have"
                f" {shown(config.rank_share * on.size)} of {on.name}; {_remedies(config)}"
            )
    if _has_engines(config):
        assert isinstance(config, Config)
        on = gpus or _here(config.engines.num_replicas * config.engines.workers)
        if on is not None and (room := _room(config, on, version_bytes)) <= 0:
            given = config.engine_share * on.size * config.engines.workers
            raise ConfigError(
                f"an engine's weights take {shown(version_bytes)} and its activations about"
                f" {shown(given - room - version_bytes)}, and it may have {shown(given)} of"
                f" {config.engines.workers} of {on.name}; raise generator.tensor_parallel_size,"
                " or generator.gpu_memory_utilization"
            )


def _has_engines(config: RunSettings) -> bool:
    """Whether the run starts engines on GPUs."""
    return isinstance(config, Config) and config.owns_generators and config.engines.device == "cuda"


def _room(config: Config, gpus: Gpus, version_bytes: int) -> float:
    """Bytes for the KV cache of one engine, over all of its GPUs."""
    workers = config.engines.workers
    return config.engine_share * gpus.size * workers - version_bytes - ENGINE_EXTRA * workers


def gpu_text(config: RunSettings, gpus: Gpus, version_bytes: int) -> str:
    """What the parts of the run take of these GPUs, for people.

    Args:
        version_bytes: bytes of the whole model as it is published.

    Raises:
        ConfigError: the run uses no GPU, or a part does not fit.
    """
    if config.learner.device != "cuda" and not _has_engines(config):
        raise ConfigError(
            "--gpu: the run uses no GPU; set learner.device or generator.device: cuda"
        )
    refuse_small_gpus(config, version_bytes, gpus)
    lines = [f"# on {gpus.name}, {gpus.count} on a machine, with {shown(gpus.size)} each"]
    if config.learner.device == "cuda":
        needed, most = device_bytes(estimate(config)), config.rank_share * gpus.size
        warning = ", nearly full: " + _remedies(config) if needed > NEARLY_FULL * most else ""
        lines.append(
            f"  learner rank  {shown(needed)} of {shown(most)}, without libraries"
            f" ({needed / most:.0%}{warning})"
        )
    if isinstance(config, Config) and _has_engines(config):
        lines.append(f"  engine        {_engine(config, gpus, version_bytes)}")
    return "\n".join(lines)


def _engine(config: Config, gpus: Gpus, version_bytes: int) -> str:
    """Weights and KV cache of one engine over all of its GPUs."""
    room, width = _room(config, gpus, version_bytes), kv_bytes_per_token(config)
    cache = (
        "a KV cache whose size per token is not known"
        if width is None
        else f"a KV cache of about {int(room / width):,} tokens, enough for"
        f" {int(room / width / config.longest_trajectory):,} of the longest trajectories"
        f" ({config.max_num_seqs} run at once)"
    )
    return f"weights {shown(version_bytes)}, and room of {shown(room)}: {cache}"


def _remedies(config: RunSettings) -> str:
    """Settings that make a rank smaller, the cheapest first."""
    learner = config.learner
    ways = {
        "set learner.gradient_checkpointing: true": not learner.gradient_checkpointing,
        "raise learner.world_size": learner.zero_stage == 3,
        "set learner.zero_stage: 3": learner.zero_stage != 3,
        "set learner.offload_optimizer: cpu": learner.zero_stage == 3
        and learner.offload_optimizer == "none",
        "raise learner.gpu_memory_utilization": config.rank_share < 1,
        "lower learner.max_tokens_per_gpu": True,
        "train an adapter (lora)": config.lora is None,
    }
    return ", or ".join(way for way, possible in ways.items() if possible)
