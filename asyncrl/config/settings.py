"""The whole settings tree, its paths, and the numbers derived from it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from asyncrl.config.schema import (
    AlgorithmConfig,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    EvalSet,
    GeneratorConfig,
    LearnerConfig,
    ModelConfig,
    ObserveConfig,
    RewardConfig,
    RolloutConfig,
    Section,
    StalenessConfig,
    Unset,
    WarmStartConfig,
    WeightsConfig,
    is_hub_data,
    is_hub_name,
)
from asyncrl.contracts.errors import ConfigError
from asyncrl.runtime.redact import redact_tree

__all__ = ["Settings", "completion_room"]

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
PATHS = (
    ("model", "path"),
    ("algorithm", "ref_load"),
    ("data", "train"),
    ("eval", "data"),
    ("warm_start", "data"),
    ("checkpoint", "save"),
    ("checkpoint", "load"),
)
"""Settings that are paths. `{runs_root}` in them is replaced, and they become absolute."""
MODELS = PATHS[:2]
"""Paths that may name a model on the hub instead."""
DATA = PATHS[2:5]
"""Paths that may be several sources, or datasets on the hub."""


class Settings(Section):
    """One training run."""

    name: str
    """Name of the run and of its directory under runs_root."""
    runs_root: str | None = None
    """Directory of all runs. Default: the environment variable ASYNCRL_RUNS, else `runs/` in the
    current directory."""
    seed: int = Field(default=0, ge=0, lt=1 << 32)
    """Seed for data order, sampling and initial state."""
    max_steps: int = Field(gt=0)
    """Optimizer steps after which the run ends. The count starts at version 0 and includes earlier
    attempts and the steps of `checkpoint.load`."""
    resume: Literal["never", "auto", "must"] = "never"
    """`must`: continue from the last committed checkpoint, or fail. `auto`: continue if there is
    one. `never`: start a new run, and refuse an existing directory."""
    max_restarts: int = Field(default=3, ge=0)
    """Restarts the run automatically after one of its parts dies, at most this many times between
    checkpoints. Each new attempt starts from the last committed checkpoint."""
    ray_without_token: bool = False
    """Use a cluster whose token authentication is off. Everyone who can reach its ports can then
    run code on its machines, and read and change the run. Only for a network without other users.
    """
    placement_timeout_s: Annotated[float | None, Unset] = Field(default=None, gt=0)
    """Seconds that a part of the run may wait for resources before the run fails with a table of
    what is missing. Default: derived from the number of processes. Set more, such as 900, for a
    cluster that adds nodes on demand."""
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig
    reward: RewardConfig
    generator: GeneratorConfig = GeneratorConfig()
    learner: LearnerConfig = LearnerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    staleness: StalenessConfig = StalenessConfig()
    weights: WeightsConfig = WeightsConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    observe: ObserveConfig = ObserveConfig()

    @model_validator(mode="before")
    @classmethod
    def paths_are_absolute(cls, tree: object) -> object:
        """Make every path absolute in the user's directory, because workers start in other
        directories."""
        if not isinstance(tree, dict):
            return tree
        root = _runs_root(tree.get("runs_root"))
        located = dict(tree)
        for section, name in PATHS:
            fields = located.get(section)
            if isinstance(fields, dict) and fields.get(name) is not None:
                on_hub = is_hub_name if (section, name) in MODELS else is_hub_data
                stays = on_hub if (section, name) in (*MODELS, *DATA) else None
                located[section] = {**fields, name: _located(fields[name], root, stays)}
        evaluation = located.get("eval")
        if isinstance(evaluation, dict) and isinstance(evaluation.get("sets"), dict):
            located["eval"] = {
                **evaluation,
                "sets": {
                    name: _located_set(chosen, root) for name, chosen in evaluation["sets"].items()
                },
            }
        return located

    @field_validator("name")
    @classmethod
    def name_stays_in_root(cls, name: str) -> str:
        if not NAME_PATTERN.fullmatch(name):
            raise ValueError(
                "a name is 1 to 64 letters, digits, '.', '_' or '-', starting with a letter or"
                " digit; choose another"
            )
        return name

    def dump(self) -> dict[str, object]:
        """All settings as plain values without secrets, for the user and for files."""
        tree: dict[str, object] = redact_tree(self.model_dump(mode="json"))
        return tree

    @property
    def groups_per_step(self) -> int:
        """Groups in the batch of one step."""
        return self.rollout.rollout_batch_size // self.rollout.num_steps_per_rollout

    @property
    def global_batch_size(self) -> int:
        """Trajectories in the batch of one step."""
        return self.groups_per_step * self.rollout.n_samples_per_prompt

    @property
    def longest_trajectory(self) -> int:
        """Longest possible trajectory, in tokens: prompt and completion."""
        longest = self.data.max_prompt_length + self.rollout.max_completion_length
        return longest if self.data.max_length is None else min(longest, self.data.max_length)

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
        """Checkpoint of the reference policy."""
        return self.algorithm.ref_load or self.model.path

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

    @property
    def checkpoints_directory(self) -> Path:
        """Absolute directory of the checkpoints. Raises ConfigError like `run_directory`."""
        return (
            Path(self.checkpoint.save).resolve()
            if self.checkpoint.save
            else self.run_directory / "checkpoints"
        )

    @property
    def run_directory(self) -> Path:
        """Absolute run directory.

        Raises:
            ConfigError: it would be inside a Ray runtime directory, which is deleted with the job.
        """
        root = _runs_root(self.runs_root)
        directory = root / self.name
        if "runtime_resources" in directory.parts:
            raise ConfigError(
                f"runs_root = {str(root)!r} is inside Ray's working directory, which is deleted"
                ' with the job; submit with --runtime-env-json \'{"env_vars": {"ASYNCRL_RUNS":'
                ' "/absolute/path"}}\''
            )
        return directory


def completion_room(longest: int, max_length: int | None, prompt_tokens: int) -> int:
    """Tokens available for a completion: at most `longest`, and at most `max_length` together with
    the prompt."""
    return longest if max_length is None else min(longest, max_length - prompt_tokens)


def _located_set(settings: object, root: Path) -> object:
    """The settings of an evaluation set with an absolute path."""
    if not isinstance(settings, dict) or settings.get("data") is None:
        return settings
    return {**settings, "data": _located(settings["data"], root, is_hub_data)}


def _located(value: object, root: Path, stays: Callable[[str], bool] | None) -> object:
    """A path, or the paths of a list of sources, made absolute. Paths for which `stays` is true are
    not changed."""
    if isinstance(value, str):
        path = value.replace("{runs_root}", str(root))
        return path if stays and stays(path) else str(Path(path).expanduser().absolute())
    if isinstance(value, list):
        return [_located(item, root, stays) for item in value]
    if isinstance(value, dict) and isinstance(value.get("path"), str):
        return {**value, "path": _located(value["path"], root, stays)}
    return value


def _runs_root(configured: str | None) -> Path:
    return Path(configured or os.environ.get("ASYNCRL_RUNS") or "runs").expanduser().resolve()
