"""Says in one line that sessions failed, and why: while a run goes on, and at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from asyncrl.runtime.failure_reasons import reason_key

WHERE = "the column session_note of groups/*.parquet has every reason"
SHARE = 0.05
"""A smaller share of failed sessions is not shown while the run goes on."""
MOST_NOTES = 5
"""Different reasons that are shown while the run goes on."""


def failure_line(metrics: Mapping[str, object]) -> str:
    """One line about a record `failed_sessions`."""
    return (
        f"{metrics['failed']} of {metrics['sessions']} sessions failed, most often"
        f" ({metrics['times']} times) {metrics['reason']}; {WHERE}"
    )


class FailureNotes:
    """Which records of failed sessions the terminal shows."""

    def __init__(self) -> None:
        self._shown: set[str] = set()

    def note(self, metrics: Mapping[str, object]) -> str | None:
        """The line about a record. None: its reason was shown, or hardly any session failed."""
        failed, sessions = metrics["failed"], metrics["sessions"]
        key = reason_key(str(metrics["reason"]))
        assert isinstance(failed, int) and isinstance(sessions, int)
        if failed <= SHARE * sessions or key in self._shown or len(self._shown) >= MOST_NOTES:
            return None
        self._shown.add(key)
        return failure_line(metrics)


def failed_in_all(records: Sequence[Mapping[str, object]]) -> list[str]:
    """A line about all sessions that failed in a run; none if none did.

    Args:
        records: the run's metrics.
    """
    known = [record for record in records if record["event"] == "failed_sessions"]
    if not known:
        return []
    failed, reasons, others = 0, Counter[str](), False
    texts: dict[str, str] = {}
    for record in known:
        count, times = record["failed"], record["times"]
        assert isinstance(count, int) and isinstance(times, int)
        failed += count
        reason = str(record["reason"])
        key = reason_key(reason)
        texts.setdefault(key, reason)
        reasons[key] += times
        others |= times < count
    key, times = reasons.most_common(1)[0]
    least = "at least " if others else ""  # a record has its most frequent reason only
    return [f"{failed} sessions failed, most often ({least}{times} times) {texts[key]}; {WHERE}"]
