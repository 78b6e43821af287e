"""The settings of a run on a dataset, without generators: SFT, DPO and reward models."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field, model_validator

from asyncrl.algorithms.preference_losses import Kto, PreferenceLoss, Sigmoid
from asyncrl.config.rules import ActsWith, check_effects, check_sources
from asyncrl.config.run_settings import Limits, RunSettings
from asyncrl.config.schema import (
    CutLong,
    DropLong,
    ObserveConfig,
    RefuseLong,
    Source,
    Sources,
    sources_of,
)
from asyncrl.contracts.section import ByName, Section
from asyncrl.runtime.setting_paths import ModelPath

OBJECTIVES = ("sft", "dpo", "reward_model")
"""The names of the objectives. They are commands, too."""
SHORTEST_PLACEMENT_S = 60.0
"""Shortest placement timeout, in seconds."""

ACTS_WITH: ActsWith = (
    *(
        (f"objective.{name}", "objective.has_reference", (True,), "a loss with a reference")
        for name in ("reference_batch", "ref_num_cpus", "ref_load")
    ),
    *(
        (f"eval.{name}", "eval.evaluates", (True,), "eval.data")
        for name in ("every_steps", "max_rows")
    ),
)
"""Settings that another one may leave without an effect."""


class SplitLong(Section):
    """Keep the whole row, and let objective.packing_strategy cut it (SFT only)."""

    name: Literal["split"] = "split"


class OfflineDataConfig(Section):
    train: Sources
    """Training rows: a path, or a list of sources to mix, as in a run with generators. Their form
    is recognized from the columns (docs/how_to/training_data.md)."""
    prompt_column: str = "prompt"
    """Column with the prompt, in forms that have one."""
    target_column: str | None = None
    """Column with the text that should follow the prompt, for datasets without `completion`."""
    loss_on: Literal["auto", "completion", "assistant", "all"] = "auto"
    """The tokens to train. `completion`: those after the prompt. `assistant`: the assistant's turns
    of a chat. `all`: every token after the first. `auto`: completion, assistant or all, whichever
    the form of the rows has."""
    least_reward: float | None = None
    """For rows that a run recorded (groups/*.parquet). SFT: train every trajectory with at least
    this reward; default: the best one of each group. DPO: the least reward of a chosen side."""
    apply_chat_template: bool = False
    """Render each string prompt as a user message, and its completion as the assistant's turn.
    Chats are always rendered."""
    chat_template_kwargs: dict[str, Any] = Field(default={})
    """Variables of the chat template."""
    system_prompt: str | None = Field(default=None, min_length=1)
    """System message to add before every chat. Refused if a chat already has one."""
    tools: list[dict[str, Any]] | None = Field(default=None, min_length=1)
    """JSON schemas of the functions that the chat template lists in every chat."""
    tools_column: str | None = None
    """Column with each row's tools. Default: `tools`, if the data has it."""
    max_length: int = Field(default=1024, gt=1)
    """Longest sequence, in tokens: a row of SFT, or one side of a pair."""
    length_policy: Annotated[RefuseLong | DropLong | CutLong | SplitLong, ByName("error")] = (
        RefuseLong()
    )
    """What happens to a longer sequence."""
    malformed: Literal["error", "drop"] = "error"
    """What happens to a row that cannot be trained: equal sides, an empty completion, a prompt that
    is no prefix of its conversation, or no token left to train. `drop`: leave it out and count it.
    """
    unused_keys: Literal["error", "drop"] = "error"
    """What happens to a key or a part of a chat that does not reach the text, such as an image, a
    key that the chat template does not write, or a column of marks. `error`: refuse the row.
    `drop`: leave it out and count it."""
    shuffle: bool = True
    """Shuffle each epoch, seeded by (seed, epoch). False keeps the order of the files."""


class HeldOutConfig(Section):
    data: Sources | None = None
    """Held-out rows. Their form is recognized by itself, and may differ from that of data.train.
    None = no evaluation."""
    every_steps: int = Field(default=0, ge=0)
    """Steps between two evaluations. 0 = only before and after training."""
    max_rows: int = Field(default=1024, gt=0)
    """Rows per evaluation, from the start of the data."""

    @property
    def evaluates(self) -> bool:
        """Whether there is anything to evaluate on."""
        return self.data is not None


class SftConfig(Section):
    """Next-token prediction."""

    name: Literal["sft"] = "sft"
    packing_strategy: Literal["bfd", "bfd_split", "wrapped"] = "bfd"
    """How a step's rows are packed into micro-batches of learner.max_tokens_per_gpu tokens. `bfd`:
    rows stay whole. `bfd_split`: longer rows are cut. `wrapped`: rows follow one another and are
    cut wherever a micro-batch is full. Pieces do not attend to one another."""

    learning_rate: ClassVar[float] = 2e-5
    """Default of learner.learning_rate."""
    has_reference: ClassVar[bool] = False
    has_value_head: ClassVar[bool] = False
    value_learning_rate: ClassVar[None] = None


class DpoConfig(Section):
    """Preferences between two completions of a prompt."""

    name: Literal["dpo"] = "dpo"
    loss: PreferenceLoss = Sigmoid()
    """Loss of a pair, or of a single completion with a label (`kto`)."""
    ce_coef: float = Field(default=0.0, ge=0)
    """Weight of the next-token loss on the chosen sides, a mean over all their tokens of the step
    (as in RPO, arXiv:2404.19733, which divides by each side's length)."""
    ref_load: ModelPath | None = None
    """Reference policy: a Hugging Face checkpoint directory or a name on the hub. Default:
    model.path. `{runs_root}` in it is replaced."""
    ref_num_cpus: float = Field(default=0.2, ge=0)
    """Logical CPUs that the reference policy's process declares to Ray."""
    reference_batch: int = Field(default=256, gt=0)
    """Pairs (kto: rows) that the reference policy scores in one call."""

    learning_rate: ClassVar[float] = 1e-6
    packing_strategy: ClassVar[Literal["bfd"]] = "bfd"
    has_value_head: ClassVar[bool] = False
    value_learning_rate: ClassVar[None] = None
    weight_cap: ClassVar[None] = None
    """Rows of a dataset have no off-policy weight."""

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares with a reference policy."""
        return self.loss.has_reference


class RewardModelConfig(Section):
    """A score of each sequence, from the same preferences."""

    name: Literal["reward_model"] = "reward_model"
    center_coef: float = Field(default=0.0, ge=0)
    """Weight of the squared sum of both scores of a pair (arXiv:2312.09244), which keeps scores
    around 0. The loss of a pair only sees their difference. TRL's example is 0.01."""
    value_learning_rate: float | None = Field(default=None, ge=0)
    """Peak learning rate of the score head, with the schedule of learner.learning_rate. A new head
    usually needs 10 to 100 times the model's rate. Default: learner.learning_rate."""

    learning_rate: ClassVar[float] = 1e-5
    packing_strategy: ClassVar[Literal["bfd"]] = "bfd"
    has_reference: ClassVar[bool] = False
    has_value_head: ClassVar[bool] = True


Objective: TypeAlias = Annotated[SftConfig | DpoConfig | RewardModelConfig, ByName("")]


class OfflineConfig(RunSettings):
    """Every setting of a run on a dataset."""

    objective: Objective
    """What the run trains."""
    max_steps: Annotated[int | None, Field(gt=0)] = None
    """Optimizer steps after which the run ends. Default: num_epochs over the data."""
    num_epochs: float = Field(default=1.0, gt=0, le=1e6)
    """Passes over the data, where max_steps is not set."""
    batch_size: int = Field(default=32, gt=0)
    """Rows (SFT, KTO) or pairs (DPO, reward model) of one optimizer step, over all ranks. At most
    those of an epoch."""
    data: OfflineDataConfig
    eval: HeldOutConfig = HeldOutConfig()

    @model_validator(mode="after")
    def settings_fit_together(self) -> OfflineConfig:
        check_sources({"data.train": self.data.train, "eval.data": self.eval.data})
        self._check_learner()
        self._check_lengths()
        check_effects(self, ACTS_WITH)
        self._check_dpo()
        return self

    def _check_learner(self) -> None:
        """Refuse settings of the learner that only a run with generators uses."""
        if self.observe.completions_every != ObserveConfig().completions_every:
            raise ValueError(
                f"observe.completions_every = {self.observe.completions_every} has no effect,"
                " because a run on a dataset samples no completions; leave it out"
            )
        if not self.observe.trained_tokens:
            raise ValueError(
                "observe.trained_tokens = false has no effect, because a run on a dataset records"
                " no trained tokens; leave it out"
            )

    def _check_lengths(self) -> None:
        cap = self.learner.max_tokens_per_row
        cuts = self.objective.packing_strategy != "bfd"
        if isinstance(self.data.length_policy, SplitLong) and not cuts:
            raise ValueError(
                "data.length_policy: split needs objective: sft with packing_strategy: bfd_split or"
                " wrapped, which cut long rows; use truncate or drop"
            )
        if self.data.max_length > cap and not cuts:
            raise ValueError(
                f"data.max_length = {self.data.max_length} is above learner.max_tokens_per_gpu ="
                f" {self.learner.max_tokens_per_gpu} (times sequence_parallel_size), so a sequence"
                " may not fit into a micro-batch; raise max_tokens_per_gpu, or lower max_length"
            )
        if self.trains_reward_model and self.data.max_length == cap:
            raise ValueError(
                f"data.max_length = {self.data.max_length} equals learner.max_tokens_per_gpu ="
                f" {self.learner.max_tokens_per_gpu} (times sequence_parallel_size), and a reward"
                " model needs one token more; raise max_tokens_per_gpu, or lower max_length"
            )

    def _check_dpo(self) -> None:
        compared = self.compared
        loads = self.lora is not None and self.lora.load is not None
        if compared is not None and compared.ref_load is None and loads:
            raise ValueError(
                "dpo with lora.load would compare the policy with model.path, as it was without"
                " that adapter; name the reference policy in objective.ref_load, such as the merged"
                " model"
            )
        if self.is_kto and self.batch_size < 2:
            raise ValueError(
                "batch_size = 1 gives KTO's baseline a single completion; raise it, to 8 or more if"
                " you can"
            )

    @property
    def trains_reward_model(self) -> bool:
        return isinstance(self.objective, RewardModelConfig)

    @property
    def compared(self) -> DpoConfig | None:
        """The objective, if it compares the policy with a reference policy."""
        chosen = self.objective
        return chosen if isinstance(chosen, DpoConfig) and chosen.has_reference else None

    @property
    def has_pairs(self) -> bool:
        """Whether the rows are pairs."""
        return not isinstance(self.objective, SftConfig) and not self.is_kto

    @property
    def is_kto(self) -> bool:
        """Whether the rows are single completions with a label."""
        return isinstance(self.objective, DpoConfig) and isinstance(self.objective.loss, Kto)

    @property
    def training_sources(self) -> tuple[Source, ...]:
        """The sources of the training rows."""
        return sources_of(self.data.train)

    @property
    def longest_trajectory(self) -> int:
        """Longest sequence that one forward pass takes, in tokens. A reward model adds a token."""
        longest = self.data.max_length + self.trains_reward_model
        return min(longest, self.learner.max_tokens_per_row)

    @property
    def longest_text(self) -> str:
        """The setting that makes `longest_trajectory`, with its value, for messages."""
        added = ", with the token that a reward model adds," if self.trains_reward_model else ""
        return f"data.max_length = {self.data.max_length}{added}"

    @property
    def limits(self) -> Limits:
        """The bounds that run.json records for an attempt: no staleness, one sequence per group."""
        return Limits(0, 1, self.batch_size)

    @property
    def placement_wait_s(self) -> float:
        return self.placement_timeout_s or max(SHORTEST_PLACEMENT_S, float(self.learner.world_size))

    @property
    def learning_rate(self) -> float:
        given = self.learner.learning_rate
        return self.objective.learning_rate if given is None else given

    @property
    def last_step(self) -> int:
        """Optimizer steps after which the run ends. 1 until the data is read, unless max_steps is
        set."""
        return self.max_steps or 1

    @property
    def num_cpus(self) -> float:
        """Logical CPUs of the learner and the reference policy."""
        reference = 0.0 if self.compared is None else self.compared.ref_num_cpus
        return self.learner.world_size * self.learner.num_cpus + reference

    @property
    def models(self) -> dict[str, str]:
        reference = {} if self.compared is None else {"objective.ref_load": self.reference_path}
        return {"model.path": self.model.path} | reference

    @property
    def reference_path(self) -> str:
        """Checkpoint of the reference policy."""
        return (self.compared and self.compared.ref_load) or self.model.path

    def steps(self, epoch: int, applied: int = 0, rows: float = 0) -> int:
        """Optimizer steps of the whole run, for this many rows per epoch. The last step of an epoch
        continues into the next epoch, so every step has `batch_size` rows.

        Args:
            applied: steps that the run took with other batch sizes.
            rows: rows of those steps.
        """
        left = math.ceil((self.num_epochs * epoch - rows) / self.batch_size)
        return self.max_steps or max(1, applied + max(0, left))
