"""Checks of the steps: batches, metrics, trained tokens and evaluations."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from asyncrl.run.audit.books import (
    UNREADABLE,
    Books,
    MetricsRecord,
    OutcomeRow,
    key_of,
    trained_at,
)
from asyncrl.run.audit.check import Check, close, listed
from asyncrl.run.audit.outcome_checks import holes
from asyncrl.run.audit.trained_tokens import trained_tokens
from asyncrl.rundir.audited_rows import Row
from asyncrl.runtime.files.opening import read_text

SAMPLED = "session/tokens_sampled"
LOST = ("late", "failed")
"""Statuses of evaluation completions that did not arrive."""
Batches = Mapping[tuple[int, int], Sequence[OutcomeRow]]
"""(attempt, version or step) → the outcomes of one step."""


def check_steps(books: Books) -> Check:
    """Each step, applied or skipped, has one number and as many groups as a batch. Numbers and
    versions follow one another without a gap."""
    steps: dict[tuple[int, int], list[OutcomeRow]] = defaultdict(list)
    skipped: dict[tuple[int, int], list[OutcomeRow]] = defaultdict(list)
    for outcome in books.outcomes:
        if outcome["outcome"] == "trained":
            steps[outcome["ended_in"], trained_at(outcome)].append(outcome)
        elif outcome["outcome"] == "skipped":
            skipped[outcome["ended_in"], outcome["step"]].append(outcome)
    torn = [
        f"version {version} (ordinal {_odd_step(outcomes)})"
        for (_, version), outcomes in sorted(steps.items())
        if len({outcome["step"] for outcome in outcomes}) > 1
    ]
    missing: list[int] = []
    disordered: list[int] = []
    unnumbered: list[tuple[int, int]] = []
    for attempt in sorted({attempt for attempt, _ in steps} | {attempt for attempt, _ in skipped}):
        versions = sorted(version for made_in, version in steps if made_in == attempt)
        first = books.attempts[attempt]["version"]
        missing += holes(first, max(versions, default=-1), set(versions))
        numbers = [steps[attempt, version][0]["step"] for version in versions]
        disordered += [
            versions[index + 1]
            for index in range(len(versions) - 1)
            if numbers[index] >= numbers[index + 1]
        ]
        taken = {*numbers, *(step for made_in, step in skipped if made_in == attempt)}
        unnumbered += [(attempt, step) for step in holes(min(taken), max(taken), taken)]
    parts: dict[str, Sequence[object]] = {
        "not a full batch": _uneven(books, steps, skipped),
        "of several steps": torn,
        "without any group": missing,
        "numbered before an earlier step": disordered,
        "steps without any group (attempt, step)": unnumbered,
    }
    found = [f"{name}: {listed(examples)}" for name, examples in parts.items() if examples]
    return Check(
        "every step trained one batch", not found, "; ".join([f"{len(steps)} steps", *found])
    )


def _uneven(books: Books, steps: Batches, skipped: Batches) -> list[str]:
    """Steps whose number of groups differs from the batch size."""
    batches = [
        *((attempt, f"version {version}", found) for (attempt, version), found in _sorted(steps)),
        *((attempt, f"skipped step {step}", found) for (attempt, step), found in _sorted(skipped)),
    ]
    return [
        f"{name} has {len(outcomes)} of {size}"
        f" ({listed(sorted(outcome['ordinal'] for outcome in outcomes))})"
        for attempt, name, outcomes in batches
        if len(outcomes) != (size := books.attempts[attempt]["groups_per_step"])
    ]


def _sorted(batches: Batches) -> list[tuple[tuple[int, int], Sequence[OutcomeRow]]]:
    return sorted(batches.items(), key=lambda item: item[0])


def _odd_step(outcomes: Sequence[OutcomeRow]) -> int:
    """The ordinal whose step number is the rarest in its batch."""
    counts = Counter(outcome["step"] for outcome in outcomes)
    rarest = min(outcomes, key=lambda outcome: (counts[outcome["step"]], outcome["ordinal"]))
    return int(rarest["ordinal"])


def check_metrics(books: Books) -> Check:
    """Staleness, rewards and tokens of each step in metrics.jsonl equal those of its groups. A step
    that was killed before its record was written has none."""
    batches: dict[tuple[int, int], list[OutcomeRow]] = defaultdict(list)
    for outcome in books.outcomes:
        if outcome["outcome"] in ("trained", "skipped"):
            batches[outcome["ended_in"], outcome["step"]].append(outcome)
    records = {
        (record.attempt, record.step): record for record in books.records if record.event == "step"
    }
    wrong = []
    for (attempt, step), record in records.items():
        batch = [] if attempt is None or step is None else batches.get((attempt, step), [])
        if difference := _difference(books, batch, record):
            wrong.append(f"step {step} of attempt {attempt}: {difference}")
    last: dict[int, int] = {}
    for attempt, step in records:
        if attempt is not None and step is not None:
            last[attempt] = max(step, last.get(attempt, step))
    without = [
        (attempt, step)
        for attempt, step in sorted(batches)
        if (attempt, step) not in records and step < last.get(attempt, step)
    ]
    summary = f"{len(records)} steps"
    summary += f"; do not match their groups: {listed(wrong)}" if wrong else ""
    summary += f"; without a record (attempt, step): {listed(without)}" if without else ""
    return Check("metrics match their groups", not wrong and not without, summary)


def _difference(books: Books, outcomes: Sequence[OutcomeRow], record: MetricsRecord) -> str:
    """The first metric of a step's record that differs from its groups, with both values and the
    ordinals; "" if none does."""
    rows = [books.rows.get(key_of(outcome)) for outcome in outcomes]
    if not rows:
        return "no outcome belongs to it"
    known = [row for row in rows if row is not None]
    if len(known) < len(rows):
        return ""
    expected: dict[str, float] = {}
    if outcomes[0]["outcome"] == "trained":
        staleness = math.fsum(outcome["staleness"] or 0 for outcome in outcomes)
        expected["version"] = trained_at(outcomes[0]) + 1
        expected["staleness/mean"] = staleness / len(outcomes)
        expected["tokens"] = trained_tokens(books, list(zip(outcomes, known, strict=True)))
        expected["session/tokens_trained"] = expected["tokens"]
        compared = [row.reference for row in known if row.reference is not None]
        if len(compared) == len(known):
            age = trained_at(outcomes[0]) - sum(compared) / len(known)
            expected["reference/age_mean"] = age
    expected[SAMPLED] = sum(sum(row.lengths) for row in known)
    completions = sum(len(row.lengths) for row in known)
    rewards = [reward for row in known for reward in row.rewards]
    if completions:
        expected["rollout/completion_tokens"] = expected[SAMPLED] / completions
    if rewards:
        expected["reward/mean"] = math.fsum(rewards) / len(rewards)
    for name, value in expected.items():
        if name in record.values and not close(record.values[name], value):
            return (
                f"{name} {record.values[name]}, its groups give {value:g} (ordinals"
                f" {listed(sorted(outcome['ordinal'] for outcome in outcomes))})"
            )
    return _unbalanced(record)


def _unbalanced(record: MetricsRecord) -> str:
    """How the sampled tokens of a step's sessions differ from the sum of those that were trained
    and those that were not, by reason; "" if they do not."""
    parts = {
        name: value
        for name, value in record.values.items()
        if name.startswith("session/tokens_") and isinstance(value, int | float)
    }
    sampled, found = parts.pop(SAMPLED, 0.0), math.fsum(parts.values())
    return "" if close(sampled, found) else f"{SAMPLED} {sampled}, its parts give {found:g}"


def check_evaluations(books: Books) -> Check:
    """The accuracy of each evaluation set equals the one of its completions. A completion that did
    not arrive counts as 0, and one without a score is left out."""
    records = {
        (record.attempt, record.version): record
        for record in books.records
        if record.event == "evaluation"
    }
    wrong, compared = [], 0
    for (attempt, version, name), answers in sorted(books.answers.items()):
        record = records.get((attempt, version))
        metric = f"eval/{name}_accuracy"
        if record is None or metric not in record.values:
            continue  # killed before its record, or the name of another set's reward
        compared += 1
        where = f"set {name} at version {version} of attempt {attempt}"
        counts = Counter((answer["ordinal"], answer["index"]) for answer in answers)
        scores = [
            0.0 if answer["status"] in LOST else answer["accuracy"]
            for answer in answers
            if answer["status"] != "unscored"
        ]
        known = [score for score in scores if score is not None]
        if max(counts.values()) > 1 or len(known) < len(scores):
            wrong.append(f"{where} has a completion twice, or without its score")
        elif known and not close(record.values[metric], found := math.fsum(known) / len(known)):
            wrong.append(
                f"{where}: accuracy {record.values[metric]}, its completions give {found:g}"
            )
    kept = {(attempt, version) for attempt, version, _ in books.answers}
    without = sorted(
        (key for key in records if key not in kept),
        key=lambda key: tuple(-1 if part is None else part for part in key),
    )
    summary = f"{compared} sets"
    summary += f"; {listed(wrong)}" if wrong else ""
    summary += f"; without completions (attempt, version): {listed(without)}" if without else ""
    return Check("evaluations match their completions", not wrong and not without, summary)


def check_tokens(books: Books) -> Check:
    """The loss tokens trained before the newest checkpoint equal the learner's own count in it."""
    name = "trained tokens equal the learner's count"
    if books.checkpoint is None:
        return Check(
            name,
            not books.damage,
            "no checkpoint can be read" if books.damage else "no checkpoint yet",
        )
    path, state = books.checkpoint
    counters = path / "learner" / "counters.json"
    try:
        counted = int(json.loads(read_text(counters))["trained_tokens"])
    except UNREADABLE as error:
        return Check(name, False, f"{counters} cannot be read ({error})")
    batches: dict[int, list[tuple[OutcomeRow, Row]]] = defaultdict(list)
    for outcome, row in books.trained(state.version):
        if row is not None:
            batches[trained_at(outcome)].append((outcome, row))
    found = books.first["trained_tokens"] + sum(
        trained_tokens(books, batch) for batch in batches.values()
    )
    summary = f"{found} up to {path.name}, the learner counted {counted}"
    return Check(name, found == counted, summary)
