"""The smallest valid config, for tests that use neither model nor data."""

from asyncrl.config import Config

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
