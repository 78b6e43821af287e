"""The audit of a run: recomputes its counts from its files alone and checks its invariants.

The audit trusts no counter that the run kept. It compares the metrics, and the learner's own count
of tokens, with the rows of groups and outcomes.
"""

from __future__ import annotations

from asyncrl.run.audit.books import UNREADABLE, Books
from asyncrl.run.audit.check import Check
from asyncrl.run.audit.report import audit, audit_text

__all__ = ["UNREADABLE", "Books", "Check", "audit", "audit_text"]
