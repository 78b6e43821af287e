"""The config: a YAML file becomes one validated object, with every derived number as a property.

This package does not import torch, ray or vllm, so `asyncrl --help` and `asyncrl plan` start
quickly. Names that slime and TRL share with us are kept. For other names of theirs, the error
message gives the name here (`asyncrl.config.aliases`).
"""

from __future__ import annotations

from asyncrl.config.algorithm import (
    AlgorithmConfig as AlgorithmConfig,
    PolicyGradient as PolicyGradient,
)
from asyncrl.config.config import Config as Config
from asyncrl.config.distillation import DistillationConfig as DistillationConfig
from asyncrl.config.fields import field_names as field_names
from asyncrl.config.load import (
    explain as explain,
    load_any as load_any,
    load_config as load_config,
    load_offline as load_offline,
)
from asyncrl.config.lora import LoraConfig as LoraConfig
from asyncrl.config.offline import (
    DpoConfig as DpoConfig,
    OfflineConfig as OfflineConfig,
    OfflineDataConfig as OfflineDataConfig,
    RewardModelConfig as RewardModelConfig,
    SftConfig as SftConfig,
)
from asyncrl.config.run_settings import RunSettings as RunSettings
from asyncrl.config.schema import (
    HUB_CACHE as HUB_CACHE,
    AgentCommand as AgentCommand,
    AgentFunction as AgentFunction,
    CheckpointConfig as CheckpointConfig,
    DataConfig as DataConfig,
    EnvironmentConfig as EnvironmentConfig,
    EvalConfig as EvalConfig,
    EvalSet as EvalSet,
    FunctionEnvironment as FunctionEnvironment,
    GeneratorConfig as GeneratorConfig,
    LearnerConfig as LearnerConfig,
    ModelConfig as ModelConfig,
    ObserveConfig as ObserveConfig,
    RewardConfig as RewardConfig,
    RewardFunction as RewardFunction,
    RolloutConfig as RolloutConfig,
    SandboxConfig as SandboxConfig,
    Source as Source,
    Sources as Sources,
    StalenessConfig as StalenessConfig,
    WarmStartConfig as WarmStartConfig,
    WeightsConfig as WeightsConfig,
    sources_of as sources_of,
)
from asyncrl.config.settings import completion_room as completion_room
from asyncrl.contracts.errors import ConfigError as ConfigError
from asyncrl.contracts.section import Section as Section
from asyncrl.runtime.setting_paths import (
    is_hub_data as is_hub_data,
    is_hub_name as is_hub_name,
)
