"""The books of a run, added up again from its files alone: groups, outcomes, evaluations,
checkpoints, metrics, and run.json, which says where each attempt began.

A group is known by (attempt that made it, ordinal). An attempt that goes on from a checkpoint
undoes whatever the one before did after it: what the chain of attempts to the last one has kept
*survives*; the rest was abandoned by a restart. Nothing here trusts a counter that the run kept of
itself: its metrics, and the learner's own count of tokens, are compared with the rows.
"""

from __future__ import annotations

import bisect
import json
import math
import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from asyncrl.config import ConfigError
from asyncrl.contracts.errors import NoCheckpointError, UnreadableCheckpointError
from asyncrl.contracts.outcomes import OUTCOMES
from asyncrl.contracts.state import State
from asyncrl.data.prompts import prompt_ids_of
from asyncrl.preflight.specs import data_spec
from asyncrl.rundir.checkpoint import CheckpointStore
from asyncrl.rundir.directory import read_record
from asyncrl.rundir.metrics import METRICS_FILE, read_metrics
from asyncrl.rundir.outcomes import read_outcomes
from asyncrl.rundir.reader import Run
from asyncrl.rundir.resume import data_hash, model_hash
from asyncrl.rundir.rows import FAULTS, UNEVEN, Row, read_rows
from asyncrl.runtime import parquet
from asyncrl.runtime.files import open_regular, read_text

__all__ = ["Books", "Check", "audit", "audit_text"]

Key = tuple[int, int]
"""(attempt that made the group, ordinal)."""

UNREADABLE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    OverflowError,
    MemoryError,
    RecursionError,
    pa.ArrowException,
)
"""What reading a damaged file can raise."""
ENDED = ("trained", "skipped", "filtered", "dropped", "failed")
COLUMNS = 120
MOST_OF_A_HOLE = 1000
LOST = ("late", "failed")
"""Of an evaluation's completions, those that did not come."""
CLOSE = 1e-5
"""Rewards are kept in float32."""
SHOWN = 5
"""Examples named by a check that fails."""
BIAS = 0.05
"""Largest difference between the length distributions of what was trained and what was generated,
as a share; chance is added."""
OUTCOMES_FILE = re.compile(r"attempt_(?P<attempt>\d{4,9})-\d{6,12}\.parquet", re.ASCII)
GROUPS_FILE = re.compile(r"attempt_(?P<attempt>\d{4,9})-\d{8,12}\.parquet", re.ASCII)
EVALUATIONS_FILE = re.compile(
    r"attempt_(?P<attempt>\d{4,9})-version_\d{8,12}-[A-Za-z0-9_-]+\.parquet", re.ASCII
)


@dataclass(frozen=True, slots=True)
class Check:
    """One invariant: whether it holds, and the numbers behind it in one line."""

    name: str
    passed: bool
    said: str


class Books:
    """A run's files, read once."""

    def __init__(self, run: Run) -> None:
        self.run = run
        record = read_record(run.directory)
        self.run_id: str = record["run_id"]
        self.attempts: list[dict[str, Any]] = record["attempts"]
        self.unreadable: list[str] = []
        """A line for each file that cannot be read, or does not hold what was written."""
        self.outcomes: list[dict[str, Any]] = []
        """Files that were being merged may hold a row twice, which counts once; two rows that
        differ are two outcomes."""
        self.outstanding: dict[int, set[int]] = {}
        """Attempt → ordinals outstanding when its outcomes were last written."""
        self.rows: dict[Key, Row] = {}
        self.twice: list[Key] = []
        """Groups of which there are two rows that differ."""
        self.records: list[dict[str, Any]] = []
        """Of metrics.jsonl, those of steps and evaluations."""
        self.answers: dict[tuple[int, int, str], list[dict[str, Any]]] = defaultdict(list)
        """(attempt, version, set) → what was kept of its completions."""
        self._read_folder("outcomes", OUTCOMES_FILE, self._read_outcomes)
        self.outcomes = list({tuple(ended.values()): ended for ended in self.outcomes}.values())
        self._read_folder("groups", GROUPS_FILE, self._read_rows)
        self._read_folder("evaluations", EVALUATIONS_FILE, self._read_answers)
        self._read(run.directory / METRICS_FILE, self._read_metrics)

    @property
    def last(self) -> int:
        return len(self.attempts) - 1

    def _read_folder(
        self, folder: str, named: re.Pattern[str], read: Callable[[Path], None]
    ) -> None:
        directory = self.run.directory / folder
        if not directory.is_dir():
            if directory.exists():
                self.unreadable.append(f"{directory} is no directory; put back what asyncrl wrote")
            return
        for path in sorted(directory.iterdir()):
            if path.name.startswith("."):
                continue  # still being written, or left by a crash: nobody reads it
            if path.is_symlink():
                self.unreadable.append(f"{path} is a symbolic link; put a real file in its place")
            elif (found := named.fullmatch(path.name)) is None or int(found["attempt"]) > self.last:
                self.unreadable.append(
                    f"{path} is no file of this run's attempts; move it elsewhere"
                )
            else:
                self._read(path, read)

    def _read(self, path: Path, read: Callable[[Path], None]) -> None:
        try:
            read(path)
        except UNREADABLE as error:
            reason = " ".join(str(error).split())
            self.unreadable.append(
                reason if str(path) in reason else f"{path}: {reason or type(error).__name__}"
            )

    def _read_outcomes(self, path: Path) -> None:
        table, outstanding = read_outcomes(path)
        attempt = int(path.name.removeprefix("attempt_").split("-")[0])
        for ended in table.to_pylist():
            if reason := _impossible_outcome(ended, attempt):
                self.unreadable.append(
                    f"{path}: the outcome of ordinal {ended['ordinal']} {reason}"
                )
            else:
                self.outcomes.append(ended)
        self.outstanding[attempt] = set(outstanding)

    def _read_rows(self, path: Path) -> None:
        attempt = int(path.name.removeprefix("attempt_").split("-")[0])
        for row in read_rows(path):
            if row.attempt != attempt or row.ordinal is None or row.ordinal < 0:
                self.unreadable.append(
                    f"{path}: a row says that it is ordinal {row.ordinal} of attempt {row.attempt}"
                )
                continue
            known = self.rows.setdefault((row.attempt, row.ordinal), row)
            if known.content != row.content:
                self.twice.append((row.attempt, row.ordinal))

    def _read_answers(self, path: Path) -> None:
        for answer in parquet.read_table(
            path, ["set", "attempt", "version", "ordinal", "index", "status", "accuracy"]
        ).to_pylist():
            named = (
                f"attempt_{answer['attempt']:04d}-version_{answer['version']:08d}-{answer['set']}"
            )
            if path.name != f"{named}.parquet":
                raise ValueError(
                    f"a row is of set {answer['set']!r}, attempt {answer['attempt']}, version"
                    f" {answer['version']}"
                )
            self.answers[answer["attempt"], answer["version"], answer["set"]].append(answer)

    def _read_metrics(self, path: Path) -> None:
        if path.is_symlink():
            raise ValueError("it is a symbolic link; put a real file in its place")
        if path.exists():
            open_regular(path).close()
            records = [
                {"attempt": None, "step": None, "version": None, **record}
                for record in read_metrics(path.parent)
            ]
            self.records = [
                record
                for record in records
                if record.get("event") in ("step", "evaluation", "checkpoint")
            ]

    @cached_property
    def successor(self) -> dict[int, int]:
        """Attempt → the one that went on from a checkpoint of it, along the chain that ends with
        the last attempt."""
        found, at = {}, self.last
        while (before := self.attempts[at]["from_attempt"]) is not None:
            found[before] = at
            at = before
        return found

    def finished_before(self, attempt: int, ordinal: int) -> bool:
        """Whether the ordinal had its outcome in the checkpoint that the attempt began from."""
        begun = self.attempts[attempt]
        return ordinal < begun["frontier"] or ordinal in self._finished_above[attempt]

    @cached_property
    def _finished_above(self) -> list[set[int]]:
        return [set(begun["finished_above"]) for begun in self.attempts]

    @cached_property
    def surviving(self) -> list[dict[str, Any]]:
        """The outcomes that the chain of attempts to the last one has kept, without those that only
        waited."""
        return [
            ended for ended in self.outcomes if ended["outcome"] in ENDED and self._survives(ended)
        ]

    def _survives(self, ended: Mapping[str, Any]) -> bool:
        decided = ended["ended_in"]
        if decided == self.last:
            return True
        return decided in self.successor and self.finished_before(
            self.successor[decided], ended["ordinal"]
        )

    @cached_property
    def outcome(self) -> dict[Key, str]:
        return {(ended["attempt"], ended["ordinal"]): ended["outcome"] for ended in self.surviving}

    @cached_property
    def admitted(self) -> set[Key]:
        """All groups with a trace: a row, a outcome, or a place among those outstanding when
        outcomes were last written."""
        traced = {*self.rows, *((ended["attempt"], ended["ordinal"]) for ended in self.outcomes)}
        return traced | {
            (attempt, ordinal)
            for attempt, ordinals in self.outstanding.items()
            for ordinal in ordinals
        }

    @cached_property
    def waiting(self) -> set[Key]:
        """Of the last attempt, those without an outcome, and those that it took over from its
        checkpoint."""
        taken_over = {
            (made_in, ordinal) for made_in, ordinal in self.attempts[self.last]["waiting"]
        }
        return {
            key
            for key in self.admitted | taken_over
            if key not in self.outcome and (key[0] == self.last or key in taken_over)
        }

    def forgotten(self) -> list[Key]:
        """Of the last attempt, groups that have a row and no outcome, and that it did not count
        among those under way when outcomes were last written. Those admitted after that have higher
        ordinals."""
        known = self.outstanding.get(self.last, set()) | {
            ended["ordinal"] for ended in self.outcomes if ended["attempt"] == self.last
        }
        taken_over = {ordinal for _, ordinal in self.attempts[self.last]["waiting"]}
        return sorted(
            key
            for key in self.waiting
            if key[0] == self.last
            and key[1] not in known | taken_over
            and key[1] < max(known, default=-1)
        )

    @property
    def checkpoint(self) -> tuple[Path, State] | None:
        """The newest committed one that can be read."""
        return self._checkpoint[0]

    @property
    def damage(self) -> list[str]:
        """What prevents a newer one, a line each."""
        return self._checkpoint[1]

    @cached_property
    def _checkpoint(self) -> tuple[tuple[Path, State] | None, list[str]]:
        try:
            path, state, passed_over = CheckpointStore(
                self.run.checkpoints_directory, keep=1
            ).find()
        except NoCheckpointError:
            return None, []
        except UnreadableCheckpointError as error:
            return None, [str(error)]
        return (path, state), passed_over

    def trained(
        self, before_version: float = float("inf")
    ) -> Iterator[tuple[dict[str, Any], Row | None]]:
        """Surviving trained outcomes, by groups trained at a version before that, and the groups'
        rows."""
        for ended in self.surviving:
            if ended["outcome"] == "trained" and ended["trained_at_version"] < before_version:
                yield ended, self.rows.get((ended["attempt"], ended["ordinal"]))


def audit(run: Run) -> list[Check]:
    """Every invariant, recomputed.

    Raises:
        ConfigError: the directory has no record of its attempts.
    """
    books = Books(run)
    checks: Sequence[Callable[[Books], Check]] = (
        _files_readable,
        _balance,
        _one_outcome,
        _no_gap,
        _distinct,
        _bound,
        _whole,
        _one_row,
        _content,
        _possible,
        _not_from_the_future,
        _steps,
        _prompts,
        _tokens,
        _readable,
        _record,
        _metrics,
        _evaluations,
        _monotone,
        _lengths,
    )
    return [check(books) for check in checks]


def audit_text(checks: Sequence[Check]) -> str:
    """A table for a terminal of `COLUMNS` characters."""
    width = max(len(check.name) for check in checks)
    heads = [f"{'pass' if check.passed else 'FAIL'}  {check.name:<{width}}  " for check in checks]
    rows = [
        textwrap.fill(check.said, COLUMNS, initial_indent=head, subsequent_indent=" " * len(head))
        for check, head in zip(checks, heads, strict=True)
    ]
    return "\n".join(rows)


def _balance(books: Books) -> Check:
    """admitted = trained + skipped + filtered + dropped + failed + waiting + abandoned; and no
    admitted ordinal without a trace."""
    counts = Counter(books.outcome.values())
    abandoned = len(books.admitted - books.outcome.keys() - books.waiting)
    lost = [
        (attempt, ordinal)
        for attempt in range(len(books.attempts))
        for ordinal in _lost(books, attempt)
    ]
    parts = [
        *((name, counts[name]) for name in ENDED),
        ("waiting", len(books.waiting)),
        ("abandoned by a restart", abandoned),
    ]
    total = len(books.admitted)
    said = f"{total} admitted = " + " + ".join(
        f"{count} {name}" for name, count in parts if count or name == "trained"
    )
    if lost:
        said += f"; {len(lost)} without any trace: {_some(lost)}"
    if forgotten := books.forgotten():
        said += (
            f"; {len(forgotten)} that nobody counts as under way, and without an outcome:"
            f" {_some(forgotten)}"
        )
    return Check(
        "every admitted group is accounted for",
        not lost and not forgotten and total == sum(count for _, count in parts),
        said,
    )


def _lost(books: Books, attempt: int) -> list[int]:
    """Ordinals are admitted in their order: between the first and the last of an attempt, each has
    a trace, unless it was admitted after the last record and the attempt was killed."""
    begun = books.attempts[attempt]
    recorded = [
        *books.outstanding.get(attempt, ()),
        *(ended["ordinal"] for ended in books.outcomes if ended["attempt"] == attempt),
    ]
    traced = {ordinal for made_in, ordinal in books.admitted if made_in == attempt} | {
        ordinal for _, ordinal in begun["waiting"]
    }
    return _holes(
        begun["frontier"], max(recorded, default=-1) + 1, traced | set(begun["finished_above"])
    )


def _holes(start: int, stop: int, known: Set[int]) -> list[int]:
    """What `known` lacks of start, …, stop - 1; of each hole at most MOST_OF_A_HOLE numbers, since
    a damaged file may give any number for an end."""
    found: list[int] = []
    at = start
    for one in [*sorted(number for number in known if start <= number < stop), stop]:
        found += range(at, min(one, at + MOST_OF_A_HOLE))
        at = one + 1
    return found


def _one_outcome(books: Books) -> Check:
    counts = Counter(ended["ordinal"] for ended in books.surviving)
    twice = sorted(ordinal for ordinal, count in counts.items() if count > 1)
    said = f"{len(counts)} ordinals" + (f"; with two or more: {_some(twice)}" if twice else "")
    written = Counter(
        (ended["attempt"], ended["ordinal"], ended["ended_in"]) for ended in books.outcomes
    )
    again = sorted(
        {key[:2] for key, count in written.items() if count > 1}
        - {
            (ended["attempt"], ended["ordinal"])
            for ended in books.surviving
            if ended["ordinal"] in twice
        }
    )
    said += f"; with two outcomes in one attempt: {_some(again)}" if again else ""
    odd = sorted(
        {
            (ended["attempt"], ended["ordinal"])
            for ended in books.outcomes
            if (ended["outcome"] == "trained") != (ended["trained_at_version"] is not None)
        }
    )
    said += f"; not trained, and with a version that trained it: {_some(odd)}" if odd else ""
    return Check("each ordinal has one outcome", not twice and not again and not odd, said)


def _no_gap(books: Books) -> Check:
    """Below the frontier every ordinal has its outcome, and the newest checkpoint says the same of
    those that it knows."""
    finished = {ended["ordinal"] for ended in books.surviving}
    first = books.attempts[min(books.successor, default=books.last)]
    known = finished | set(first["finished_above"])
    frontier, above, again = first["frontier"], set(), []
    if books.checkpoint is not None:
        state = books.checkpoint[1]
        frontier, above = state.frontier, set(state.finished_above)
        again = sorted(
            ended["ordinal"]
            for ended, _ in books.trained(state.version)
            if ended["ordinal"] >= frontier and ended["ordinal"] not in above
        )
    missing = sorted(
        {
            *_holes(first["frontier"], frontier, known),
            *(ordinal for ordinal in above - known if ordinal >= first["frontier"]),
        }
    )
    said = f"frontier {frontier}" + (
        f" of {books.checkpoint[0].name}" if books.checkpoint else "; no checkpoint yet"
    )
    said += f"; without an outcome: {_some(missing)}" if missing else ""
    said += f"; trained before it, and it would train them again: {_some(again)}" if again else ""
    return Check("no gap below the frontier", not missing and not again, said)


def _distinct(books: Books) -> Check:
    trained = [ended["ordinal"] for ended, _ in books.trained()]
    return Check(
        "trained ordinals are distinct",
        len(trained) == len(set(trained)),
        f"{len(trained)} trained, {len(set(trained))} distinct",
    )


def _bound(books: Books) -> Check:
    """From the tokens' versions, not from what the outcome says; and both agree."""
    beyond, worst, differ = [], 0, []
    for ended, row in books.trained():
        if row is None or row.oldest is None:
            continue
        staleness = ended["trained_at_version"] - row.oldest
        worst = max(worst, staleness)
        if staleness > books.attempts[ended["ended_in"]]["max_staleness"]:
            beyond.append(ended["ordinal"])
        if staleness != ended["staleness"]:
            differ.append(ended["ordinal"])
    bounds = sorted({begun["max_staleness"] for begun in books.attempts})
    said = f"largest {worst}, bound {' or '.join(map(str, bounds))}"
    said += f"; beyond it: {_some(beyond)}" if beyond else ""
    said += f"; another than its outcome says: {_some(differ)}" if differ else ""
    return Check("staleness stays within the bound", not beyond and not differ, said)


def _whole(books: Books) -> Check:
    """Every trained group has its row, with all trajectories, and each of them all of its
    tokens."""
    without, torn, count = [], [], 0
    for ended, row in books.trained():
        count += 1
        if row is None:
            without.append(ended["ordinal"])
        elif (
            not row.whole or len(row.lengths) != books.attempts[row.attempt]["n_samples_per_prompt"]
        ):
            torn.append(ended["ordinal"])
    said = (
        f"{count} trained"
        + (f"; without a row: {_some(without)}" if without else "")
        + (f"; not whole: {_some(torn)}" if torn else "")
    )
    return Check("trained groups are whole", not without and not torn, said)


def _files_readable(books: Books) -> Check:
    said = f"{len(books.outcomes)} outcomes, {len(books.rows)} groups"
    return Check(
        "every file can be read", not books.unreadable, "; ".join(books.unreadable[:SHOWN]) or said
    )


def _one_row(books: Books) -> Check:
    """A group has one row, and no two groups that were trained are the same generation."""
    first: dict[str, Key] = {}
    copies = []
    for ended, row in books.trained():
        if row is not None and first.setdefault(row.generation, (row.attempt, row.ordinal)) != (
            row.attempt,
            row.ordinal,
        ):
            copies.append(f"{ended['ordinal']} (as {first[row.generation][1]})")
    said = f"{len(books.rows)} groups" + (
        f"; two rows that differ: {_some(books.twice)}" if books.twice else ""
    )
    said += f"; trained again under another ordinal: {_some(copies)}" if copies else ""
    return Check("each group has one row of its own", not books.twice and not copies, said)


def _content(books: Books) -> Check:
    """Each row is what was scored: its hash is the one in its outcome, and their tokens agree."""
    changed, tokens, checked = [], [], 0
    for ended in books.outcomes:
        row = books.rows.get((ended["attempt"], ended["ordinal"]))
        if row is None or ended["content"] is None:
            continue
        checked += 1
        if row.content != ended["content"]:
            changed.append((row.attempt, row.ordinal))
        if ended["completion_tokens"] != sum(row.lengths) and (
            ended["completion_tokens"] is not None or ended["outcome"] == "trained"
        ):
            tokens.append((row.attempt, row.ordinal))
    unsealed = sorted(
        {
            (ended["attempt"], ended["ordinal"])
            for ended in books.outcomes
            if ended["outcome"] == "trained" and not ended["content"]
        }
    )
    said = f"{checked} compared" + (
        f"; changed since: {_some(sorted(set(changed)))}" if changed else ""
    )
    said += (
        f"; another number of tokens than the outcome says: {_some(sorted(set(tokens)))}"
        if tokens
        else ""
    )
    said += f"; trained, and the outcome has no hash: {_some(unsealed)}" if unsealed else ""
    return Check("rows are what was scored", not changed and not tokens and not unsealed, said)


def _possible(books: Books) -> Check:
    """Masks, spans and times that asyncrl can have written."""
    found = [
        f"{fault}: {_some(keys)}"
        for fault in (*FAULTS, UNEVEN)
        if (keys := [key for key, row in books.rows.items() if fault in row.faults])
    ]
    return Check(
        "masks, version spans and times are possible",
        not found,
        "; ".join(found) or f"{len(books.rows)} groups",
    )


def _not_from_the_future(books: Books) -> Check:
    """No token is of a version that did not exist: beyond the one that trained it, or beyond what
    its attempt reached."""
    reached = {begun["attempt"]: begun["version"] for begun in books.attempts}
    for ended in books.outcomes:
        if ended["outcome"] == "trained":
            reached[ended["ended_in"]] = max(
                reached[ended["ended_in"]], ended["trained_at_version"] + 1
            )
    found = {
        key
        for key, row in books.rows.items()
        if row.newest is not None and row.newest > reached.get(row.attempt, -1)
    }
    found |= {
        (row.attempt, row.ordinal)
        for ended, row in books.trained()
        if row is not None and (row.newest or 0) > ended["trained_at_version"]
    }
    said = f"newest version {max(reached.values(), default=0)}" + (
        f"; from the future: {_some(sorted(found))}" if found else ""
    )
    return Check("no token is of a version to come", not found, said)


def _steps(books: Books) -> Check:
    """Each step, applied or skipped, took as many groups as a batch has, under one number, and
    numbers and versions follow one another."""
    steps: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    skipped: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for ended in books.outcomes:
        if ended["outcome"] == "trained":
            steps[ended["ended_in"], ended["trained_at_version"]].append(ended)
        elif ended["outcome"] == "skipped":
            skipped[ended["ended_in"], ended["step"]].append(ended)
    batches = [
        (attempt, f"version {version}", outcomes)
        for (attempt, version), outcomes in sorted(steps.items())
    ]
    batches += [
        (attempt, f"skipped step {step}", outcomes)
        for (attempt, step), outcomes in sorted(skipped.items())
    ]
    uneven = [
        f"{name} has {len(outcomes)} of {size}"
        f" ({_some(sorted(outcome['ordinal'] for outcome in outcomes))})"
        for attempt, name, outcomes in batches
        if len(outcomes) != (size := books.attempts[attempt]["groups_per_step"])
    ]
    torn = [
        f"version {version} (ordinal {_odd_step(outcomes)})"
        for (_, version), outcomes in sorted(steps.items())
        if len({ended["step"] for ended in outcomes}) > 1
    ]
    missing, disordered, unnumbered = [], [], []
    for attempt in sorted({attempt for attempt, _ in steps} | {attempt for attempt, _ in skipped}):
        mine = sorted(version for made_in, version in steps if made_in == attempt)
        missing += _holes(books.attempts[attempt]["version"], max(mine, default=-1), set(mine))
        numbers = [steps[attempt, version][0]["step"] for version in mine]
        disordered += [
            mine[place + 1]
            for place in range(len(mine) - 1)
            if numbers[place] >= numbers[place + 1]
        ]
        taken = {*numbers, *(step for made_in, step in skipped if made_in == attempt)}
        unnumbered += [(attempt, step) for step in _holes(min(taken), max(taken), taken)]
    parts: dict[str, Sequence[Any]] = {
        "not a full batch": uneven,
        "of several steps": torn,
        "without any group": missing,
        "of a step before the last one": disordered,
        "steps of which no group tells (attempt, step)": unnumbered,
    }
    found = [f"{name}: {_some(some)}" for name, some in parts.items() if some]
    return Check(
        "every step trained one batch", not found, "; ".join([f"{len(steps)} steps", *found])
    )


def _record(books: Books) -> Check:
    """run.json, config.yaml and the checkpoints are of one run, with the same bounds."""
    last, config, wrong = books.attempts[books.last], books.run.config, []
    bounds = {
        "max_staleness": config.staleness.max_staleness,
        "n_samples_per_prompt": config.rollout.n_samples_per_prompt,
        "groups_per_step": config.groups_per_step,
    }
    wrong += [
        f"attempt {books.last} began with {name} {last[name]}, and config.yaml has {value}"
        for name, value in bounds.items()
        if last[name] != value
    ]
    for begun in books.attempts:
        step = Path(begun["checkpoint"] or "").name.removeprefix("step_")
        if (int(step) if step.isdecimal() else 0) != begun["version"]:
            wrong.append(
                f"attempt {begun['attempt']} began at version {begun['version']}, and from"
                f" {begun['checkpoint'] or 'no checkpoint'}"
            )
        if begun["checkpoint"] is None and (
            begun["frontier"]
            or begun["finished_above"]
            or begun["waiting"]
            or begun["trained_tokens"]
        ):
            wrong.append(
                f"attempt {begun['attempt']} began from no checkpoint, and at frontier"
                f" {begun['frontier']} with {begun['trained_tokens']} tokens trained"
            )
    if books.checkpoint is not None and books.checkpoint[1].run_id != books.run_id:
        wrong.append(
            f"{books.checkpoint[0].name} is of run {books.checkpoint[1].run_id!r}, and run.json of"
            f" {books.run_id!r}"
        )
    if (
        books.checkpoint is None
        and not books.damage
        and any(record["event"] == "checkpoint" for record in books.records)
    ):
        wrong.append(
            f"{books.run.checkpoints_directory} holds no checkpoint, and {METRICS_FILE} tells of"
            " some"
        )
    return Check(
        "record, config and checkpoints agree",
        not wrong,
        "; ".join(wrong[:SHOWN]) or f"{len(books.attempts)} attempts",
    )


def _metrics(books: Books) -> Check:
    """What metrics.jsonl says of each step, worked out again from its groups: staleness, rewards,
    tokens. A step that was killed before its record has none."""
    batches: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for ended in books.outcomes:
        if ended["outcome"] in ("trained", "skipped"):
            batches[ended["ended_in"], ended["step"]].append(ended)
    records = {
        (record["attempt"], record["step"]): record
        for record in books.records
        if record["event"] == "step"
    }
    wrong = []
    for key, record in records.items():
        differing = _differing(books, batches.get(key, []), record)
        if differing:
            wrong.append(f"step {record['step']} of attempt {record['attempt']}: {differing}")
    without = [
        key
        for key in sorted(batches)
        if key not in records and any(other[0] == key[0] and other[1] > key[1] for other in records)
    ]
    said = f"{len(records)} steps" + (
        f"; not what its groups give: {_some(wrong)}" if wrong else ""
    )
    said += f"; without a record (attempt, step): {_some(without)}" if without else ""
    return Check("metrics are those of the groups", not wrong and not without, said)


def _differing(
    books: Books, outcomes: Sequence[Mapping[str, Any]], record: Mapping[str, Any]
) -> str:
    """The first metric of a step's record that its groups do not give, with both values and the
    ordinals; "" if all of them fit."""
    rows = [books.rows.get((ended["attempt"], ended["ordinal"])) for ended in outcomes]
    if not rows or any(row is None for row in rows):
        return "" if rows else "no outcome is of it"
    known = [row for row in rows if row is not None]
    trained = outcomes[0]["outcome"] == "trained"
    expected: dict[str, float] = (
        {"version": outcomes[0]["trained_at_version"] + 1} if trained else {}
    )
    if trained:
        expected["staleness/mean"] = math.fsum(ended["staleness"] or 0 for ended in outcomes) / len(
            outcomes
        )
        expected["tokens"] = sum(row.loss_tokens for row in known)
    completions = sum(len(row.lengths) for row in known)
    rewards = [reward for row in known for reward in row.rewards]
    if completions:
        expected["rollout/completion_tokens"] = sum(sum(row.lengths) for row in known) / completions
    if rewards:
        expected["reward/mean"] = math.fsum(rewards) / len(rewards)
    for name, value in expected.items():
        if name in record and not _close(record[name], value):
            return (
                f"{name} {record[name]}, its groups give {value:g} (ordinals"
                f" {_some(sorted(outcome['ordinal'] for outcome in outcomes))})"
            )
    return ""


def _evaluations(books: Books) -> Check:
    """The accuracy of each evaluated set, worked out again from its kept completions: one that did
    not come is 0, one without a score is left out."""
    records = {
        (record["attempt"], record["version"]): record
        for record in books.records
        if record["event"] == "evaluation"
    }
    wrong, compared = [], 0
    for (attempt, version, name), answers in sorted(books.answers.items()):
        record = records.get((attempt, version), {})
        if f"eval/{name}_accuracy" not in record:
            continue  # killed before its record, or a reward of another set has this name
        compared += 1
        places = Counter((answer["ordinal"], answer["index"]) for answer in answers)
        judged = [
            0.0 if answer["status"] in LOST else answer["accuracy"]
            for answer in answers
            if answer["status"] != "unscored"
        ]
        if max(places.values()) > 1 or None in judged:
            wrong.append(
                f"set {name} at version {version} of attempt {attempt} has an answer twice, or"
                " without its score"
            )
        elif judged and not _close(
            record[f"eval/{name}_accuracy"], found := math.fsum(judged) / len(judged)
        ):
            wrong.append(
                f"set {name} at version {version} of attempt {attempt}: accuracy"
                f" {record[f'eval/{name}_accuracy']}, its completions give {found:g}"
            )
    kept = {(attempt, version) for attempt, version, _ in books.answers}
    without = sorted(key for key in records if key not in kept)
    said = (
        f"{compared} sets"
        + (f"; {_some(wrong)}" if wrong else "")
        + (f"; without completions (attempt, version): {_some(without)}" if without else "")
    )
    return Check("evaluations are those of their completions", not wrong and not without, said)


def _close(recorded: Any, value: float) -> bool:
    return isinstance(recorded, int | float) and math.isclose(
        recorded, value, rel_tol=CLOSE, abs_tol=CLOSE
    )


def _prompts(books: Books) -> Check:
    """Every group has the prompt that its ordinal means, made again from the data and the
    tokenizer, if those are as they were."""
    name, last = "each prompt is its ordinal's", books.attempts[books.last]
    try:
        config = books.run.config
        same = (
            data_hash(config) == last["data_hash"] != ""
            and model_hash(config) == last["model_hash"] != ""
        )
    except ConfigError as error:
        return Check(name, True, f"not checked: {error}")
    if not same:
        return Check(
            name,
            True,
            "not checked: the data or the tokenizer that the run had are not here, or have changed",
        )
    rows: dict[int, list[Row]] = defaultdict(list)
    for row in books.rows.values():
        rows[row.ordinal].append(row)
    made_again = prompt_ids_of(data_spec(config), sorted(rows))
    others = [
        (row.attempt, ordinal)
        for ordinal, ids in made_again
        for row in rows[ordinal]
        if row.prompt_ids != ids
    ]
    return Check(
        name,
        not others,
        f"{len(rows)} ordinals" + (f"; another prompt: {_some(others)}" if others else ""),
    )


def _impossible_outcome(ended: Mapping[str, Any], attempt: int) -> str:
    """What nobody can count with, in a outcome that a file of that attempt holds; "" if nothing."""
    if any(ended[name] is None for name in ("attempt", "ordinal", "outcome", "step", "ended_in")):
        return "lacks a value"
    if ended["outcome"] not in OUTCOMES:
        return f"is {ended['outcome']!r}, which is none of {', '.join(OUTCOMES)}"
    if ended["ended_in"] != attempt or not 0 <= ended["attempt"] <= attempt:
        return f"was made in attempt {ended['attempt']} and decided in attempt {ended['ended_in']}"
    if ended["ordinal"] < 0 or ended["step"] < 0:
        return f"is of step {ended['step']}"
    if ended["outcome"] == "trained" and (
        ended["trained_at_version"] is None or ended["trained_at_version"] < 0
    ):
        return f"was trained at version {ended['trained_at_version']}"
    return ""


def _odd_step(outcomes: Sequence[Mapping[str, Any]]) -> int:
    """The ordinal whose step the fewest of its batch have."""
    counts = Counter(ended["step"] for ended in outcomes)
    return int(
        min(outcomes, key=lambda ended: (counts[ended["step"]], ended["ordinal"]))["ordinal"]
    )


def _tokens(books: Books) -> Check:
    """Loss tokens of what was trained before the newest checkpoint, against the learner's own count
    in it."""
    if books.checkpoint is None:
        return Check(
            "trained tokens equal the learner's count",
            not books.damage,
            "no checkpoint can be read" if books.damage else "no checkpoint yet",
        )
    path, state = books.checkpoint
    try:
        counted = int(json.loads(read_text(path / "learner" / "counters.json"))["trained_tokens"])
    except UNREADABLE as error:
        return Check(
            "trained tokens equal the learner's count",
            False,
            f"{path / 'learner' / 'counters.json'} cannot be read ({error})",
        )
    base = books.attempts[min(books.successor, default=books.last)]["trained_tokens"]
    found = base + sum(
        row.loss_tokens for _, row in books.trained(state.version) if row is not None
    )
    said = f"{found} up to {path.name}, the learner counted {counted}"
    return Check("trained tokens equal the learner's count", found == counted, said)


def _readable(books: Books) -> Check:
    """The checkpoint that a resume would take is the newest, and every file of it is what was
    committed."""
    said = "; ".join(books.damage) or (
        f"newest: {books.checkpoint[0].name}" if books.checkpoint else "no checkpoint yet"
    )
    return Check("the newest checkpoint is whole", not books.damage, said)


def _monotone(books: Books) -> Check:
    """A group that was asked of a replica after another was finished there has no token of an older
    version than that one's newest."""
    processes: dict[tuple[int, str], list[Row]] = defaultdict(list)
    for row in books.rows.values():
        if row.oldest is not None:
            processes[row.attempt, row.replica].append(row)
    back = []
    for rows in processes.values():
        done = sorted(rows, key=lambda row: row.finished_at)
        times, newest = (
            [row.finished_at for row in done],
            np.maximum.accumulate([-1 if row.newest is None else row.newest for row in done]),
        )
        for row in rows:
            before = bisect.bisect_left(times, row.started_at)
            if before and row.oldest is not None and row.oldest < newest[before - 1]:
                back.append(row.ordinal)
    said = f"{len(processes)} replica process{'es' * (len(processes) != 1)}" + (
        f"; went back for {_some(back)}" if back else ""
    )
    return Check("versions of a replica never go back", not back, said)


def _lengths(books: Books) -> Check:
    """Whether training prefers some lengths: the largest distance between the distributions of
    completion lengths (Kolmogorov-Smirnov), trained against all that was generated and has its
    outcome. Groups that wait may still be trained; those filtered for zero variance were left out
    on purpose.
    """
    generated = _sorted_lengths(
        row for key, row in books.rows.items() if books.outcome.get(key, "filtered") != "filtered"
    )
    trained = _sorted_lengths(row for _, row in books.trained() if row is not None)
    if not len(trained):
        return Check("lengths trained are those generated", True, "nothing was trained yet")
    at = np.unique(generated)
    distance = float(
        np.abs(
            np.searchsorted(trained, at, "right") / len(trained)
            - np.searchsorted(generated, at, "right") / len(generated)
        ).max()
    )
    allowed = BIAS + 1.36 / np.sqrt(len(trained))
    said = (
        f"trained {_quantiles(trained)}; generated {_quantiles(generated)}; largest distance"
        f" {distance:.3f}, allowed {allowed:.3f}"
    )
    return Check("lengths trained are those generated", distance <= allowed, said)


def _sorted_lengths(rows: Iterator[Row]) -> np.ndarray:
    return np.sort(np.array([length for row in rows for length in row.lengths], np.int64))


def _quantiles(lengths: np.ndarray) -> str:
    tenth, half, most = (int(np.quantile(lengths, share)) for share in (0.1, 0.5, 0.9))
    return (
        f"{len(lengths)} completions of {tenth}, {half}, {most} tokens (10, 50, 90%), mean"
        f" {lengths.mean():.1f}"
    )


def _some(found: Sequence[Any]) -> str:
    return ", ".join(map(str, found[:SHOWN])) + (
        f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    )
