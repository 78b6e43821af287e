"""Counts the sessions that failed, and why. Pure."""

from __future__ import annotations

from collections import Counter

from asyncrl.contracts.messages import SessionCounts
from asyncrl.runtime.failure_reasons import reason_key

MOST_REASONS = 100
"""Different reasons that are counted at a time. Each may name a task of its own."""


class FailedSessions:
    """The sessions of some groups, and those of them that failed.

    The reasons are counted as by Misra and Gries (1982, "Finding repeated elements"): a new reason
    for which there is no room takes from the count of each. So a reason of more than 1 in
    MOST_REASONS + 1 failures is always found, and its count may be too low by that share.
    """

    def __init__(self) -> None:
        self.groups = self.sessions = self.failed = self.unasked = 0
        self._reasons: Counter[str] = Counter()
        """Key of a reason → its count."""
        self._texts: dict[str, str] = {}
        """The first text of each key."""
        self._last = ""

    def add(self, counts: SessionCounts) -> None:
        """Count the sessions of a group."""
        self.groups += 1
        self.sessions += sum(counts.ends.values())
        self.failed += sum(counts.failures.values())
        self.unasked += counts.unasked
        for reason, count in counts.failures.items():
            self._last = " ".join(reason.split())  # one line, whatever a session says
            self._count(self._last, count)

    def _count(self, reason: str, count: int) -> None:
        key = reason_key(reason)
        if key not in self._reasons and len(self._reasons) >= MOST_REASONS:
            least = min(count, *self._reasons.values())
            self._reasons = +Counter({one: n - least for one, n in self._reasons.items()})
            self._texts = {one: self._texts[one] for one in self._reasons}
            count -= least
        if count:
            self._texts.setdefault(key, reason)
            self._reasons[key] += count

    @property
    def mostly(self) -> bool:
        """Whether more than half of the sessions failed."""
        return 2 * self.failed > self.sessions

    @property
    def all_unasked(self) -> bool:
        """Whether the model took a turn in none of the sessions, although none failed."""
        return 0 < self.sessions == self.unasked

    def _most_frequent(self) -> tuple[str, int]:
        """The first text of the most frequent reason, and its count."""
        for key, count in self._reasons.most_common(1):
            return self._texts[key], count
        return self._last, 1  # all differ

    def metrics(self) -> dict[str, object]:
        """How many failed, and the most frequent reason. Empty if none did."""
        if not self.failed:
            return {}
        reason, times = self._most_frequent()
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
        reason, times = self._most_frequent()
        return (
            f"; {self.failed} of {self.sessions} sessions failed, most often ({times} times)"
            f" {reason}"
        )
