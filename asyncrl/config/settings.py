"""The settings of a run with generators, and the numbers derived from them."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, ValidationError, model_validator

from asyncrl.config.run_settings import Limits, RunSettings, located, root_of_runs
from asyncrl.config.schema import (
    AgentConfig,
    AlgorithmConfig,
    DataConfig,
    EnvironmentConfig,
    EvalConfig,
    EvalSet,
    GeneratorConfig,
    RewardConfig,
    RolloutConfig,
    Source,
    StalenessConfig,
    WarmStartConfig,
    WeightsConfig,
    is_hub_data,
    is_hub_name,
    sources_of,
)

__all__ = ["Settings", "completion_room"]


ENVIRONMENT, BUILTIN = "environment", "asyncrl.rewards.builtin:environment"
"""Name and function of the reward that an environment gives."""
AGENT = "asyncrl.environments.agent:play"
"""Function of the environment that an agent program is."""

SHARES = {
    "share": {"learner": 0.5, "generator": 0.35},
    "colocate": {"generator": 0.85},
}
"""Placement → section → gpu_memory_utilization on GPUs. The rest is for CUDA itself, and with
`share` for a reference policy. With `colocate` each side has the GPU in its turn."""

RANK_IN_TURNS, REPLICA_IN_TURNS = 0.6, 0.4
"""GPUs that a rank and a replica declare to Ray when they take turns. The numbers say nothing about
memory: one rank and one replica fit on a GPU, and two ranks, or a rank and two replicas, do not.
Two replicas fit on a GPU without a rank, so Ray needs as many GPUs as ranks."""


class Settings(RunSettings):
    """One training run with generators."""

    PATHS: ClassVar[tuple[tuple[str, str], ...]] = (
        *RunSettings.PATHS,
        ("algorithm", "ref_load"),
        ("warm_start", "data"),
    )
    MODELS: ClassVar[tuple[tuple[str, str], ...]] = (
        *RunSettings.MODELS,
        ("algorithm", "ref_load"),
    )
    DATA: ClassVar[tuple[tuple[str, str], ...]] = (*RunSettings.DATA, ("warm_start", "data"))

    max_steps: int = Field(gt=0)
    """Optimizer steps after which the run ends. The count starts at version 0 and includes earlier
    attempts and the steps of `checkpoint.load`."""
    placement: Literal["decoupled", "colocate", "share"] = "decoupled"
    """`decoupled`: generators and learner have devices of their own and work at the same time.
    `share`: they work at the same time on the same devices, and each has a fraction of a GPU's
    memory. `colocate`: they use the same devices and take turns, so the staleness is 0. Generators
    rest while the learner steps. On a GPU, the side that waits frees its memory."""
    data: DataConfig
    rollout: RolloutConfig
    reward: RewardConfig
    environment: EnvironmentConfig | None = None
    """None: each trajectory is one completion of its prompt."""
    agent: AgentConfig | None = None
    """An agent program as the environment."""
    generator: GeneratorConfig = GeneratorConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    staleness: StalenessConfig = StalenessConfig()
    weights: WeightsConfig = WeightsConfig()
    eval: EvalConfig = EvalConfig()
    warm_start: WarmStartConfig = WarmStartConfig()

    @model_validator(mode="before")
    @classmethod
    def environments_give_rewards(cls, tree: object) -> object:
        """With an environment, its own rewards are the only ones unless reward.functions is
        given."""
        if not isinstance(tree, dict) or tree.get("environment") is None:
            return tree
        reward = tree.get("reward", {})
        if not isinstance(reward, dict):
            return tree
        return {**tree, "reward": {"functions": {ENVIRONMENT: {"function": BUILTIN}}, **reward}}

    @model_validator(mode="before")
    @classmethod
    def agents_are_environments(cls, tree: object) -> object:
        """The section `agent` gives the function of the environment. It must come after the
        validators that read `environment`: pydantic runs these in reverse order."""
        if not isinstance(tree, dict) or not isinstance(tree.get("agent"), dict):
            return tree
        environment = tree.get("environment") or {}
        if not isinstance(environment, dict):
            return tree
        try:
            agent = AgentConfig.model_validate(tree["agent"])
        except ValidationError:  # the field `agent` reports it
            return tree
        if environment.get("function", AGENT) != AGENT:
            raise ValueError(
                f"environment.function = {environment['function']!r} and the section agent are both"
                " given; leave one out"
            )
        return {
            **tree,
            "environment": {
                **environment,
                "function": AGENT,
                "arguments": agent.model_dump(mode="json"),
                "url": True,
            },
        }

    @model_validator(mode="before")
    @classmethod
    def turns_have_no_staleness(cls, tree: object) -> object:
        """With `placement: colocate`, staleness.max_staleness is 0 unless it is given."""
        if not isinstance(tree, dict) or tree.get("placement") != "colocate":
            return tree
        staleness = tree.get("staleness", {})
        if not isinstance(staleness, dict):
            return tree
        return {**tree, "staleness": {"max_staleness": 0, **staleness}}

    @model_validator(mode="before")
    @classmethod
    def shared_gpus_have_room_for_both(cls, tree: object) -> object:
        """With `placement: share` or `colocate` on GPUs, each side has a fraction of the memory
        unless it is given."""
        if not isinstance(tree, dict) or tree.get("placement") not in ("share", "colocate"):
            return tree
        found = dict(tree)
        for section, fraction in SHARES[tree["placement"]].items():
            side = tree.get(section, {})
            if isinstance(side, dict) and side.get("device") == "cuda":
                found[section] = {"gpu_memory_utilization": fraction, **side}
        return found

    @model_validator(mode="before")
    @classmethod
    def set_paths_are_absolute(cls, tree: object) -> object:
        """Make the paths of evaluation sets and of a teacher absolute, like those of
        `paths_are_absolute`."""
        tree = _with_located_teacher(tree)
        evaluation = tree.get("eval") if isinstance(tree, dict) else None
        if (
            not isinstance(tree, dict)
            or not isinstance(evaluation, dict)
            or not isinstance(evaluation.get("sets"), dict)
        ):
            return tree
        root = root_of_runs(tree.get("runs_root"))
        sets = {
            name: _located_set(chosen, root, name) for name, chosen in evaluation["sets"].items()
        }
        return {**tree, "eval": {**evaluation, "sets": sets}}

    @property
    def training_sources(self) -> tuple[Source, ...]:
        """The sources of the training prompts."""
        return sources_of(self.data.train)

    @property
    def limits(self) -> Limits:
        """The bounds that run.json records for an attempt."""
        return Limits(
            self.staleness.max_staleness,
            self.rollout.n_samples_per_prompt,
            self.groups_per_step,
            self.staleness.on_stale == "mask",
            tuple(self.environment.train_ends) if self.environment else (),
        )

    @property
    def last_step(self) -> int:
        """Optimizer steps after which the run ends."""
        return self.max_steps

    @property
    def num_cpus(self) -> float:
        """Logical CPUs of the learner and the run's own generators. The plan counts every part."""
        generators = self.generator.num_replicas * self.generator.nnodes * self.generator.own
        return (
            self.learner.world_size * self.learner.num_cpus + generators * self.generator.num_cpus
        )

    @property
    def rank_gpus(self) -> float:
        """GPUs that one learner rank declares to Ray."""
        if self.takes_turns_on_gpus:
            return RANK_IN_TURNS
        return self._gpus(self.learner.device, self.learner.gpu_memory_utilization)

    @property
    def replica_gpus(self) -> float:
        """GPUs that one replica of the run's own generators declares to Ray, on each of its
        nodes."""
        generator = self.generator
        if self.takes_turns_on_gpus:
            return REPLICA_IN_TURNS
        return self._gpus(
            generator.device, generator.gpu_memory_utilization, float(generator.workers_per_node)
        )

    @property
    def reference_gpus(self) -> float:
        """GPUs that the process of a reference policy or teacher declares to Ray."""
        return self._gpus(self.learner.device, self.algorithm.ref_gpu_memory_utilization)

    @property
    def shares_gpus(self) -> bool:
        """Whether generators and learner have fractions of the same GPUs."""
        return self.placement == "share" and self.learner.device == "cuda"

    @property
    def takes_turns_on_gpus(self) -> bool:
        """Whether generators and learner take turns on the same GPUs."""
        return self.placement == "colocate" and self.learner.device == "cuda"

    @property
    def replicas_share_gpus(self) -> bool:
        """Whether a GPU of a replica is also a rank's, at the same time or in turns."""
        return self.shares_gpus or self.takes_turns_on_gpus

    def _gpus(self, device: str, fraction: float, alone: float = 1.0) -> float:
        if device != "cuda":
            return 0.0
        return fraction if self.placement == "share" else alone

    @property
    def keeps_snapshot(self) -> bool:
        """Whether the warm start stores a snapshot of the learner."""
        return self.warm_start.given

    @property
    def reference_interval(self) -> int | None:
        """Versions between two refreshes of the reference policy. None: it is frozen."""
        return self.algorithm.ref_update_interval

    @property
    def models(self) -> dict[str, str]:
        """Setting → path of each model that the run's nodes read."""
        reference = {self.reference_setting: self.reference_path}
        loads = self.algorithm.loads_reference
        return {"model.path": self.model.path} | (reference if loads else {})

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
        """The settings that make `longest_trajectory`, with their values, for messages."""
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
        sets = (
            {"greedy": EvalSet(temperature=0.0), "sampled": EvalSet()}
            if self.eval.data is not None
            else {}
        )
        return {
            name: chosen.model_copy(
                update={
                    "data": chosen.data or self.eval.data,
                    **{
                        setting: getattr(
                            self.rollout if getattr(chosen, setting) is None else chosen, setting
                        )
                        for setting in ("temperature", "top_p", "top_k", "min_p")
                    },
                    "max_prompts": chosen.max_prompts or self.eval.max_prompts,
                }
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
            self.data.max_length <= self.data.max_prompt_length or self.warm_start.data is not None
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
        """Checkpoint of the reference policy. With distillation, the teacher."""
        if self.algorithm.distillation is not None:
            return self.algorithm.distillation.teacher
        return self.algorithm.ref_load or self.model.path

    @property
    def reference_setting(self) -> str:
        """The setting that names `reference_path`."""
        distills = self.algorithm.distillation is not None
        return "algorithm.distillation.teacher" if distills else "algorithm.ref_load"

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


def _with_located_teacher(tree: object) -> object:
    """The settings with an absolute path of a teacher that is a directory."""
    algorithm = tree.get("algorithm") if isinstance(tree, dict) else None
    distillation = algorithm.get("distillation") if isinstance(algorithm, dict) else None
    if not isinstance(tree, dict) or not isinstance(algorithm, dict):
        return tree
    if not isinstance(distillation, dict) or not isinstance(distillation.get("teacher"), str):
        return tree
    teacher = distillation["teacher"]
    if teacher.startswith(("http://", "https://")):
        return tree
    root = root_of_runs(tree.get("runs_root"))
    absolute = located(teacher, "algorithm.distillation.teacher", root, is_hub_name)
    changed = {**algorithm, "distillation": {**distillation, "teacher": absolute}}
    return {**tree, "algorithm": changed}


def _located_set(settings: object, root: Path, name: str) -> object:
    """The settings of an evaluation set with an absolute path."""
    if not isinstance(settings, dict) or settings.get("data") is None:
        return settings
    data = located(settings["data"], f"eval.sets.{name}.data", root, is_hub_data)
    return {**settings, "data": data}
