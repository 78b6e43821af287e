import sys
from pathlib import Path

import pytest

from asyncrl.config import RewardConfig

# Tests name reward functions by a path from the repository root. Ray workers and reward processes
# have the working directory on their path.
sys.path.insert(0, str(Path(__file__).parents[2]))


@pytest.fixture
def reward_config():
    """`reward_config("by_length", "raises", policy=…)`: functions of rewards_under_test."""

    def make(*names: str, **settings) -> RewardConfig:
        functions = {
            name: {"function": f"tests.rewards.rewards_under_test:{name}"} for name in names
        }
        return RewardConfig.model_validate({"functions": functions, "processes": 1, **settings})

    return make
