"""Checks what the learner recorded of the tokens that it trained: `trained/*.parquet`."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from asyncrl.run.audit.books import Books, Key, OutcomeRow, key_of, trained_at
from asyncrl.run.audit.check import Check, close, listed
from asyncrl.rundir.audited_rows import ROUNDING, Row
from asyncrl.rundir.audited_tokens import SUMMED, TrainedRow

METRICS = {"weights": "weight_mean", "clipped": "clip_fraction", "masked": "mask_fraction"}
"""Column → the metric that is its mean over the step's tokens."""
TOO_FEW = "tokens are missing"
Recorded = dict[tuple[int, int, Key], list[tuple[int, TrainedRow]]]
"""(attempt that trained it, version, group) → (index of the trajectory, row)."""


def check_trained(books: Books) -> Check:
    """The trained tokens that the learner recorded are those of the trained groups, and give the
    counts and means in metrics.jsonl. An attempt that did not finish may lack rows of steps that no
    checkpoint has: its learner was ended while it wrote them."""
    recorded: Recorded = defaultdict(list)
    for (trained_in, version, made_in, ordinal, index, _), row in books.trained_rows.items():
        recorded[trained_in, version, (made_in, ordinal)].append((index, row))
    recording = {trained_in for trained_in, *_ in recorded} | {
        number for number, one in enumerate(books.attempts) if one.get("records_tokens")
    }
    batches: dict[tuple[int, int], list[OutcomeRow]] = defaultdict(list)
    for outcome in books.outcomes:
        if outcome["outcome"] == "trained" and outcome["ended_in"] in recording:
            batches[outcome["ended_in"], outcome["step"]].append(outcome)
    metrics = {
        (record.attempt, record.step): record.values
        for record in books.records
        if record.event == "step"
    }
    saved = _saved(books)
    wrong = [
        f"step {step} of attempt {attempt}: {fault}"
        for (attempt, step), batch in sorted(batches.items())
        if (fault := _fault(books, batch, recorded, metrics.get((attempt, step), {})))
        and not (
            fault.startswith(TOO_FEW)
            and books.attempts[attempt].get("outcome") != "finished"
            and trained_at(batch[0]) >= saved.get(attempt, 0)
        )
    ]
    wrong += _surplus(books, recorded)
    tokens = sum(row.tokens for row in books.trained_rows.values())
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


def _fault(
    books: Books, batch: Sequence[OutcomeRow], recorded: Recorded, metrics: Mapping[str, object]
) -> str:
    """What the recorded tokens of a step contradict: its groups, or else its metrics; "" if
    nothing."""
    rows: list[TrainedRow] = []
    missing = ""
    for outcome in batch:
        found = recorded.get((outcome["ended_in"], trained_at(outcome), key_of(outcome)), [])
        rows += [row for _, row in found]
        group = books.rows.get(key_of(outcome))
        if group is None:
            continue
        fault = _fault_of_group(group, found, books.oldest_allowed(outcome) is not None)
        if fault.startswith(TOO_FEW):
            missing = missing or fault
        elif fault:
            return fault
    return missing or _fault_of_metrics(rows, metrics)


def _fault_of_group(group: Row, found: Sequence[tuple[int, TrainedRow]], masks: bool) -> str:
    """What the recorded rows of a group contradict; "" if nothing.

    Args:
        masks: whether tokens beyond the staleness bound were masked.
    """
    where, counts = f"group {group.ordinal}", Counter[int]()
    for index, row in found:
        counts[index] += row.tokens
        if not 0 <= index < len(group.lengths):
            return f"{where} has no trajectory {index}"
        inside = row.first >= 0 and row.last < group.lengths[index]
        if row.tokens and not (row.ordered and inside):
            return f"{where}: trajectory {index} has no tokens at the recorded positions"
        if not row.largest <= ROUNDING:  # also NaN
            return f"{where}: a log-prob of {row.largest} is not possible"
    for index, losses in enumerate(group.losses):
        if counts[index] > losses:
            return f"{where}: {counts[index]} tokens of trajectory {index}, its mask has {losses}"
        if counts[index] < losses and not masks:
            return f"{TOO_FEW}: {counts[index]} of {losses} of {where}, trajectory {index}"
    return ""


def _fault_of_metrics(rows: Sequence[TrainedRow], metrics: Mapping[str, object]) -> str:
    """The first metric of a step that its rows contradict; "" if none does."""
    tokens, counted = sum(row.tokens for row in rows), metrics.get("tokens")
    if isinstance(counted, int | float) and tokens < counted:
        return f"{TOO_FEW}: {tokens} of {counted:g}"
    if "tokens" in metrics and not close(counted, tokens):
        return f"tokens {counted}, the recorded ones are {tokens}"
    for name, metric in METRICS.items():
        at = SUMMED.index(name)
        found = math.fsum(row.sums[at] for row in rows) / max(1, tokens)
        if metric in metrics and not close(metrics[metric], found):
            return f"{metric} {metrics[metric]}, the recorded tokens give {found:g}"
    return ""


def _surplus(books: Books, recorded: Recorded) -> list[str]:
    """The recorded groups of finished attempts that no step of theirs took."""
    taken = {
        (outcome["ended_in"], key_of(outcome))
        for outcome in books.outcomes
        if outcome["outcome"] in ("trained", "skipped")
    }
    return [
        f"group {key[1]} was not taken by a step of attempt {trained_in} at version {version}"
        for trained_in, version, key in sorted(recorded)
        if books.attempts[trained_in].get("outcome") == "finished"
        and (trained_in, key) not in taken
    ]
