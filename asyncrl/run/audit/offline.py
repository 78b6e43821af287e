"""The audit of a run on a dataset: recomputes each step's rows and tokens from the token rows and
the order of the data."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from asyncrl.config import OfflineConfig
from asyncrl.contracts.errors import NoCheckpointError, UnreadableCheckpointError
from asyncrl.contracts.state import State
from asyncrl.data.mixture import Order
from asyncrl.data.token_file import TokenFile, open_token_file
from asyncrl.preflight.offline_plan import ORDER_FILE
from asyncrl.run.audit.check import SHOWN, Check, close, listed
from asyncrl.rundir.checkpoint import CheckpointStore
from asyncrl.rundir.directory import AttemptRecord, read_record
from asyncrl.rundir.reader import Run
from asyncrl.runtime.files import read_text

__all__ = ["audit_offline"]

Record = dict[str, Any]
MASKS = ("loss_mask", "chosen_mask", "rejected_mask")


@dataclass(frozen=True)
class _Books:
    """What the files of the run contain."""

    config: OfflineConfig
    attempts: Sequence[AttemptRecord]
    run_id: str
    records: Sequence[Record]
    """Those of the line of attempts that leads to the last one."""
    rows: TokenFile | None
    order: Order | None
    checkpoint: tuple[Path, State] | None
    damage: str

    @property
    def steps(self) -> Iterator[Record]:
        return (record for record in self.records if record["event"] == "step")


def audit_offline(run: Run) -> list[Check]:
    """Recompute and check every invariant.

    Raises:
        ConfigError: the directory has no record of its attempts.
    """
    config = run.settings
    assert isinstance(config, OfflineConfig)
    record = read_record(run.directory)
    checkpoint, damage = _newest(run.checkpoints_directory)
    books = _Books(
        config,
        record["attempts"],
        record["run_id"],
        _last_line(run.records(), record["attempts"]),
        open_token_file(run.directory / "rows" / "train.arrow"),
        _order(run.directory / "rows" / ORDER_FILE),
        checkpoint,
        damage,
    )
    return [
        check(books)
        for check in (
            _check_steps,
            _check_rows,
            _check_tokens,
            _check_metrics,
            _check_checkpoint,
            _check_counters,
            _check_record,
        )
    ]


def _order(path: Path) -> Order | None:
    try:
        fields = json.loads(read_text(path))
        weights = tuple(fields["weights"]) if fields["weights"] else None
        return Order(tuple(fields["rows"]), weights, fields["seed"], fields["shuffle"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _newest(directory: Path) -> tuple[tuple[Path, State] | None, str]:
    try:
        path, state, passed_over = CheckpointStore(directory, keep=1).find()
    except NoCheckpointError:
        return None, ""
    except UnreadableCheckpointError as error:
        return None, str(error)
    return (path, state), "; ".join(passed_over)


def _last_line(records: Sequence[Record], attempts: Sequence[AttemptRecord]) -> list[Record]:
    """The records of the attempts that lead to the last one, each up to the version at which the
    next one began."""
    until: dict[int, float] = {len(attempts) - 1: float("inf")}
    at = len(attempts) - 1
    while (before := attempts[at]["from_attempt"]) is not None:
        until[before] = attempts[at]["version"]
        at = before
    return [
        record
        for record in records
        if record["attempt"] in until and record["version"] <= until[record["attempt"]]
    ]


def _check_steps(books: _Books) -> Check:
    """Every step has the next number, and an applied step makes the next version."""
    wrong: list[str] = []
    before: Record | None = None
    for record in books.steps:
        if before is not None and record["attempt"] == before["attempt"]:
            step, version = before["step"] + 1, before["version"] + bool(record["applied"])
        else:
            version = books.attempts[record["attempt"]]["version"] + bool(record["applied"])
            step = record["step"]
        if (record["step"], record["version"]) != (step, version):
            wrong.append(f"step {record['step']} made version {record['version']}, not {version}")
        before = record
    last = before["version"] if before is not None else 0
    return Check(
        "steps and versions are contiguous",
        not wrong,
        listed(wrong) or f"{sum(1 for _ in books.steps)} steps to version {last}",
    )


def _check_rows(books: _Books) -> Check:
    """Every step took batch_size rows, and the position in the data is their sum."""
    size = books.config.batch_size
    wrong = [
        f"step {step['step']}: {step['rows_taken']}"
        for step in books.steps
        if step["rows_taken"] != size
    ]
    frontier = books.checkpoint[1].frontier if books.checkpoint is not None else None
    steps = books.checkpoint[1].steps_attempted if books.checkpoint is not None else 0
    sizes = {attempt["groups_per_step"] for attempt in books.attempts}
    if frontier is not None and len(sizes) == 1 and frontier != steps * size:
        wrong.append(f"the checkpoint is at row {frontier} after {steps} steps")
    return Check(f"every step took {size} rows", not wrong, listed(wrong) or f"position {frontier}")


def _check_tokens(books: _Books) -> Check:
    """The loss tokens of each step are those of its rows, in the order of the data."""
    name = "tokens match the rows of each step"
    if books.rows is None:
        return Check(name, False, "rows/train.arrow is missing or damaged; restore it")
    if books.order is None:
        return Check(name, False, f"rows/{ORDER_FILE} is missing or damaged; restore it")
    order = books.order
    wrong, total = [], 0
    for attempt, steps in _by_attempt(books.steps).items():
        at = books.attempts[attempt]["frontier"]
        for step in steps:
            taken = range(at, at + int(step["rows_taken"]))
            table = books.rows.take([order.place(ordinal)[1] for ordinal in taken])
            left_out = int(step.get("tokens_left_out", 0))
            tokens, at = _targets(table) - left_out, taken.stop
            total += tokens
            if step["applied"] and not close(step["tokens"], tokens):
                wrong.append(f"step {step['step']} recorded {step['tokens']}, its rows {tokens}")
    return Check(name, not wrong, listed(wrong) or f"{total:,} tokens")


def _by_attempt(steps: Iterator[Record]) -> dict[int, list[Record]]:
    found: dict[int, list[Record]] = {}
    for step in steps:
        found.setdefault(step["attempt"], []).append(step)
    return found


def _targets(table: pa.Table) -> int:
    return sum(
        int(pc.sum(pc.list_flatten(table[name])).as_py() or 0)
        for name in MASKS
        if name in table.column_names
    )


def _check_metrics(books: _Books) -> Check:
    """An applied step has a finite loss and gradient norm."""
    wrong = [
        f"step {step['step']}: {name} {step.get(name)}"
        for step in books.steps
        if step["applied"]
        for name in ("loss", "grad_norm")
        if step.get(name) is None
    ]
    count = sum(1 for record in books.records if record["event"] == "evaluation")
    return Check("metrics are finite", not wrong, listed(wrong) or f"{count} evaluations")


def _check_checkpoint(books: _Books) -> Check:
    """The checkpoint that a resume would take is the newest, and its files are what was
    committed."""
    newest = books.checkpoint[0].name if books.checkpoint is not None else "no checkpoint yet"
    return Check("the newest checkpoint is whole", not books.damage, books.damage or newest)


def _check_counters(books: _Books) -> Check:
    """The learner's own counters in the checkpoint match the steps before it."""
    name = "the learner's counters match the steps"
    if books.checkpoint is None:
        return Check(name, True, "no checkpoint yet")
    path, state = books.checkpoint
    counters: Mapping[str, int] = json.loads(read_text(path / "learner" / "counters.json"))
    before = books.attempts[_first_of_line(books.attempts)]["trained_tokens"]
    tokens = before + sum(
        int(step["tokens"])
        for step in books.steps
        if step["applied"] and step["version"] <= state.version
    )
    found = {"applied": counters["applied"], "trained_tokens": counters["trained_tokens"]}
    expected = {"applied": state.version, "trained_tokens": tokens}
    return Check(name, found == expected, f"{found}" + f", not {expected}" * (found != expected))


def _first_of_line(attempts: Sequence[AttemptRecord]) -> int:
    at = len(attempts) - 1
    while (before := attempts[at]["from_attempt"]) is not None:
        at = before
    return at


def _check_record(books: _Books) -> Check:
    """run.json, config.yaml and the checkpoint belong to one run."""
    last, wrong = books.attempts[-1], []
    if last["groups_per_step"] != books.config.batch_size:
        wrong.append(
            f"the last attempt began with batch_size {last['groups_per_step']}, but config.yaml has"
            f" {books.config.batch_size}"
        )
    if books.checkpoint is not None and books.checkpoint[1].run_id != books.run_id:
        wrong.append(f"{books.checkpoint[0].name} belongs to another run")
    saved = any(record["event"] == "checkpoint" for record in books.records)
    if books.checkpoint is None and not books.damage and saved:
        wrong.append("the metrics record checkpoints, and there is none")
    return Check(
        "record, config and checkpoints agree",
        not wrong,
        "; ".join(wrong[:SHOWN]) or f"{len(books.attempts)} attempts",
    )
