"""Runs all checks and formats their results."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from asyncrl.config import OfflineConfig
from asyncrl.run.audit.books import Books
from asyncrl.run.audit.check import Check
from asyncrl.run.audit.file_checks import check_checkpoint, check_files, check_record
from asyncrl.run.audit.group_checks import (
    check_content,
    check_ends,
    check_lengths,
    check_monotone,
    check_one_row,
    check_possible,
    check_prompts,
    check_reference,
    check_turn_advantages,
    check_versions_exist,
    check_whole,
)
from asyncrl.run.audit.outcome_checks import (
    check_accounts,
    check_distinct,
    check_frontier,
    check_one_outcome,
    check_staleness,
)
from asyncrl.run.audit.step_checks import (
    check_evaluations,
    check_metrics,
    check_steps,
    check_tokens,
)
from asyncrl.run.audit.trained_checks import check_trained
from asyncrl.run.offline.audit import audit_offline
from asyncrl.rundir.reader import Run

COLUMNS = 120
"""Width of the report, in characters."""
CHECKS: Sequence[Callable[[Books], Check]] = (
    check_files,
    check_accounts,
    check_one_outcome,
    check_frontier,
    check_distinct,
    check_staleness,
    check_whole,
    check_one_row,
    check_content,
    check_possible,
    check_ends,
    check_versions_exist,
    check_reference,
    check_turn_advantages,
    check_steps,
    check_prompts,
    check_tokens,
    check_checkpoint,
    check_record,
    check_metrics,
    check_trained,
    check_evaluations,
    check_monotone,
    check_lengths,
)


def audit(run: Run) -> list[Check]:
    """Recompute and check every invariant.

    Raises:
        ConfigError: the directory has no record of its attempts.
    """
    if isinstance(run.settings, OfflineConfig):
        return audit_offline(run)
    books = Books(run)
    return [check(books) for check in CHECKS]


def audit_text(checks: Sequence[Check]) -> str:
    """Format the checks as a table for a terminal of `COLUMNS` characters."""
    width = max(len(check.name) for check in checks)
    heads = [f"{'pass' if check.passed else 'FAIL'}  {check.name:<{width}}  " for check in checks]
    rows = [
        textwrap.fill(
            check.summary, COLUMNS, initial_indent=head, subsequent_indent=" " * len(head)
        )
        for check, head in zip(checks, heads, strict=True)
    ]
    return "\n".join(rows)
