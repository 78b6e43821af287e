"""One line of a check, for people."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

CHECK_WIDTH = 24
MIN_WIDTH = 60
"""Narrower terminals wrap the lines themselves."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found."""

    verdict: Literal["ok", "warn", "FAIL"]
    """`FAIL`: training on this would be false."""
    check: str
    text: str

    def lines(self, width: int | None = None) -> str:
        """The finding on one line, or wrapped to a width, in characters."""
        start = f"{self.verdict:<5} {self.check:<{CHECK_WIDTH}} "
        line = start + " ".join(self.text.split())
        if width is None or width < MIN_WIDTH:
            return line
        indent = " " * len(start)
        return textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False)


def findings_text(findings: Sequence[Finding], width: int | None = None) -> str:
    """The findings in lines of at most `width` characters, and their counts. None: a line each."""
    return "\n".join([*(one.lines(width) for one in findings), "", counts_text(findings)])


def counts_text(findings: Sequence[Finding]) -> str:
    """How many findings have each verdict."""
    verdicts = [finding.verdict for finding in findings]
    return ", ".join(f"{verdicts.count(one)} {one}" for one in ("ok", "warn", "FAIL"))
