"""DAPO's penalty of long completions."""

from __future__ import annotations

from pydantic import Field

from asyncrl.contracts.section import Section


class Overlong(Section):
    """A penalty of long completions (DAPO's soft overlong punishment, arXiv:2503.14476, eq. 13).
    The limit is max_completion_length, or what data.max_length leaves of it."""

    buffer: int = Field(gt=0)
    """Tokens before a completion's limit in which its length is penalized. The penalty rises
    linearly from 0."""
    penalty: float = Field(default=1.0, ge=0)
    """Reward that a completion loses when it reaches its limit."""

    def added(self, tokens: int, longest: int) -> float:
        """Return what is added to the reward of a completion: 0 up to longest - buffer tokens, then
        a line to -penalty at longest."""
        over = tokens - (longest - self.buffer)
        return -self.penalty * min(over, self.buffer) / self.buffer if over > 0 else 0.0
