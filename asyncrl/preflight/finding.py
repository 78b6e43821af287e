"""One line of a check, for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "findings_text"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found."""

    verdict: Literal["ok", "warn", "FAIL"]
    """`FAIL`: training on this would be false."""
    check: str
    text: str

    def line(self) -> str:
        """The finding on one line."""
        return f"{self.verdict:<5} {self.check:<24} {' '.join(self.text.split())}"


def findings_text(findings: Sequence[Finding]) -> str:
    """A line for each finding, and the counts."""
    counts = {
        verdict: sum(one.verdict == verdict for one in findings)
        for verdict in ("ok", "warn", "FAIL")
    }
    total = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return "\n".join([*(one.line() for one in findings), "", total])
