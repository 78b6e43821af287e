"""Counts the sessions that failed, and why. Pure."""

from __future__ import annotations

from collections import Counter

from asyncrl.contracts.messages import SessionCounts

__all__ = ["FailedSessions"]

MOST_REASONS = 1000
"""Different reasons that are counted. Each may name a task of its own."""


class FailedSessions:
    """The sessions of some groups, and those of them that failed."""

    def __init__(self) -> None:
        self.groups = self.sessions = self.failed = 0
        self._reasons: Counter[str] = Counter()

    def add(self, counts: SessionCounts) -> None:
        """Count the sessions of a group."""
        self.groups += 1
        self.sessions += sum(counts.ends.values())
        self.failed += sum(counts.failures.values())
        for reason, count in counts.failures.items():
            if reason in self._reasons or len(self._reasons) < MOST_REASONS:
                self._reasons[reason] += count

    @property
    def mostly(self) -> bool:
        """Whether more than half of the sessions failed."""
        return 2 * self.failed > self.sessions

    def metrics(self) -> dict[str, object]:
        """How many failed, and the most frequent reason. Empty if none did."""
        if not self.failed:
            return {}
        reason, times = self._reasons.most_common(1)[0]
        return {
            "sessions": self.sessions,
            "failed": self.failed,
            "reason": reason,
            "times": times,
        }

    def why(self) -> str:
        """How many failed and the most frequent reason, as the end of a sentence; "" if none
        did."""
        if not self.failed:
            return ""
        reason, times = self._reasons.most_common(1)[0]
        return (
            f"; {self.failed} of {self.sessions} sessions failed, most often ({times} times)"
            f" {reason}"
        )
