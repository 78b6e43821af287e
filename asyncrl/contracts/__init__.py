"""Data that travels between stations, and the protocols that stations implement."""

from __future__ import annotations

from asyncrl.contracts.errors import ConfigError
from asyncrl.contracts.messages import GenerateRequest, Scored
from asyncrl.contracts.rows import Completion, Prompt, VersionSpan
from asyncrl.contracts.state import State

__all__ = [
    "Completion",
    "ConfigError",
    "GenerateRequest",
    "Prompt",
    "Scored",
    "State",
    "VersionSpan",
]
