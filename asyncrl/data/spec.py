"""The settings that the data of a run needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asyncrl.config import (
    DataConfig,
    EnvironmentConfig,
    EvalConfig,
    ModelConfig,
    OfflineDataConfig,
    RolloutConfig,
    WarmStartConfig,
)

RowsFor = Literal["sft", "dpo", "reward_model", "kto"]
"""What the rows are for: `sft` gives rows of SFT_SCHEMA, `dpo` and `reward_model` of
PREFERENCE_SCHEMA, `kto` of UNPAIRED_SCHEMA (see `asyncrl.contracts.offline_rows`)."""


@dataclass(frozen=True, slots=True)
class DataSpec:
    """What prompts and supervised rows are read with."""

    data: DataConfig
    eval: EvalConfig
    warm_start: WarmStartConfig | None
    model: ModelConfig
    rollout: RolloutConfig
    environment: EnvironmentConfig | None
    """An environment asks the model, and the prompts' own variables reach no template."""
    seed: int
    """Seed of the data order."""


@dataclass(frozen=True, slots=True)
class OfflineDataSpec:
    """How the rows of a dataset become tokens and masks."""

    data: OfflineDataConfig
    model: ModelConfig
    vocabulary: int | None = None
    """Token ids of the model. They may be more than its tokenizer has. None = as many."""
