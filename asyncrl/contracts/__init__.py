"""What travels between stations, and what a station must offer. Nothing of asyncrl lies below."""

from __future__ import annotations

from asyncrl.contracts.errors import ConfigError
from asyncrl.contracts.rows import Prompt
from asyncrl.contracts.state import State

__all__ = ["ConfigError", "Prompt", "State"]
