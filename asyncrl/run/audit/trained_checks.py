"""Checks what the learner recorded of the tokens that it trained: `trained/*.parquet`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from asyncrl.run.audit.books import Books, Key, OutcomeRow, key_of, trained_at
from asyncrl.run.audit.check import Check, close, listed
from asyncrl.rundir.audited_tokens import TrainedRow

METRICS = {"weights": "weight_mean", "clipped": "clip_fraction", "masked": "mask_fraction"}
"""Column → the metric that is its mean over the step's tokens."""
TOO_FEW = "tokens are missing"


class _Step(NamedTuple):
    """A trained step of one attempt, whose record is there."""

    step: int
    version: int
    tokens: int
    fault: str
    """The first metric that its recorded tokens contradict; "" if none does."""


def check_trained(books: Books) -> Check:
    """The trained tokens that the learner recorded give the counts and means in metrics.jsonl. An
    attempt without any such row did not record them. A killed attempt may lack rows of its last
    steps, if no checkpoint has them."""
    rows: dict[tuple[int, int, Key], list[TrainedRow]] = defaultdict(list)
    for (trained_in, version, made_in, ordinal, *_), row in books.trained_rows.items():
        rows[trained_in, version, (made_in, ordinal)].append(row)
    recording = {trained_in for trained_in, *_ in rows}
    batches: dict[tuple[int, int], list[OutcomeRow]] = defaultdict(list)
    for outcome in books.outcomes:
        if outcome["outcome"] == "trained" and outcome["ended_in"] in recording:
            batches[outcome["ended_in"], outcome["step"]].append(outcome)
    steps: dict[int, list[_Step]] = defaultdict(list)
    for record in books.records:
        attempt, step = record.attempt, record.step
        if record.event != "step" or attempt is None or step is None:
            continue
        if batch := batches.get((attempt, step), []):
            version = trained_at(batch[0])
            found = [row for one in batch for row in rows[attempt, version, key_of(one)]]
            tokens = sum(row.tokens for row in found)
            steps[attempt].append(_Step(step, version, tokens, _fault(found, record.values)))
    saved = _saved(books)
    for attempt, of_attempt in steps.items():
        while of_attempt and "outcome" not in books.attempts[attempt]:
            last = of_attempt[-1]
            if not last.fault.startswith(TOO_FEW) or last.version < saved.get(attempt, 0):
                break
            of_attempt.pop()
    wrong = [
        f"step {one.step} of attempt {attempt}: {one.fault}"
        for attempt, of_attempt in sorted(steps.items())
        for one in of_attempt
        if one.fault
    ]
    tokens = sum(one.tokens for of_attempt in steps.values() for one in of_attempt)
    summary = f"{tokens} tokens" if recording else "none recorded"
    summary += f"; {listed(wrong)}" if wrong else ""
    return Check("the learner's tokens match the metrics", not wrong, summary)


def _saved(books: Books) -> dict[int, int]:
    """Attempt → the version of its last checkpoint."""
    found: dict[int, int] = {}
    for record in books.records:
        if record.event == "checkpoint" and record.attempt is not None:
            found[record.attempt] = max(found.get(record.attempt, 0), record.version or 0)
    return found


def _fault(rows: Sequence[TrainedRow], metrics: Mapping[str, object]) -> str:
    """The first metric of a step that its rows contradict; "" if none does."""
    tokens = sum(row.tokens for row in rows)
    counted = metrics.get("tokens")
    if isinstance(counted, int | float) and tokens < counted:
        return f"{TOO_FEW}: {tokens} of {counted:g}"
    if "tokens" in metrics and not close(counted, tokens):
        return f"tokens {counted}, the recorded ones are {tokens}"
    if not all(row.finite for row in rows):
        return "a recorded log-prob is not finite, and the step was applied"
    for name, metric in METRICS.items():
        found = math.fsum(row.sums[name] for row in rows) / max(1, tokens)
        if metric in metrics and not close(metrics[metric], found):
            return f"{metric} {metrics[metric]}, the recorded tokens give {found:g}"
    return ""
