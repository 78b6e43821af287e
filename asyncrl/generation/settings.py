"""The settings of the generator application. `serve deploy` reads them from YAML, and a job makes
them from its config. This module does not import vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from asyncrl.config import GeneratorConfig, Section
from asyncrl.config.config import MOST_SEQUENCES, fetch_timeout, stall, start
from asyncrl.config.rules import check_nodes
from asyncrl.config.schema import InFlight


class GeneratorApp(Section):
    """One generator application."""

    model: str
    """Hugging Face checkpoint directory."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the model's weights, and of every version that it takes."""
    max_model_len: int | None = Field(default=None, gt=0)
    """Longest prompt plus completion, in tokens. Default: the model's context."""
    generator: GeneratorConfig = GeneratorConfig()
    """Replicas, device, cache, and what an update does to generations in flight. A standing
    generator on CPU without kv_cache_memory_bytes gets room for its longest request: at least 256
    MiB, at most 4 GiB."""
    seed: int = 0
    """Seed of the engine; a request's own seed takes precedence."""
    rollout_stop: list[str] = Field(default_factory=list)
    """Further stop strings: special tokens, or strings that a decoded text can contain."""
    rollout_stop_token_ids: list[int] = Field(default_factory=list)
    """Further stop token ids."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template for its end of turn, which ends a completion. A job sets it to
    data.chat_template_kwargs."""
    max_lora_rank: int | None = Field(default=None, gt=0, le=512)
    """Take versions that are adapters (LoRA) of at most this rank, and no others. None = take whole
    weights. A job sets it to lora.r."""
    max_loras: int = Field(default=4, gt=0)
    """Adapters that vLLM computes with at the same time. Requests with further ones wait. A job
    sets it to staleness.max_staleness + 2."""
    cache_block: int | None = Field(default=None, gt=0)
    """Tokens of a KV cache block; the prefix cache shares whole blocks. Default: vLLM's choice, 128
    on CPU, mostly 16 on GPUs. A job with an environment sets 32 on CPU."""
    http: bool = False
    """Also serve HTTP: `/v1/completions`, `/v1/chat/completions`, `/v1/responses`, `/v1/messages`,
    `/v1/models`, `/health` and `/metrics`, under the application's route_prefix. A job's own
    generators do not serve HTTP."""
    num_gpus: float | None = Field(default=None, gt=0)
    """GPUs that a replica declares to Ray (device: cuda), where it shares one: a fraction of at
    least generator.gpu_memory_utilization, unless it `sleeps`. Default: the engine's devices. A job
    sets it with `placement: share` and `colocate`."""
    sleeps: bool = False
    """Free the GPU's memory while the replica rests (device: cuda). A job sets it with `placement:
    colocate`; nothing else makes a replica rest."""
    served_name: str | None = Field(default=None, min_length=1)
    """Name of the model in HTTP requests and responses. Default: the last part of `model`."""
    fetch_timeout_s: float | None = Field(default=None, gt=0)
    """Seconds that a replica may take to fetch a version. Default: derived from the size of the
    model's files."""
    replace_after_s: float | None = Field(default=None, gt=0)
    """Seconds after which a replica that stays below the newest version is replaced. Default: twice
    the time to fetch one."""

    @model_validator(mode="after")
    def settings_act(self) -> GeneratorApp:
        check_nodes(self.generator)
        # Not model_fields_set: a replica gets every field, also those that nobody set.
        changed = self.max_loras != type(self).model_fields["max_loras"].default
        if self.max_lora_rank is None and changed:
            raise ValueError(
                f"max_loras = {self.max_loras} only has an effect with max_lora_rank; leave it out,"
                " or set that"
            )
        if self.max_lora_rank is not None and self.generator.nnodes > 1:
            raise ValueError(
                f"max_lora_rank does not work with generator.nnodes = {self.generator.nnodes},"
                " since vLLM reads an adapter's files on every node; use engines on one node"
            )
        if self.http and self.generator.min_replicas is not None:
            raise ValueError(
                f"generator.min_replicas = {self.generator.min_replicas} is a training job's"
                " setting; leave it out, and set num_replicas"
            )
        check_served_name(self.served_name, self.http)
        self._check_num_gpus()
        self._check_sleeps()
        return self

    def _check_num_gpus(self) -> None:
        if self.num_gpus is None:
            return
        generator = self.generator
        if generator.device != "cuda":
            raise ValueError(
                f"num_gpus = {self.num_gpus:g} needs generator.device: cuda; set that, or leave"
                " num_gpus out"
            )
        if generator.workers > 1 or self.num_gpus > 1:
            raise ValueError(
                f"num_gpus = {self.num_gpus:g} is for engines on a fraction of one GPU; leave it"
                " out, and a replica gets all GPUs of its engine"
            )
        if self.num_gpus < generator.gpu_share and not self.sleeps:
            raise ValueError(
                f"num_gpus = {self.num_gpus:g} is below generator.gpu_memory_utilization ="
                f" {generator.gpu_share:g}; raise it, or lower the other"
            )

    def _check_sleeps(self) -> None:
        if not self.sleeps:
            return
        if self.generator.device != "cuda":
            raise ValueError(
                "sleeps: true needs generator.device: cuda, since vLLM cannot free memory on the"
                " CPU; set that, or leave sleeps out"
            )
        if self.http or self.num_gpus is None:
            raise ValueError(
                "sleeps: true only has an effect in a job with placement: colocate; leave it out"
            )
        if self.in_flight != "recompute":
            raise ValueError(
                "sleeps: true does not work with generator.in_flight ="
                f" {self.in_flight!r}, since a rest frees the KV cache; use recompute"
            )

    @property
    def in_flight(self) -> InFlight:
        """How generations in flight at a weight update continue."""
        return self.generator.in_flight or "recompute"

    @property
    def max_num_seqs(self) -> int:
        """Sequences that one engine runs concurrently."""
        return self.generator.max_num_seqs or MOST_SEQUENCES[self.generator.device]

    @property
    def fetch_within_s(self) -> float:
        """Seconds that a replica may take to fetch a version."""
        return self.fetch_timeout_s or fetch_timeout(self.model).value

    @property
    def replace_within_s(self) -> float:
        """Seconds after which a replica that stays below the newest version is replaced."""
        return self.replace_after_s or 2 * self.fetch_within_s

    @property
    def start_timeout_s(self) -> float:
        """Seconds that a replica may take from placement to its first answer."""
        return self.generator.start_timeout_s or start(self.model).value

    @property
    def stall_timeout_s(self) -> float:
        """Seconds without an answer after which an engine is replaced."""
        return self.generator.stall_timeout_s or stall(self.model).value

    @property
    def model_name(self) -> str:
        """What HTTP requests call the model."""
        return self.served_name or Path(self.model).name


def registry_name(app_name: str) -> str:
    """Name of a Serve application's version registry."""
    return f"{app_name}-versions"


def check_served_name(served_name: str | None, http: bool) -> None:
    """Refuse a name of the model in HTTP responses where there are none.

    Raises:
        ValueError: it has no effect.
    """
    if served_name is not None and not http:
        raise ValueError(
            f"served_name = {served_name!r} needs http: true; set that, or leave served_name out"
        )
