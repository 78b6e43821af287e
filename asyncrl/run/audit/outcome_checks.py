"""Checks of the outcomes: every admitted group ends exactly once, and nothing is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

from asyncrl.run.audit.books import FINAL, Books, key_of, trained_at
from asyncrl.run.audit.check import Check, listed

MOST_OF_A_HOLE = 1000


def check_accounts(books: Books) -> Check:
    """admitted = trained + skipped + filtered + dropped + failed + waiting + abandoned, and no
    admitted ordinal lacks a trace."""
    counts = Counter(books.outcome.values())
    abandoned = len(books.admitted - books.outcome.keys() - books.waiting)
    lost = [
        (attempt, ordinal)
        for attempt in range(len(books.attempts))
        for ordinal in _lost(books, attempt)
    ]
    parts = [
        *((name, counts[name]) for name in FINAL),
        ("waiting", len(books.waiting)),
        ("abandoned by a restart", abandoned),
    ]
    total = len(books.admitted)
    summary = f"{total} admitted = " + " + ".join(
        f"{count} {name}" for name, count in parts if count or name == "trained"
    )
    if lost:
        summary += f"; {len(lost)} without any trace: {listed(lost)}"
    if forgotten := books.forgotten():
        summary += f"; {len(forgotten)} not outstanding and without an outcome: {listed(forgotten)}"
    return Check(
        "every admitted group is accounted for",
        not lost and not forgotten and total == sum(count for _, count in parts),
        summary,
    )


def _lost(books: Books, attempt: int) -> list[int]:
    """Ordinals of an attempt without a trace. Ordinals are admitted in order, so each between the
    first and the last recorded one must have a trace. Groups admitted after the last record of a
    killed attempt are not counted."""
    record = books.attempts[attempt]
    recorded = [
        *books.outstanding.get(attempt, ()),
        *(outcome["ordinal"] for outcome in books.outcomes if outcome["attempt"] == attempt),
    ]
    traced = {ordinal for made_in, ordinal in books.admitted if made_in == attempt} | {
        ordinal for _, ordinal in record["waiting"]
    }
    return holes(
        record["frontier"], max(recorded, default=-1) + 1, traced | set(record["finished_above"])
    )


def holes(start: int, stop: int, known: Set[int]) -> list[int]:
    """The numbers of start, …, stop - 1 that `known` lacks. Each hole gives at most MOST_OF_A_HOLE
    numbers, because a damaged file may contain any number."""
    found: list[int] = []
    at = start
    for present in [*sorted(number for number in known if start <= number < stop), stop]:
        found += range(at, min(present, at + MOST_OF_A_HOLE))
        at = present + 1
    return found


def check_one_outcome(books: Books) -> Check:
    """Each ordinal has one surviving outcome, and each group one outcome per attempt."""
    counts = Counter(outcome["ordinal"] for outcome in books.surviving)
    twice = sorted(ordinal for ordinal, count in counts.items() if count > 1)
    written = Counter((*key_of(outcome), outcome["ended_in"]) for outcome in books.outcomes)
    again = sorted(
        {(attempt, ordinal) for (attempt, ordinal, _), count in written.items() if count > 1}
        - {key_of(outcome) for outcome in books.surviving if outcome["ordinal"] in twice}
    )
    odd = sorted(
        {
            key_of(outcome)
            for outcome in books.outcomes
            if (outcome["outcome"] == "trained") != (outcome["trained_at_version"] is not None)
        }
    )
    summary = f"{len(counts)} ordinals"
    summary += f"; with two or more: {listed(twice)}" if twice else ""
    summary += f"; with two outcomes in one attempt: {listed(again)}" if again else ""
    summary += f"; not trained, but with a training version: {listed(odd)}" if odd else ""
    return Check("each ordinal has one outcome", not twice and not again and not odd, summary)


def check_frontier(books: Books) -> Check:
    """Below the frontier every ordinal has its outcome, and the newest checkpoint agrees on the
    ordinals that it knows."""
    finished = {outcome["ordinal"] for outcome in books.surviving}
    known = finished | set(books.first["finished_above"])
    start = frontier = books.first["frontier"]
    above: set[int] = set()
    again: list[int] = []
    if books.checkpoint is not None:
        state = books.checkpoint[1]
        frontier, above = state.frontier, set(state.finished_above)
        again = sorted(
            outcome["ordinal"]
            for outcome, _ in books.trained(state.version)
            if outcome["ordinal"] >= frontier and outcome["ordinal"] not in above
        )
    missing = sorted(
        {
            *holes(start, frontier, known),
            *(ordinal for ordinal in above - known if ordinal >= start),
        }
    )
    summary = f"frontier {frontier}" + (
        f" of {books.checkpoint[0].name}" if books.checkpoint else "; no checkpoint yet"
    )
    summary += f"; without an outcome: {listed(missing)}" if missing else ""
    summary += (
        f"; trained before it, but it would train them again: {listed(again)}" if again else ""
    )
    return Check("no gap below the frontier", not missing and not again, summary)


def check_distinct(books: Books) -> Check:
    """No ordinal was trained twice."""
    trained = [outcome["ordinal"] for outcome, _ in books.trained()]
    return Check(
        "trained ordinals are distinct",
        len(trained) == len(set(trained)),
        f"{len(trained)} trained, {len(set(trained))} distinct",
    )


def check_staleness(books: Books) -> Check:
    """The staleness computed from the versions of the trained tokens is within the bound, and
    equals the one in the outcome. With `on_stale: mask`, tokens beyond the bound are not trained,
    and each group has another one."""
    beyond, largest, differ = [], 0, []
    for outcome, row in books.trained():
        if row is None or row.oldest is None:
            continue
        oldest = row.oldest
        if (oldest_allowed := books.oldest_allowed(outcome)) is not None:
            with_loss = sorted(version for version, tokens in row.loss_by_version.items() if tokens)
            oldest = next((one for one in with_loss if one >= oldest_allowed), row.oldest)
        staleness = trained_at(outcome) - oldest
        largest = max(largest, staleness)
        if staleness > books.attempts[outcome["ended_in"]]["max_staleness"]:
            beyond.append(outcome["ordinal"])
        if staleness != outcome["staleness"]:
            differ.append(outcome["ordinal"])
    bounds = sorted({attempt["max_staleness"] for attempt in books.attempts})
    summary = f"largest {largest}, bound {' or '.join(map(str, bounds))}"
    summary += f"; beyond it: {listed(beyond)}" if beyond else ""
    summary += f"; not the value in their outcome: {listed(differ)}" if differ else ""
    return Check("staleness stays within the bound", not beyond and not differ, summary)
