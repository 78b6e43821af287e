"""Environments to name in a config, such as `function: asyncrl.environments.ready:calculator`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.runtime.exports import lazy_exports

if TYPE_CHECKING:
    from asyncrl.environments.ready.arithmetic import calculator as calculator
    from asyncrl.environments.ready.puzzles import reasoning_gym as reasoning_gym
    from asyncrl.environments.ready.sandboxed import python as python

__getattr__ = lazy_exports(
    __name__,
    calculator="arithmetic",
    python="sandboxed",
    reasoning_gym="puzzles",
)
