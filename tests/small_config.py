"""The smallest valid settings, for tests of other parts."""

from asyncrl.config import Config, ModelConfig, OfflineDataConfig
from asyncrl.data.spec import OfflineDataSpec

SMALL = {
    "name": "small",
    "max_steps": 1,
    "model": {"path": "m"},
    "data": {"train": "t", "max_prompt_length": 8},
    "rollout": {"max_completion_length": 8},
    "reward": {"functions": {"f": {"function": "m:f"}}},
}


def small_config(**changes):
    """The small config, with whole sections replaced."""
    return Config.model_validate({**SMALL, **changes})


def offline_spec(model_path, vocabulary=None, **data):
    """What the rows of a dataset are read with. `data` belongs to its section."""
    section = OfflineDataConfig.model_validate({"train": "unused", **data})
    return OfflineDataSpec(section, ModelConfig(path=str(model_path)), vocabulary)
