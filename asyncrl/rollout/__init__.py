"""Rollout workers: they make one group per prompt and keep it until it is acknowledged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.runtime.exports import lazy_exports

if TYPE_CHECKING:
    from asyncrl.rollout.driver import start_rollouts as start_rollouts
    from asyncrl.rollout.session_player import Player as Player

__getattr__ = lazy_exports(
    __name__,
    Player="session_player",
    start_rollouts="driver",
)
