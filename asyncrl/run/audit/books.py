"""The books of a run: its files, read once, and the groups and outcomes in them.

A group is identified by the attempt that made it and its ordinal. An attempt that resumes from a
checkpoint undoes what the previous attempt did after that checkpoint. Outcomes on
the chain of attempts that leads to the last one *survive*; a restart abandoned all others.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypedDict

import pyarrow as pa

from asyncrl.contracts.errors import NoCheckpointError, UnreadableCheckpointError
from asyncrl.contracts.outcomes import OUTCOMES
from asyncrl.contracts.state import State
from asyncrl.rundir.audited_rows import Row, read_rows
from asyncrl.rundir.audited_tokens import TrainedRow, read_trained
from asyncrl.rundir.checkpoint import CheckpointStore
from asyncrl.rundir.metrics import METRICS_FILE, read_metrics
from asyncrl.rundir.outcomes import read_outcomes
from asyncrl.rundir.reader import Run
from asyncrl.rundir.record import AttemptRecord, read_record
from asyncrl.rundir.tokens import RowKey
from asyncrl.runtime.files import parquet
from asyncrl.runtime.files.opening import open_regular

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
"""Exceptions that reading a damaged file can raise."""
FINAL = ("trained", "skipped", "filtered", "dropped", "failed")
"""The outcomes after which a group is done: all except `waiting`."""
OUTCOMES_FILE = re.compile(r"attempt_(?P<attempt>\d{4,9})-\d{6,12}\.parquet", re.ASCII)
GROUPS_FILE = re.compile(r"attempt_(?P<attempt>\d{4,9})-\d{8,12}\.parquet", re.ASCII)
TRAINED_FILE = re.compile(r"attempt_(?P<attempt>\d{4,9})-rank_\d{4,9}-\d{8,12}\.parquet", re.ASCII)
EVALUATIONS_FILE = re.compile(
    r"attempt_(?P<attempt>\d{4,9})-version_\d{8,12}-[A-Za-z0-9_-]+\.parquet", re.ASCII
)


class OutcomeRow(TypedDict):
    """A row of outcomes/*.parquet: see `asyncrl.contracts.outcomes.Outcome`."""

    attempt: int
    ordinal: int
    outcome: str
    reason: str
    step: int
    trained_at_version: int | None
    staleness: int | None
    completion_tokens: int | None
    content: str | None
    ended_in: int
    """The attempt that decided the outcome."""


class AnswerRow(TypedDict):
    """The columns of evaluations/*.parquet that the audit needs."""

    set: str
    attempt: int
    version: int
    ordinal: int
    index: int
    status: str
    accuracy: float | None


@dataclass(frozen=True, slots=True)
class MetricsRecord:
    """A record of metrics.jsonl. A field is None if the record has no integer there."""

    event: str
    attempt: int | None
    step: int | None
    version: int | None
    values: Mapping[str, object]
    """The whole record, by name."""


def key_of(row: OutcomeRow | Row) -> Key:
    """The key of the group that a row belongs to."""
    if isinstance(row, Row):
        return row.attempt, row.ordinal
    return row["attempt"], row["ordinal"]


def trained_at(outcome: OutcomeRow) -> int:
    """The version that the learner had when it trained the group of a `trained` outcome."""
    version = outcome["trained_at_version"]
    assert version is not None, "the books contain no trained outcome without its version"
    return version


class Books:
    """The files of a run, read once."""

    def __init__(self, run: Run) -> None:
        self.run = run
        record = read_record(run.directory)
        self.run_id = record["run_id"]
        self.attempts = record["attempts"]
        self.unreadable: list[str] = []
        """A line for each file that cannot be read, or whose content has changed."""
        self.outcomes: list[OutcomeRow] = []
        """A crash while files are merged leaves copies of a row, which count once. Two rows that
        differ are two outcomes."""
        self.outstanding: dict[int, set[int]] = {}
        """Attempt → ordinals outstanding when its outcomes were last written."""
        self.rows: dict[Key, Row] = {}
        self.twice: list[Key] = []
        """Groups that have two rows that differ."""
        self.records: list[MetricsRecord] = []
        """The records of steps, evaluations and checkpoints in metrics.jsonl."""
        self.answers: dict[tuple[int, int, str], list[AnswerRow]] = defaultdict(list)
        """(attempt, version, evaluation set) → the rows of its completions."""
        self._read_folder("outcomes", OUTCOMES_FILE, self._read_outcomes)
        self.outcomes = list({tuple(row.values()): row for row in self.outcomes}.values())
        self._read_folder("groups", GROUPS_FILE, self._read_rows)
        self.trained_rows: dict[RowKey, TrainedRow] = {}
        self._read_folder("trained", TRAINED_FILE, self._read_trained)
        self._read_folder("evaluations", EVALUATIONS_FILE, self._read_answers)
        self._read(run.directory / METRICS_FILE, self._read_metrics)

    @property
    def last(self) -> int:
        """The number of the last attempt."""
        return len(self.attempts) - 1

    def _read_folder(
        self, folder: str, named: re.Pattern[str], read: Callable[[Path], None]
    ) -> None:
        directory = self.run.directory / folder
        if not directory.is_dir():
            if directory.exists():
                self.unreadable.append(
                    f"{directory} is not a directory; restore what asyncrl wrote there"
                )
            return
        for path in sorted(directory.iterdir()):
            if path.name.startswith("."):
                continue  # a file that is still being written, or was left by a crash
            if path.is_symlink():
                self.unreadable.append(f"{path} is a symbolic link; replace it with a regular file")
            elif (found := named.fullmatch(path.name)) is None or int(found["attempt"]) > self.last:
                self.unreadable.append(
                    f"{path} does not belong to an attempt of this run; move it elsewhere"
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
        attempt = _attempt_in_name(path)
        rows: list[OutcomeRow] = table.to_pylist()
        for row in rows:
            if fault := _fault(row, attempt):
                self.unreadable.append(f"{path}: the outcome of ordinal {row['ordinal']} {fault}")
            else:
                self.outcomes.append(row)
        self.outstanding[attempt] = set(outstanding)

    def _read_rows(self, path: Path) -> None:
        attempt = _attempt_in_name(path)
        for row in read_rows(path):
            if row.attempt != attempt or row.ordinal is None or row.ordinal < 0:
                self.unreadable.append(
                    f"{path}: a row has ordinal {row.ordinal} of attempt {row.attempt}"
                )
                continue
            known = self.rows.setdefault(key_of(row), row)
            if known.content != row.content:
                self.twice.append(key_of(row))

    def _read_trained(self, path: Path) -> None:
        attempt = _attempt_in_name(path)
        for key, row in read_trained(path):
            if key[0] != attempt:
                raise ValueError(f"a row was trained in attempt {key[0]}")
            known = self.trained_rows.setdefault(key, row)
            # A crash while files are merged leaves copies. NaN differs from itself.
            if repr(known) != repr(row):
                self.unreadable.append(
                    f"{path}: trajectory {key[4]} of group {key[3]} has two rows that differ"
                )

    def _read_answers(self, path: Path) -> None:
        columns = ["set", "attempt", "version", "ordinal", "index", "status", "accuracy"]
        rows: list[AnswerRow] = parquet.read_table(path, columns).to_pylist()
        for row in rows:
            named = f"attempt_{row['attempt']:04d}-version_{row['version']:08d}-{row['set']}"
            if path.name != f"{named}.parquet":
                raise ValueError(
                    f"a row has set {row['set']!r}, attempt {row['attempt']}, version"
                    f" {row['version']}"
                )
            self.answers[row["attempt"], row["version"], row["set"]].append(row)

    def _read_metrics(self, path: Path) -> None:
        if path.is_symlink():
            raise ValueError("it is a symbolic link; replace it with a regular file")
        if path.exists():
            open_regular(path).close()
            # A file with a damaged line gives no records: the check of the files reports it.
            self.records = [
                _metrics_record({"attempt": None, "step": None, "version": None, **record})
                for record in read_metrics(path.parent)
                if record["event"] in ("step", "evaluation", "checkpoint")
            ]

    @cached_property
    def successor(self) -> dict[int, int]:
        """Attempt → the attempt that resumed from its checkpoint, along the chain that ends with
        the last attempt."""
        found, attempt = {}, self.last
        while (previous := self.attempts[attempt]["from_attempt"]) is not None:
            found[previous] = attempt
            attempt = previous
        return found

    @property
    def first(self) -> AttemptRecord:
        """The attempt with which the chain to the last attempt begins."""
        return self.attempts[min(self.successor, default=self.last)]

    def finished_before(self, attempt: int, ordinal: int) -> bool:
        """Whether the ordinal had its outcome in the checkpoint that the attempt resumed from."""
        return (
            ordinal < self.attempts[attempt]["frontier"] or ordinal in self._finished_above[attempt]
        )

    @cached_property
    def _finished_above(self) -> list[set[int]]:
        return [set(attempt["finished_above"]) for attempt in self.attempts]

    @cached_property
    def surviving(self) -> list[OutcomeRow]:
        """The FINAL outcomes on the chain of attempts that leads to the last one."""
        return [row for row in self.outcomes if row["outcome"] in FINAL and self._survives(row)]

    def _survives(self, outcome: OutcomeRow) -> bool:
        decided_in = outcome["ended_in"]
        if decided_in == self.last:
            return True
        return decided_in in self.successor and self.finished_before(
            self.successor[decided_in], outcome["ordinal"]
        )

    @cached_property
    def outcome(self) -> dict[Key, str]:
        """Group → its surviving outcome."""
        return {key_of(row): row["outcome"] for row in self.surviving}

    @cached_property
    def admitted(self) -> set[Key]:
        """All groups with a trace: a row, an outcome, or an entry in the ordinals outstanding
        when outcomes were last written."""
        return {
            *self.rows,
            *map(key_of, self.outcomes),
            *(
                (attempt, ordinal)
                for attempt, ordinals in self.outstanding.items()
                for ordinal in ordinals
            ),
        }

    @cached_property
    def waiting(self) -> set[Key]:
        """Groups of the last attempt without an outcome, and the groups without an outcome that it
        took over from its checkpoint."""
        taken_over = {
            (made_in, ordinal) for made_in, ordinal in self.attempts[self.last]["waiting"]
        }
        return {
            key
            for key in self.admitted | taken_over
            if key not in self.outcome and (key[0] == self.last or key in taken_over)
        }

    def forgotten(self) -> list[Key]:
        """Groups of the last attempt that have a row but no outcome, and that were not outstanding
        when outcomes were last written. Groups admitted after that have higher ordinals."""
        known = self.outstanding.get(self.last, set()) | {
            row["ordinal"] for row in self.outcomes if row["attempt"] == self.last
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
        """The newest committed checkpoint that can be read."""
        return self._checkpoint[0]

    @property
    def damage(self) -> list[str]:
        """One line for each newer checkpoint that cannot be read."""
        return self._checkpoint[1]

    @cached_property
    def _checkpoint(self) -> tuple[tuple[Path, State] | None, list[str]]:
        store = CheckpointStore(self.run.checkpoints_directory, keep=1)
        try:
            path, state, passed_over = store.find()
        except NoCheckpointError:
            return None, []
        except UnreadableCheckpointError as error:
            return None, [str(error)]
        return (path, state), passed_over

    def oldest_allowed(self, outcome: OutcomeRow) -> int | None:
        """The oldest version whose tokens the step of a `trained` outcome may train, with
        `on_stale: mask`. None without it: then no group with an older token may be trained."""
        attempt = self.attempts[outcome["ended_in"]]
        if not attempt.get("masks_stale"):
            return None
        return trained_at(outcome) - attempt["max_staleness"]

    def trained(
        self, before_version: float = float("inf")
    ) -> Iterator[tuple[OutcomeRow, Row | None]]:
        """Surviving `trained` outcomes, each with its group's row. `before_version` leaves out
        groups that were trained at that version or later."""
        for outcome in self.surviving:
            if outcome["outcome"] == "trained" and trained_at(outcome) < before_version:
                yield outcome, self.rows.get(key_of(outcome))


def _integer(value: object) -> int | None:
    """A whole number, also one that another tool wrote as 1.0."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) else None


def _metrics_record(values: Mapping[str, object]) -> MetricsRecord:
    return MetricsRecord(
        str(values["event"]),
        _integer(values["attempt"]),
        _integer(values["step"]),
        _integer(values["version"]),
        values,
    )


def _attempt_in_name(path: Path) -> int:
    return int(path.name.removeprefix("attempt_").split("-")[0])


def _fault(outcome: OutcomeRow, attempt: int) -> str:
    """Why an outcome in a file of the attempt cannot be used; "" if it can."""
    required = ("attempt", "ordinal", "outcome", "step", "ended_in")
    if any(outcome.get(name) is None for name in required):
        return "lacks a value"
    if outcome["outcome"] not in OUTCOMES:
        return f"is {outcome['outcome']!r}, which is none of {', '.join(OUTCOMES)}"
    if outcome["ended_in"] != attempt or not 0 <= outcome["attempt"] <= attempt:
        return (
            f"was made in attempt {outcome['attempt']} and decided in attempt {outcome['ended_in']}"
        )
    if outcome["ordinal"] < 0 or outcome["step"] < 0:
        return f"has step {outcome['step']}"
    if outcome["outcome"] == "trained" and (
        outcome["trained_at_version"] is None or outcome["trained_at_version"] < 0
    ):
        return f"was trained at version {outcome['trained_at_version']}"
    return ""
