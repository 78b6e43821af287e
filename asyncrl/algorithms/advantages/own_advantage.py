"""An advantage of the user."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from asyncrl.algorithms.advantages.group_advantage import GroupAdvantage, GroupInputs
from asyncrl.runtime.functions import FUNCTION

if TYPE_CHECKING:
    import numpy as np


class OwnAdvantage(GroupAdvantage):
    """Your own function (docs/how_to/own_algorithm.md)."""

    name: str = Field(pattern=FUNCTION)
    """`package.module:function`, importable in a new process."""
    arguments: dict[str, Any] = Field(default={})
    """Keyword arguments of the function, in addition to `rewards`."""

    def of_group(self, rewards: np.ndarray, inputs: GroupInputs) -> np.ndarray:
        """What the function returns. A single trajectory has nothing to be compared with, and gets
        0. Raises FunctionError if the function fails or breaks its contract."""
        import numpy as np

        from asyncrl.algorithms.user_functions import own_advantages

        if len(rewards) < 2:
            return np.zeros(len(rewards))
        return own_advantages(self.name, rewards, self.arguments)
