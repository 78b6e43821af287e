"""Opens finished runs whose books agree."""

from __future__ import annotations

from pathlib import Path

from independent_audit import wrong

import asyncrl
from asyncrl.run.audit import audit, audit_text
from asyncrl.rundir import Run


def audited(directory: Path) -> Run:
    """The run in a directory. Asserts that the audit and the independent audit find no fault."""
    run = asyncrl.open_run(directory)
    checks = audit(run)
    assert all(check.passed for check in checks), audit_text(checks)
    assert wrong(directory) == []
    return run
