"""The config: a YAML file becomes one validated object, with every derived number as a property.

This package does not import torch, ray or vllm, so `asyncrl --help` and `asyncrl plan` start
quickly. Names that slime and TRL share with us are kept. For other names of theirs, the error
message gives the name here (`asyncrl.config.aliases`).
"""

from __future__ import annotations

from asyncrl.config.algorithm import AlgorithmConfig, PolicyGradient
from asyncrl.config.derived import Config
from asyncrl.config.distillation import DistillationConfig
from asyncrl.config.fields import field_names
from asyncrl.config.load import explain, load_any, load_config, load_offline
from asyncrl.config.lora import LoraConfig
from asyncrl.config.offline import (
    DpoConfig,
    OfflineConfig,
    OfflineDataConfig,
    RewardModelConfig,
    SftConfig,
)
from asyncrl.config.run_settings import RunSettings
from asyncrl.config.schema import (
    HUB_CACHE,
    AgentCommand,
    AgentFunction,
    CheckpointConfig,
    DataConfig,
    EnvironmentConfig,
    EvalConfig,
    EvalSet,
    FunctionEnvironment,
    GeneratorConfig,
    LearnerConfig,
    ModelConfig,
    ObserveConfig,
    RewardConfig,
    RewardFunction,
    RolloutConfig,
    SandboxConfig,
    Source,
    Sources,
    StalenessConfig,
    WarmStartConfig,
    WeightsConfig,
    sources_of,
)
from asyncrl.config.settings import completion_room
from asyncrl.contracts.errors import ConfigError
from asyncrl.contracts.section import Section
from asyncrl.runtime.setting_paths import is_hub_data, is_hub_name

__all__ = [
    "HUB_CACHE",
    "AgentCommand",
    "AgentFunction",
    "AlgorithmConfig",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "DistillationConfig",
    "DpoConfig",
    "EnvironmentConfig",
    "EvalConfig",
    "EvalSet",
    "FunctionEnvironment",
    "GeneratorConfig",
    "LearnerConfig",
    "LoraConfig",
    "ModelConfig",
    "ObserveConfig",
    "OfflineConfig",
    "OfflineDataConfig",
    "PolicyGradient",
    "RewardConfig",
    "RewardFunction",
    "RewardModelConfig",
    "RolloutConfig",
    "RunSettings",
    "SandboxConfig",
    "Section",
    "SftConfig",
    "Source",
    "Sources",
    "StalenessConfig",
    "WarmStartConfig",
    "WeightsConfig",
    "completion_room",
    "explain",
    "field_names",
    "is_hub_data",
    "is_hub_name",
    "load_any",
    "load_config",
    "load_offline",
    "sources_of",
]
