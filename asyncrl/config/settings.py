"""The settings of a run with generators, and the numbers derived from them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from asyncrl.config.algorithm import AlgorithmConfig, PolicyGradient
from asyncrl.config.distillation import TeacherModel
from asyncrl.config.run_settings import Limits, RunSettings
from asyncrl.config.schema import (
    AttachedGenerators,
    DataConfig,
    Environment,
    EvalConfig,
    EvalSet,
    GeneratorConfig,
    RewardConfig,
    RewardFunction,
    RolloutConfig,
    Source,
    StalenessConfig,
    WarmStartConfig,
    WeightsConfig,
    sources_of,
)
from asyncrl.contracts.section import ByKey

ENVIRONMENT, BUILTIN = "environment", "asyncrl.rewards.builtin:environment"
"""Name and function of the reward that an environment gives."""

LEARNING_RATE = 1e-6

RANK_SHARES = {"share": 0.5}
ENGINE_SHARES = {"share": 0.35, "colocate": 0.85}
"""Placement → gpu_memory_utilization of a rank or an engine on GPUs. The rest is for CUDA itself,
and with `share` for a reference policy. With `colocate` each side has the GPU in its shift."""
REFERENCE_SHARE = 0.1
"""gpu_memory_utilization of a reference policy or teacher with `share`."""

RANK_IN_SHIFTS, REPLICA_IN_SHIFTS = 0.6, 0.4
"""GPUs that a rank and a replica declare to Ray when they take shifts. The numbers say nothing
about memory: one rank and one replica fit on a GPU, and two ranks, or a rank and two replicas, do
not. Two replicas fit on a GPU without a rank, so Ray needs as many GPUs as ranks."""


class Settings(RunSettings):
    """One training run with generators."""

    max_steps: int = Field(ge=0)
    """Optimizer steps after which the run ends. The count starts at version 0 and includes earlier
    attempts and the steps of `checkpoint.load`. 0 = only evaluate the model."""
    placement: Literal["decoupled", "colocate", "share"] = "decoupled"
    """`decoupled`: generators and learner have devices of their own and work at the same time.
    `share`: they work at the same time on the same devices, and each has a fraction of a GPU's
    memory. `colocate`: they use the same devices and take shifts, so the staleness is 0. Generators
    rest while the learner steps. On a GPU, the side that waits frees its memory."""
    data: DataConfig
    rollout: RolloutConfig
    environment: Environment | None = None
    """An environment, or an agent that runs as it is. None: each trajectory is one completion of
    its prompt."""
    reward: RewardConfig = Field(default=RewardConfig(), validate_default=True)
    generator: Annotated[AttachedGenerators | GeneratorConfig, ByKey()] = GeneratorConfig()
    """The run's own generators, or those of a standing endpoint (`attach`)."""
    algorithm: AlgorithmConfig = PolicyGradient()
    """A policy gradient, or online DPO (`preference`)."""
    staleness: StalenessConfig = Field(default=StalenessConfig(), validate_default=True)
    weights: WeightsConfig = WeightsConfig()
    eval: EvalConfig = EvalConfig()
    warm_start: WarmStartConfig | None = None
    """None = no warm start."""

    @field_validator("reward")
    @classmethod
    def rewards_are_given(cls, reward: RewardConfig, info: ValidationInfo) -> RewardConfig:
        """With an environment, its own rewards are the only ones unless reward.functions is
        given."""
        if reward.functions or "environment" not in info.data:
            return reward
        if info.data["environment"] is None:
            raise ValueError("functions is empty; name at least one function")
        own = RewardFunction(function=BUILTIN)
        return reward.model_copy(update={"functions": {ENVIRONMENT: own}})

    @field_validator("staleness")
    @classmethod
    def shifts_have_no_staleness(
        cls, staleness: StalenessConfig, info: ValidationInfo
    ) -> StalenessConfig:
        """With `placement: colocate`, staleness.max_staleness is 0 unless it is given."""
        given = "max_staleness" in staleness.model_fields_set
        if given or info.data.get("placement") != "colocate":
            return staleness
        return staleness.model_copy(update={"max_staleness": 0})

    @property
    def engines(self) -> GeneratorConfig:
        """The settings of the generators. Those of a standing endpoint are known once the run has
        asked it."""
        generator = self.generator
        return generator.engines if isinstance(generator, AttachedGenerators) else generator

    @property
    def owns_generators(self) -> bool:
        """Whether the run starts its own generators."""
        return isinstance(self.generator, GeneratorConfig)

    @property
    def updates_drain(self) -> bool:
        """Whether an update waits for the generations in flight. Loading an adapter never does."""
        return self.engines.in_flight == "drain" and self.lora is None

    @property
    def max_loras(self) -> int:
        """Adapters that one engine computes with in one step.

        Under the staleness bound S, requests in flight use at most S + 1 versions. One more is
        loaded before its first request, and replaces the least recently used one. With fewer
        adapters, requests of a new version would wait for old ones to end.
        """
        return self.staleness.max_staleness + 2

    @property
    def training_sources(self) -> tuple[Source, ...]:
        """The sources of the training prompts."""
        return sources_of(self.data.train)

    @property
    def limits(self) -> Limits:
        return Limits(
            self.staleness.max_staleness,
            self.rollout.n_samples_per_prompt,
            self.groups_per_step,
            self.staleness.masks,
            tuple(self.environment.train_ends) if self.environment else (),
            self.observe.trained_tokens and self.algorithm.preference is None,
        )

    @property
    def learning_rate(self) -> float:
        given = self.learner.learning_rate
        return LEARNING_RATE if given is None else given

    @property
    def last_step(self) -> int:
        return self.max_steps

    @property
    def num_cpus(self) -> float:
        """Logical CPUs of the learner and the run's own generators. The plan counts every part."""
        generators = self.engines.num_replicas * self.engines.nnodes * self.owns_generators
        return self.learner.world_size * self.learner.num_cpus + generators * self.engines.num_cpus

    @property
    def rank_share(self) -> float:
        shared = RANK_SHARES.get(self.placement, 1.0) if self.learner.device == "cuda" else 1.0
        return self.learner.gpu_memory_utilization or shared

    @property
    def engine_share(self) -> float:
        """Fraction of a GPU's memory that one engine uses."""
        return self.engines.gpu_memory_utilization or ENGINE_SHARES.get(
            self.placement, self.engines.gpu_share
        )

    @property
    def rank_gpus(self) -> float:
        if self.takes_shifts_on_gpus:
            return RANK_IN_SHIFTS
        return self._gpus(self.learner.device, self.rank_share)

    @property
    def replica_gpus(self) -> float:
        """GPUs that one replica of the run's own generators declares to Ray, on each of its
        nodes."""
        generator = self.engines
        if self.takes_shifts_on_gpus:
            return REPLICA_IN_SHIFTS
        return self._gpus(generator.device, self.engine_share, float(generator.workers_per_node))

    @property
    def reference_gpus(self) -> float:
        """GPUs that the process of a reference policy or teacher declares to Ray."""
        frozen = self.algorithm.frozen
        fraction = None if frozen is None else frozen.gpu_memory_utilization
        return self._gpus(self.learner.device, fraction or REFERENCE_SHARE)

    @property
    def shares_gpus(self) -> bool:
        """Whether generators and learner have fractions of the same GPUs."""
        return self.placement == "share" and self.learner.device == "cuda"

    @property
    def takes_shifts_on_gpus(self) -> bool:
        """Whether generators and learner take shifts on the same GPUs."""
        return self.placement == "colocate" and self.learner.device == "cuda"

    @property
    def replicas_share_gpus(self) -> bool:
        """Whether a GPU of a replica is also a rank's, at the same time or in shifts."""
        return self.shares_gpus or self.takes_shifts_on_gpus

    def _gpus(self, device: str, fraction: float, alone: float = 1.0) -> float:
        if device != "cuda":
            return 0.0
        return fraction if self.placement == "share" else alone

    @property
    def keeps_snapshot(self) -> bool:
        """Whether the warm start stores a snapshot of the learner."""
        return self.warm_start is not None

    @property
    def reference_interval(self) -> int | None:
        return self.algorithm.update_interval

    @property
    def models(self) -> dict[str, str]:
        loads = self.algorithm.frozen is not None
        reference = {self.reference_setting: self.reference_path} if loads else {}
        return {"model.path": self.model.path} | reference

    @property
    def bucket_bytes(self) -> int:
        """Size of a bucket of published or exported weights, in bytes."""
        return self.weights.bucket_bytes

    @property
    def groups_per_step(self) -> int:
        """Groups in the batch of one step."""
        return self.rollout.rollout_batch_size // self.rollout.num_steps_per_rollout

    @property
    def global_batch_size(self) -> int:
        """Trajectories in the batch of one step."""
        return self.groups_per_step * self.rollout.n_samples_per_prompt

    @property
    def completions_per_group(self) -> int:
        """Completions that the generators make for a group: its trajectories, and the baseline of
        advantage: remax."""
        return self.rollout.n_samples_per_prompt + self.algorithm.needs_baseline

    @property
    def longest_trajectory(self) -> int:
        """Longest possible trajectory, in tokens: prompt and completion, or a row of a session."""
        if self.environment is not None and self.data.max_length is not None:
            return self.data.max_length
        longest = self.data.max_prompt_length + self.rollout.max_completion_length
        return longest if self.data.max_length is None else min(longest, self.data.max_length)

    @property
    def longest_text(self) -> str:
        if self.longest_trajectory == self.data.max_length:
            return f"data.max_length = {self.data.max_length}"
        lengths = (
            f"data.max_prompt_length {self.data.max_prompt_length} + rollout.max_completion_length"
            f" {self.rollout.max_completion_length}"
        )
        return f"{lengths} = {self.longest_trajectory}"

    @property
    def longest_prompt(self) -> int:
        """Longest possible prompt, in tokens. It leaves at least one token of max_length for the
        completion."""
        longest = self.data.max_prompt_length
        return longest if self.data.max_length is None else min(longest, self.data.max_length - 1)

    @property
    def evaluation_sets(self) -> dict[str, EvalSet]:
        """Name → set, in the order of evaluation: the two sets of eval.data, then eval.sets. All
        settings but max_completion_length are filled in."""
        own = {"greedy": EvalSet(temperature=0.0), "sampled": EvalSet()}
        sets = {} if self.eval.data is None else own
        default = {
            "data": self.eval.data,
            "max_prompts": self.eval.max_prompts,
            "temperature": self.rollout.temperature,
            **self.rollout.kept_tokens,
        }
        return {
            name: chosen.model_copy(
                update={key: one for key, one in default.items() if getattr(chosen, key) is None}
            )
            for name, chosen in (sets | self.eval.sets).items()
        }

    def completion_room(self, prompt_tokens: int) -> int:
        """Tokens available for the completion of a prompt of this length."""
        return completion_room(
            self.rollout.max_completion_length, self.data.max_length, prompt_tokens
        )

    @property
    def judges_length(self) -> bool:
        """Whether data.length_policy applies: a prompt alone may reach max_length, or there are
        supervised rows."""
        return self.data.max_length is not None and (
            self.data.max_length <= self.data.max_prompt_length or self.warm_start is not None
        )

    @property
    def longest_request(self) -> int:
        """Longest request to a generator, in tokens: a trajectory, a probe of the log-prob check,
        or an evaluation's completion with its prompt."""
        longest = max(
            (chosen.max_completion_length or 0 for chosen in self.eval.sets.values()), default=0
        )
        return max(self.longest_trajectory, self.longest_prompt + max(self.probe_tokens, longest))

    @property
    def probe_tokens(self) -> int:
        """Tokens to sample for each probe of the log-prob check. The learner must fit prompt and
        probe into one micro-batch."""
        return min(self.weights.probe_tokens, self.learner.max_tokens_per_row - self.longest_prompt)

    @property
    def reference_path(self) -> str:
        """Checkpoint of the reference policy or teacher that the run loads."""
        frozen = self.algorithm.frozen
        if isinstance(frozen, TeacherModel):
            return frozen.path
        return (frozen.ref_load if frozen is not None else None) or self.model.path

    @property
    def reference_setting(self) -> str:
        """The setting that names `reference_path`."""
        teacher = isinstance(self.algorithm.frozen, TeacherModel)
        return self.frozen_setting if teacher else f"{self.frozen_setting}.ref_load"

    @property
    def frozen_setting(self) -> str:
        """The section of the frozen policy that the run loads."""
        teacher = isinstance(self.algorithm.frozen, TeacherModel)
        return "algorithm.distillation.teacher" if teacher else "algorithm.reference"

    @property
    def max_outstanding(self) -> int:
        """Most outstanding groups, when every version is committed."""
        return (
            self.staleness.max_staleness + 1
        ) * self.groups_per_step + self.staleness.over_sampling

    @property
    def groups_at_once(self) -> int:
        """Most groups that may be generated at once."""
        return min(self.rollout.max_concurrency or self.max_outstanding, self.max_outstanding)

    @property
    def scores_evaluation_apart(self) -> bool:
        """Whether Ray places evaluation's reward processes where their GPUs are, instead of next to
        the driver."""
        return self.reward.num_gpus > 0 and self.eval.evaluates

    @property
    def accuracy(self) -> str:
        """Name of the reward function whose mean is reported as accuracy."""
        return self.eval.accuracy or next(iter(self.reward.functions))

    @property
    def logprob_tolerance(self) -> float:
        """Bound of `logprob_statistic`, in nats."""
        return self.weights.logprob_tolerance or (1e-4 if self.logprob_statistic == "max" else 0.03)

    @property
    def logprob_statistic(self) -> Literal["max", "mean"]:
        """The statistic that `logprob_tolerance` bounds. It is the mean in bfloat16, which rounds a
        logit of 20 by up to 0.04 and a log-prob of several logits by more.

        In the quickstart's model, log-probs differ by 0.01 on average and by at most 0.2 over 2,048
        tokens.
        """
        return "max" if self.model.dtype == "float32" and not self.learner.bf16 else "mean"


def completion_room(longest: int, max_length: int | None, prompt_tokens: int) -> int:
    """Tokens available for a completion: at most `longest`, and at most `max_length` together with
    the prompt."""
    return longest if max_length is None else min(longest, max_length - prompt_tokens)
