"""The reward contract, and the call that enforces it. Runs in a reward process: imports nothing heavy.

    def reward(prompts, completions, completion_ids, **columns) -> list[float | None]

is called once per group with lists of one length n, the prompt and every dataset column repeated n times; it may be `async`.
None = this trajectory cannot be scored. Anything else that is not a finite number breaks the contract.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["ContractError", "RewardError", "call_reward", "check_rewards", "find_reward", "import_reward"]


class RewardError(Exception):
    """A reward function failed: it raised, hung, died or broke its contract. The message names it and the cause."""


class ContractError(RewardError):
    """A reward function returned something that the contract does not allow."""


def find_reward(function: str) -> None:
    """Look for the module of `package.module:function` without running it.

    Raises:
        RewardError: there is none.
    """
    module = function.partition(":")[0]
    try:
        missing = importlib.util.find_spec(module) is None
    except (ImportError, ValueError) as error:
        raise RewardError(f"reward function {function!r} cannot be imported ({error}); check its name and that its package is installed") from None
    if missing:
        raise RewardError(f"reward function {function!r}: there is no module {module!r}; start where it lies, or install its package")


def import_reward(function: str) -> Callable[..., Any]:
    """The function that `package.module:function` names.

    Raises:
        RewardError: it cannot be imported, or is not callable.
    """
    module, _, name = function.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise RewardError(f"reward function {function!r} cannot be imported ({error}); check its name and that its package is installed") from None
    if not callable(found):
        raise RewardError(f"reward function {function!r} is a {type(found).__name__}; name a function")
    return found  # type: ignore[no-any-return]


def call_reward(
    function: str, prompts: Sequence[str], completions: Sequence[str], completion_ids: Sequence[Sequence[int]], columns: dict[str, Any]
) -> list[float | None]:
    """Call one reward for one group of n trajectories; return n checked rewards.

    Args:
        columns: dataset columns of the group's prompt, one value each; repeated here.

    Raises:
        RewardError: it raised. ContractError: it returned what it must not.
    """
    reward, n = import_reward(function), len(completions)
    repeated = {name: [value] * n for name, value in columns.items()}
    try:
        values = reward(prompts=list(prompts), completions=list(completions), completion_ids=[list(ids) for ids in completion_ids], **repeated)
        if inspect.isawaitable(values):
            values = asyncio.run(_wait_for(values))
    except MemoryError:
        raise RewardError(
            f"reward function {function!r} asked for more memory than reward.memory_bytes leaves it; raise that, or free what is not used"
        ) from None
    except Exception as error:
        # Whatever a reward raises is reported under its name.
        raise RewardError(f"reward function {function!r} raised {type(error).__name__}: {error}") from None
    return check_rewards(function, values, n)


async def _wait_for(values: Any) -> Any:
    return await values


def check_rewards(function: str, values: Any, n: int) -> list[float | None]:
    """The rewards as floats and None. Raises ContractError unless they are n finite numbers or None in a sequence."""
    if isinstance(values, str | bytes | dict) or not hasattr(values, "__len__") or not hasattr(values, "__iter__"):
        raise ContractError(f"reward function {function!r} returned {type(values).__name__}; return a list of {n} floats or None")
    if len(values) != n:
        raise ContractError(f"reward function {function!r} returned {len(values)} rewards for {n} completions; return one for each")
    return [_check_one(function, value, index) for index, value in enumerate(values)]


def _check_one(function: str, value: Any, index: int) -> float | None:
    if value is None:
        return None
    if not isinstance(value, numbers.Real):
        raise ContractError(f"reward function {function!r} returned {value!r} ({type(value).__name__}) at index {index}; return a float or None")
    if not math.isfinite(value):
        raise ContractError(f"reward function {function!r} returned {value!r} at index {index}; return a finite number, or None if it cannot be scored")
    return float(value)
