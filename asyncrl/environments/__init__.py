"""Environments: what an agent's code gets to talk to the model of its session."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.runtime.exports import lazy_exports

if TYPE_CHECKING:
    from asyncrl.environments.pool import EnvironmentPool as EnvironmentPool
    from asyncrl.environments.running import (
        AgentFailedError as AgentFailedError,
        ContextTooLongError as ContextTooLongError,
        RewardFailedError as RewardFailedError,
        TurnsExceededError as TurnsExceededError,
    )
    from asyncrl.environments.tools import ToolsRun as ToolsRun, run_tools as run_tools

__getattr__ = lazy_exports(
    __name__,
    AgentFailedError="running",
    ContextTooLongError="running",
    EnvironmentPool="pool",
    RewardFailedError="running",
    run_tools="tools",
    ToolsRun="tools",
    TurnsExceededError="running",
)
