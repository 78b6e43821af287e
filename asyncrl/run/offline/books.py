"""What the files of a run on a dataset contain."""

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
from asyncrl.contracts.offline_rows import SFT_SCHEMA
from asyncrl.contracts.state import State
from asyncrl.data.mixture import Order
from asyncrl.data.token_file import TokenFile, open_token_file
from asyncrl.preflight.plan.offline import ORDER_FILE
from asyncrl.rundir.checkpoint import CheckpointStore
from asyncrl.rundir.reader import Run
from asyncrl.rundir.record import AttemptRecord, read_record
from asyncrl.runtime.files.opening import read_text

Record = dict[str, Any]
TRAIN, HELD_OUT = "train.arrow", "held_out.arrow"
MASKS = ("loss_mask", "chosen_mask", "rejected_mask")


@dataclass(frozen=True)
class Books:
    """What the files of the run contain."""

    config: OfflineConfig
    attempts: Sequence[AttemptRecord]
    run_id: str
    records: Sequence[Record]
    """The records of the line of attempts that leads to the last attempt."""
    rows: TokenFile | None
    order: Order | None
    checkpoint: tuple[Path, State] | None
    damage: str
    unreadable: Sequence[str]
    """Records of metrics.jsonl without a valid attempt, step or version."""
    changed: Mapping[str, str]
    """File of `rows/` that is missing or differs from its recorded checksum → which of the two."""
    held_out: int | None
    """Held-out target tokens of SFT rows, or the number of other held-out rows. None without a
    whole file."""

    @property
    def steps(self) -> Iterator[Record]:
        """The records of the steps, oldest first."""
        return (record for record in self.records if record["event"] == "step")


def read_books(run: Run) -> Books:
    """Read the files of a run.

    Raises:
        ConfigError: the directory has no record of its attempts.
    """
    config = run.settings
    assert isinstance(config, OfflineConfig)
    record = read_record(run.directory)
    attempts, directory = record["attempts"], run.directory / "rows"
    checkpoint, damage = _newest(run.checkpoints_directory)
    records = run.records()
    numbered = [entry for entry in records if _is_numbered(entry, len(attempts))]
    changed = _changed_files(directory, config)
    rows = None if TRAIN in changed else open_token_file(directory / TRAIN)
    held_out = None if HELD_OUT in changed else open_token_file(directory / HELD_OUT)
    return Books(
        config,
        attempts,
        record["run_id"],
        _last_line(numbered, attempts),
        rows,
        _order(directory / ORDER_FILE, config, rows),
        checkpoint,
        damage,
        [_shown(entry) for entry in records if not _is_numbered(entry, len(attempts))],
        changed,
        None if held_out is None else _size(held_out),
    )


def _is_numbered(record: Record, attempts: int) -> bool:
    """Whether a record names an attempt, a step and a version, and a step whether it was
    applied."""
    numbers = [record.get(name) for name in ("attempt", "step", "version")]
    if not all(type(number) is int and number >= 0 for number in numbers):
        return False
    applied = record["event"] != "step" or record.get("applied") in (0, 1)
    return record["attempt"] < attempts and applied


def _shown(record: Record) -> str:
    numbers = ", ".join(f"{name} {record.get(name)}" for name in ("attempt", "step", "version"))
    return f"{record['event']} of {numbers}"


def _order(path: Path, config: OfflineConfig, rows: TokenFile | None) -> Order | None:
    """The order of the rows; None if its file is missing, or does not match the config and the
    rows."""
    weights = [source.weight for source in config.training_sources if source.weight is not None]
    fields = _json(path)
    sizes = fields.get("rows")
    if not isinstance(sizes, list) or not all(type(size) is int and size > 0 for size in sizes):
        return None
    fixed = {"weights": weights or None, "seed": config.seed, "shuffle": config.data.shuffle}
    if any(fields.get(name) != value for name, value in fixed.items()) or (
        rows is not None and sum(sizes) != rows.rows
    ):
        return None
    return Order(tuple(sizes), tuple(weights) or None, config.seed, config.data.shuffle)


def _json(path: Path) -> Mapping[str, object]:
    """The object in a JSON file; empty if there is none."""
    try:
        fields = json.loads(read_text(path))
    except (OSError, ValueError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _changed_files(directory: Path, config: OfflineConfig) -> dict[str, str]:
    """Name of each file that the run needs and that is not what it wrote → why."""
    sums = {TRAIN: (ORDER_FILE, "sha256")}
    if config.eval.data is not None:
        sums[HELD_OUT] = ORDER_FILE, "held_out_sha256"
    if config.compared is not None:
        names = ("train", "held_out") if config.eval.data is not None else ("train",)
        for name in names:
            sums[f"{name}_reference.arrow"] = f"{name}_reference.json", "sha256"
    found = {}
    for name, (sealed, field) in sums.items():
        known, file = _json(directory / sealed).get(field), open_token_file(directory / name)
        if file is None:
            found[name] = "is missing or damaged"
        elif known != file.content_hash:
            found[name] = f"is not the file whose checksum is in {sealed}"
    return found


def _size(file: TokenFile) -> int:
    """Target tokens of SFT rows; else rows."""
    return targets(file.table) if file.table.column_names == SFT_SCHEMA.names else file.rows


def _newest(directory: Path) -> tuple[tuple[Path, State] | None, str]:
    try:
        path, state, passed_over = CheckpointStore(directory, keep=1).find()
    except NoCheckpointError:
        return None, ""
    except UnreadableCheckpointError as error:
        return None, str(error)
    return (path, state), "; ".join(passed_over)


def _last_line(records: Sequence[Record], attempts: Sequence[AttemptRecord]) -> list[Record]:
    """The records of the attempts that lead to the last one, each up to the version and the step at
    which the next one began. Steps that were skipped after a checkpoint make no version."""
    until: dict[int, float] = {len(attempts) - 1: float("inf")}
    at = len(attempts) - 1
    while (before := attempts[at]["from_attempt"]) is not None:
        until[before] = attempts[at]["version"]
        at = before
    kept, repeated = list[Record](), float("inf")
    for attempt in sorted(until, reverse=True):
        own = [
            record
            for record in records
            if record["attempt"] == attempt
            and record["version"] <= until[attempt]
            and (record["event"] != "step" or record["step"] < repeated)
        ]
        steps = [record["step"] for record in own if record["event"] == "step"]
        repeated = min([repeated, *steps])
        kept = own + kept
    return kept


def targets(table: pa.Table) -> int:
    """Tokens of the table that are trained, on both sides of a pair."""
    return sum(
        int(pc.sum(pc.list_flatten(table[name])).as_py() or 0)
        for name in MASKS
        if name in table.column_names
    )
