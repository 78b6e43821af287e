"""Data that travels between stations, and the protocols that stations implement."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.runtime.exports import lazy_exports

if TYPE_CHECKING:
    from asyncrl.contracts.errors import ConfigError as ConfigError
    from asyncrl.contracts.messages import GenerateRequest as GenerateRequest, Scored as Scored
    from asyncrl.contracts.rows import (
        Completion as Completion,
        Prompt as Prompt,
        VersionSpan as VersionSpan,
    )
    from asyncrl.contracts.state import State as State

__getattr__ = lazy_exports(
    __name__,
    Completion="rows",
    ConfigError="errors",
    GenerateRequest="messages",
    Prompt="rows",
    Scored="messages",
    State="state",
    VersionSpan="rows",
)
