"""The training state of one rank: the engine, its parameters, counters and learning rate."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import cast

import torch
from deepspeed import DeepSpeedEngine
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from asyncrl.algorithms.objective import own_metrics
from asyncrl.algorithms.schedules import learning_rate_at
from asyncrl.config import PolicyGradient, RewardModelConfig
from asyncrl.learning.engine import checkpoint, zero
from asyncrl.learning.engine.threads import Threads
from asyncrl.learning.engine.whole import WholeParameter
from asyncrl.learning.spec import LearnerSpec, OnlineObjective
from asyncrl.learning.steps.quarantine import NormWatch
from asyncrl.models.adapters import base_name, published_name
from asyncrl.models.supported import Packing as Packed
from asyncrl.models.ulysses import SequenceRanks
from asyncrl.runtime.files.shared import Written
from asyncrl.runtime.processes.gpu_memory import limit_gpu_memory
from asyncrl.runtime.processes.interfaces import interface_of, interface_variables
from asyncrl.weights.classifier import SCORE, classifier_table
from asyncrl.weights.gather import ShardedParameter
from asyncrl.weights.published import VersionTable, version_table

COLLECTIVES_LONGER_S = 60.0
"""Seconds by which a collective's timeout exceeds that of a call. The driver then finds a rank that
hangs before the rank's peers do."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """The address and port where the ranks meet. Only rank 0 has the listening socket."""

    address: str
    port: int
    listener: socket.socket | None = None

    @classmethod
    def at(cls, address: str) -> Meeting:
        """A meeting on a free port of `address`, for rank 0."""
        listener = zero.listening_socket(address)
        return cls(address, int(listener.getsockname()[1]), listener)


@dataclass
class LearnerState:
    """All state that the steps of one rank read and change. Complete when constructed."""

    rank: int
    spec: LearnerSpec
    engine: DeepSpeedEngine
    sharded: HfDeepSpeedConfig | None
    """transformers shards every model that it loads while this object exists. It must exist as long
    as the engine. None: each rank has all weights."""
    table: VersionTable
    """The tensors that are published and exported."""
    parameters: dict[str, ShardedParameter]
    """Every parameter of the checkpoint once, by its name in transformers, and a reward model's
    score. A tied weight is under its first name."""
    adapter: dict[str, ShardedParameter]
    """The adapter's matrices by their published names; empty without an adapter."""
    packing: Packed
    own_metrics: tuple[str, ...]
    """Names of the metrics of the user's loss."""
    device: torch.device
    learning_rate: float
    """Peak learning rate of the following steps."""
    warmup_steps: int
    threads: Threads
    applied: int = 0
    """Steps applied since the optimizer's reset: the policy version, and the position in the
    learning-rate schedule."""
    trained_tokens: int = 0
    """Loss tokens of all applied policy steps, including earlier attempts."""
    norms: NormWatch = field(default_factory=NormWatch)

    @cached_property
    def parameter_count(self) -> int:
        """Elements of all parameters of the checkpoint."""
        return sum(zero.full_size(parameter) for parameter in self.parameters.values())

    @property
    def data_rank(self) -> int:
        """This rank's index among the data-parallel ranks. It selects the rank's micro-batches."""
        return self.rank // self.spec.learner.sequence_parallel_size

    @property
    def sequence_rank(self) -> int:
        """This rank's index among the ranks that share a row. It selects the rank's tokens."""
        return self.rank % self.spec.learner.sequence_parallel_size

    @property
    def value_learning_rate(self) -> float:
        """Peak learning rate of the value head."""
        own = self.spec.objective.value_learning_rate
        return self.learning_rate if own is None else own

    def scheduled(self, peak: float) -> float:
        """Learning rate of the next step, for a schedule with this peak."""
        return learning_rate_at(
            self.applied,
            peak,
            self.spec.learner.schedule.model_copy(update={"warmup_steps": self.warmup_steps}),
            self.spec.max_steps,
            self.spec.batch_sizes,
        )

    def reset_optimizer(self, learning_rate: float, warmup_steps: int) -> None:
        """Reset the optimizer's state and all counters, and set the peak learning rate."""
        zero.fresh_optimizer(self.engine)
        self.norms.forget()
        self.learning_rate, self.warmup_steps = learning_rate, warmup_steps
        self.applied = self.trained_tokens = 0

    def save(self, directory: Path) -> dict[str, Written]:
        """Write weights, optimizer, counters and RNG state under `directory`. Returns this rank's
        files: name → size and checksum."""
        counters = {
            "world_size": self.spec.learner.world_size,
            "zero_stage": self.spec.learner.zero_stage,
            "applied": self.applied,
            "trained_tokens": self.trained_tokens,
        }
        return checkpoint.save_rank(
            self.engine, directory, self.rank, counters, self.norms.known, bool(self.adapter)
        )

    def load(self, directory: Path) -> None:
        """Restore the state of `save(directory)`. Learning rate and schedule keep their current
        values, because a resume may change them.

        Raises:
            ValueError: the directory cannot be read, or its shards cannot be converted to this
                number of ranks and this stage.
        """
        counters, norms = checkpoint.load_rank(
            self.engine,
            directory,
            self.rank,
            self.spec.learner.world_size,
            self.spec.learner.zero_stage,
            self.spec.run_directory / "converted",
            bool(self.adapter),
        )
        self.applied, self.trained_tokens = counters["applied"], counters["trained_tokens"]
        self.norms = NormWatch(norms)


def join_ranks(rank: int, spec: LearnerSpec, meeting: Meeting, address: str) -> float:
    """Join the process group of all ranks (a collective). Returns the seconds that it took.

    Args:
        address: where the other ranks reach this one.
    """
    began = time.monotonic()
    learner = spec.learner
    # By default, gloo takes the address of the host's name. That is often 127.0.0.1 or 127.0.1.1,
    # where ranks of other nodes meet nobody.
    if (interface := interface_of(address)) is not None:
        for name, value in interface_variables(interface).items():
            os.environ.setdefault(name, value)
    zero.join_process_group(
        rank,
        learner.world_size,
        meeting.address,
        meeting.port,
        "nccl" if learner.device == "cuda" else "gloo",
        meeting.listener,
        learner.call_timeout_s + COLLECTIVES_LONGER_S,
    )
    return time.monotonic() - began


def load_state(rank: int, spec: LearnerSpec) -> LearnerState:
    """Load the model and build the engine. The ranks must have joined (a collective).

    Raises:
        ValueError: the learner cannot train this model.
        FunctionError: the user's loss failed on made-up numbers.
    """
    learner, objective = spec.learner, spec.objective
    algorithm = objective.algorithm if isinstance(objective, OnlineObjective) else None
    scores = isinstance(objective, RewardModelConfig)
    threads = Threads(learner.num_threads)
    limit_gpu_memory(learner.device, spec.rank_share)
    torch.manual_seed(spec.seed * 1_000_003 + rank)
    # Make the table before the engine exists: afterwards, transformers shards every model.
    table = version_table(spec.model.path)
    scoring = classifier_table(spec.model.path, table) if scores else None
    metrics = own_metrics(algorithm.loss) if isinstance(algorithm, PolicyGradient) else ()
    engine, sharded = zero.start_engine(
        spec.model.path,
        learner,
        spec.temperature,
        algorithm is not None and algorithm.entropy_coef > 0,
        objective.has_value_head,
        SequenceRanks.join(learner.sequence_parallel_size),
        spec.lora,
        spec.seed,
        value_bias=not scores,
    )
    policy = zero.policy_of(engine)
    whole = sharded is None
    named = {
        name: _as_sharded(parameter, whole) for name, parameter in policy.model.named_parameters()
    }
    parameters = {own: named[name] for name in named if (own := base_name(name))}
    adapter = {own: named[name] for name in named if (own := published_name(name))}
    if different := set(parameters) ^ set(table.parameters):
        raise ValueError(
            f"model.path = {spec.model.path!r}: transformers loads different parameters with and"
            f" without weights, first {sorted(different)[0]!r}; use a checkpoint that it loads the"
            " same way every time"
        )
    if scoring is not None:
        assert policy.value_head is not None
        parameters[SCORE] = _as_sharded(policy.value_head.weight, whole)
    return LearnerState(
        rank=rank,
        spec=spec,
        engine=engine,
        sharded=sharded,
        table=table if scoring is None else scoring,
        parameters=parameters,
        adapter=adapter,
        packing=policy.packing,
        own_metrics=metrics,
        device=torch.device("cuda" if learner.device == "cuda" else "cpu"),
        learning_rate=spec.learning_rate,
        warmup_steps=learner.schedule.warmup_steps,
        threads=threads,
    )


def _as_sharded(parameter: torch.Tensor, whole: bool) -> ShardedParameter:
    """The parameter with the attributes that ZeRO-3 adds.

    Args:
        whole: whether each rank has all of it.
    """
    return WholeParameter(parameter) if whole else cast("ShardedParameter", parameter)
