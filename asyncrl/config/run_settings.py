"""What every kind of run has: its name, its folders, its model, its learner and its checkpoints."""

from __future__ import annotations

import re
from abc import abstractmethod
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, ModelWrapValidatorHandler, field_validator, model_validator

from asyncrl.config.lora import LoraConfig
from asyncrl.config.schema import (
    CheckpointConfig,
    LearnerConfig,
    ModelConfig,
    ObserveConfig,
    Source,
    WeightsConfig,
)
from asyncrl.contracts.errors import ConfigError
from asyncrl.contracts.section import Section, Unset
from asyncrl.runtime.redact import redact_tree
from asyncrl.runtime.setting_paths import paths_below, root_of_runs

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Limits(NamedTuple):
    """What run.json records of an attempt's settings, for an audit."""

    max_staleness: int
    """In versions."""
    n_samples_per_prompt: int
    groups_per_step: int
    masks_stale: bool = False
    """Whether tokens beyond `max_staleness` are masked."""
    train_ends: tuple[str, ...] = ()
    """Ends of sessions that are trained. Empty without an environment."""
    records_tokens: bool = False
    """Whether policy steps record what they computed at each token."""


class RunSettings(Section):
    """The settings that training with generators and training on a dataset share."""

    name: str
    """Name of the run and of its directory under runs_root."""
    runs_root: str | None = Field(default=None, min_length=1)
    """Directory of all runs. Default: the environment variable ASYNCRL_RUNS, else `runs/` in the
    current directory."""
    seed: int = Field(default=0, ge=0, lt=1 << 32)
    """Seed for data order, sampling and initial state."""
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
    lora: LoraConfig | None = None
    """Train an adapter instead of the model's own weights. None = train all weights."""
    learner: LearnerConfig = LearnerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    observe: ObserveConfig = ObserveConfig()

    @model_validator(mode="wrap")
    @classmethod
    def paths_are_below_root(cls, tree: object, read: ModelWrapValidatorHandler[Self]) -> Self:
        """Read the settings whose `{runs_root}` is that of this tree."""
        given = tree.get("runs_root") if isinstance(tree, dict) else None
        root = given if isinstance(given, str) else None
        root_of_runs(root)  # it raises ConfigError
        with paths_below(root):
            return read(tree)

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
    @abstractmethod
    def training_sources(self) -> tuple[Source, ...]:
        """The sources of the training data."""

    @property
    @abstractmethod
    def longest_trajectory(self) -> int:
        """Longest possible training sequence, in tokens."""

    @property
    @abstractmethod
    def longest_text(self) -> str:
        """The settings that make `longest_trajectory`, with their values, for messages."""

    @property
    @abstractmethod
    def limits(self) -> Limits:
        """The bounds that run.json records for an attempt."""

    @property
    @abstractmethod
    def placement_wait_s(self) -> float:
        """Seconds that a part of the run may wait for resources."""

    @property
    @abstractmethod
    def last_step(self) -> int:
        """Optimizer steps after which the run ends."""

    @property
    @abstractmethod
    def num_cpus(self) -> float:
        """Logical CPUs that the parts of the run declare to Ray, at least."""

    @property
    def keeps_snapshot(self) -> bool:
        """Whether the run stores a snapshot of the learner before version 0."""
        return False

    @property
    def trains_reward_model(self) -> bool:
        """Whether the run trains scores of sequences, and exports a sequence classifier."""
        return False

    @property
    def reference_interval(self) -> int | None:
        """Versions between two refreshes of the reference policy. None: it is frozen."""
        return None

    @property
    @abstractmethod
    def models(self) -> dict[str, str]:
        """Setting → path of each model that the run's nodes read."""

    @property
    @abstractmethod
    def learning_rate(self) -> float:
        """Peak learning rate."""

    @property
    def rank_share(self) -> float:
        """Largest fraction of a GPU's memory that one learner rank may allocate."""
        return self.learner.gpu_memory_utilization or 1.0

    @property
    def rank_gpus(self) -> float:
        """GPUs that one learner rank declares to Ray."""
        return float(self.learner.device == "cuda")

    @property
    def bucket_bytes(self) -> int:
        """Size of a bucket of exported weights, in bytes."""
        return WeightsConfig().bucket_bytes

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
        root = root_of_runs(self.runs_root)
        directory = root / self.name
        if "runtime_resources" in directory.parts:
            raise ConfigError(
                f"runs_root = {str(root)!r} is inside Ray's working directory, which is deleted"
                ' with the job; submit with --runtime-env-json \'{"env_vars": {"ASYNCRL_RUNS":'
                ' "/absolute/path"}}\''
            )
        return directory
