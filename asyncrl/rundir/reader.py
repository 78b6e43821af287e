"""Reading a run's directory, during the run or later. It needs only the files: no cluster, no
torch.

Files in `groups/` and `outcomes/` are renamed once complete. A name with a leading dot is still
being written and is skipped. A group that was written again after a failure appears once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from asyncrl.config import Config, ConfigError, RunSettings, load_any, load_config
from asyncrl.contracts.rows import (
    ANSWER_COLUMNS,
    COLUMNS,
    REFERENCE_COLUMN,
    SCORED_COLUMNS,
    SESSION_COLUMNS,
    SPAN,
    TEACHER_TOKENS,
    TIME_COLUMNS,
    TOKEN_REWARDS_COLUMN,
    TRAINED_COLUMNS,
    TURN_ADVANTAGE_COLUMN,
    TURN_COLUMNS,
)
from asyncrl.rundir.metrics import read_metrics, refuse_odd
from asyncrl.rundir.outcomes import OUTCOME_COLUMNS, refuse_old_folder
from asyncrl.rundir.record import AttemptRecord, is_locked, read_record
from asyncrl.rundir.tokens import of_outcomes, of_trajectories, token_table, trained_fault
from asyncrl.runtime.files import parquet

if TYPE_CHECKING:
    from asyncrl.rundir.charts import RunCharts

GENERATED = ("generated_from", "generated_to")
"""Times of a group's trajectories (`TIME_COLUMNS`)."""
PER_TRAJECTORY = (
    "completion_text",
    "completion_ids",
    "loss_mask",
    "logprobs",
    "versions",
    "finish_reason",
    "reward",
    "advantage",
    "status",
    "reward_parts",
    REFERENCE_COLUMN,
    TOKEN_REWARDS_COLUMN,
    *TEACHER_TOKENS,
    *SESSION_COLUMNS,
    *GENERATED,
)
"""List columns of a group with one item per trajectory."""

OF_TURNS = ("turn_reward", TURN_ADVANTAGE_COLUMN)
"""List columns of a group with one item per turn that a table of trajectories has, too."""

SINGULAR = {"completion_text": "completion"}
"""Group column → its name in a table of trajectories, if different."""


Kept: TypeAlias = "dict[Path, tuple[tuple[int, int, int], pa.Table]]"
"""File → what identifies its content (inode, bytes, time), and its table."""


class RunNotFoundError(FileNotFoundError):
    """The path is not a run directory."""


@dataclass(frozen=True, slots=True)
class Status:
    """Progress of a run when its directory was last written to."""

    phase: str
    """Event of the newest record (`step`, `commit`, `evaluation`, …), or `starting`."""
    step: int
    max_steps: int
    version: int
    committed: int | None
    """The committed version; None before the first."""
    time: float | None
    """Unix seconds of the newest record."""
    last: dict[str, Any]
    """The newest record."""
    state: Literal["running", "finished", "failed", "interrupted"]
    """What the run does, or how its newest attempt ended. `interrupted`: it was stopped, or its
    process was killed. A run whose driver restarts it is `failed` for a moment."""
    cause: str = ""
    """Why the run failed or was interrupted, in one line; "" if unknown."""


class Run:
    """A run's directory. Each call reads the current files."""

    _kept: Kept | None = None

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __repr__(self) -> str:
        return f"Run({str(self.directory)!r})"

    @cached_property
    def config(self) -> Config:
        """The resolved config of a run with generators.

        Raises:
            ConfigError: the run is on a dataset (see `settings`), or the file cannot be used.
        """
        return load_config(self.directory / "config.yaml")

    @cached_property
    def settings(self) -> RunSettings:
        """The resolved config of a run of either kind: with generators, or on a dataset."""
        return load_any(self.directory / "config.yaml")

    @property
    def checkpoints_directory(self) -> Path:
        """Directory of the checkpoints: `checkpoint.save`, or `checkpoints` in this directory, even
        if the run was moved."""
        save = self.settings.checkpoint.save
        return Path(save) if save else self.directory / "checkpoints"

    @property
    def metrics(self) -> pa.Table:
        """All records of metrics.jsonl, one row each. Metrics that a record lacks are null."""
        return _records_table(self.records())

    def records(self, event: str | None = None) -> list[dict[str, Any]]:
        """The records of metrics.jsonl, oldest first, optionally only those of one event."""
        return [
            record for record in read_metrics(self.directory) if event in (None, record["event"])
        ]

    @property
    def charts(self) -> RunCharts:
        """Charts of the run's files, such as `run.charts.reward()`."""
        from asyncrl.rundir.charts import RunCharts  # Altair takes a while

        return RunCharts(self)

    def status(self) -> Status:
        """Phase, step and versions, from the records of the newest attempt, and whether the run
        still runs."""
        records = self.records()
        refuse_odd(records, self.directory)
        last = records[-1] if records else {}
        records = [
            record
            for record in records
            if record["attempt"] == last["attempt"] and record["event"] != "warm_start"
        ]
        committed = max(
            (record["version"] for record in records if record["event"] == "commit"), default=None
        )
        newest = max(
            (record["version"] for record in records if record["event"] == "step"),
            default=last.get("version", 0),
        )
        state, cause = self._state(newest)
        return Status(
            phase=last.get("event", "starting"),
            step=max((record["step"] for record in records), default=0),
            max_steps=self.settings.last_step,
            version=newest,
            committed=committed,
            time=last.get("time"),
            last=last,
            state=state,
            cause=cause,
        )

    def _state(
        self, version: int
    ) -> tuple[Literal["running", "finished", "failed", "interrupted"], str]:
        """`Status.state` and `Status.cause`."""
        if is_locked(self.directory):
            return "running", ""
        attempts: list[AttemptRecord] = []
        with suppress(ConfigError):
            attempts = read_record(self.directory)["attempts"]
        if attempts and "outcome" in attempts[-1]:
            return attempts[-1]["outcome"], attempts[-1].get("cause", "")
        if attempts and "start" in attempts[-1]:
            return "interrupted", "the driver was killed, or its machine failed"
        # An older asyncrl did not record how attempts end.
        done = version >= self.settings.last_step and (self.directory / "hf").is_dir()
        return ("finished" if done else "interrupted"), ""

    def groups(self, damaged: list[str] | None = None) -> pa.Table:
        """One row per group, ordered by attempt and ordinal. Empty before the first flush.

        Args:
            damaged: gets a line for each file that cannot be read, whose rows are then missing.
                Without it, such a file raises pyarrow.ArrowInvalid.
        """
        schema = pa.schema([*COLUMNS.items(), *TIME_COLUMNS.items(), *SCORED_COLUMNS.items()])
        return _distinct(_read_parquet(self.directory / "groups", schema, damaged, self._kept))

    def outcomes(self, damaged: list[str] | None = None) -> pa.Table:
        """One row per group with an outcome. `damaged` as in `groups`.

        Columns: `outcome`, `reason`, `step`, `trained_at_version`, `staleness` and
        `completion_tokens` (of the whole group; null if it was not generated to its end).
        """
        return _distinct(self.every_outcome(damaged))

    def taken_over(self) -> set[tuple[int, int]]:
        """(attempt, ordinal) of the groups that waited in the checkpoint from which the newest
        attempt resumed. Empty if run.json cannot be read."""
        with suppress(ConfigError, OSError):
            waiting = read_record(self.directory)["attempts"][-1]["waiting"]
            return {(attempt, ordinal) for attempt, ordinal in waiting}
        return set()

    def every_outcome(self, damaged: list[str] | None = None) -> pa.Table:
        """The outcomes with duplicates. A group has several rows if it waited in a checkpoint from
        which several attempts resumed."""
        return _read_parquet(self.directory / "outcomes", OUTCOME_COLUMNS, damaged, self._kept)

    def evaluations(self) -> pa.Table:
        """One row per completion that an evaluation requested.

        Columns: `set`, `version`, `ordinal` (row of the set's file), `index` (among its n
        completions), `status` (ok, unscored, late, failed), `reason`, `accuracy`, `reward` and
        `reward_parts`. Also the completion's text, tokens, log-probs and version spans.
        """
        return _read_parquet(self.directory / "evaluations", pa.schema([*ANSWER_COLUMNS.items()]))

    def trained(
        self,
        damaged: list[str] | None = None,
        ordinals: Sequence[int] | None = None,
        skipped: bool = False,
    ) -> pa.Table:
        """One row per trajectory that a policy step trained, or per path through a session:
        `asyncrl.contracts.rows.TRAINED_COLUMNS`. Empty with `observe.trained_tokens: false`.

        Args:
            damaged: as in `groups`.
            ordinals: of the groups to read. None: all.
            skipped: also what steps computed that were skipped, such as NaN.
        """

        def chosen(table: pa.Table) -> pa.Table:
            if fault := trained_fault(table):
                raise pa.ArrowInvalid(fault)
            if ordinals is None:
                return table
            return table.filter(pc.is_in(table["ordinal"], pa.array(ordinals, pa.int64())))

        schema = pa.schema([*TRAINED_COLUMNS.items()])
        rows = _read_parquet(self.directory / "trained", schema, damaged, self._kept, chosen)
        outcomes = self.outcomes(None if damaged is None else [])  # whoever needs them names these
        return of_outcomes(rows, outcomes, skipped)

    def tokens(self, ordinal: int, index: int = 0, attempt: int | None = None) -> pa.Table:
        """One row per sampled token of a trajectory: `asyncrl.rundir.tokens.TOKEN_COLUMNS`.

        Args:
            ordinal: of its group.
            index: of the trajectory in its group.
            attempt: that made the group. None: the last one that made a group of this ordinal.

        Raises:
            ValueError: there is no such trajectory.
        """
        groups = self.groups()
        chosen = pc.equal(groups["ordinal"], ordinal)
        if attempt is not None:
            chosen = pc.and_(chosen, pc.equal(groups["attempt"], attempt))
        found = groups.filter(chosen).to_pylist()
        if not found or not 0 <= index < len(found[-1]["completion_ids"]):
            made = "" if attempt is None else f" of attempt {attempt}"
            raise ValueError(
                f"run {str(self.directory)!r} has no trajectory {index} in group {ordinal}{made};"
                " take one of `Run.trajectories()`"
            )
        group = found[-1]
        rows = of_trajectories(self.trained(ordinals=[ordinal]))
        return token_table(group, index, rows.get((group["attempt"], ordinal, index), []))

    def trajectories(self) -> pa.Table:
        """One row per trajectory, with its group's columns and outcome.

        Additional columns: `index` (in its group), `completion` (text), `tokens` (of the
        completion), `oldest_version` and `newest_version` (of its tokens), and `reward/NAME` per
        reward function. `outcome` is null until the group has one, and `staleness` is null unless
        the group was trained. Sessions have `turn_reward`, and with `algorithm.advantage.turns`
        `turn_advantage`: a list with an item for each of their turns.
        """
        return _with_outcomes(_explode(self.groups()), self.outcomes())


def open_run(path: str | Path) -> Run:
    """Open a run's directory for reading.

    Raises:
        RunNotFoundError: the directory does not exist, or contains no config.yaml.
        ConfigError: an older asyncrl wrote it. The message names what to rename.
    """
    directory = Path(path).expanduser().resolve()
    if not directory.is_dir():
        raise RunNotFoundError(
            f"run {str(path)!r} is not a directory; give the path of a run's directory, such as"
            " runs/quickstart"
        )
    refuse_old_folder(directory)
    if not (directory / "config.yaml").exists():
        raise RunNotFoundError(
            f"run {str(path)!r} contains no config.yaml, so it is not a run directory;"
            f" {_nearby(directory)}"
        )
    return Run(directory)


def _nearby(directory: Path) -> str:
    runs = sorted(child.name for child in directory.iterdir() if (child / "config.yaml").exists())
    return (
        f"did you mean {str(directory / runs[0])!r}?"
        if runs
        else "give a directory that `asyncrl train` wrote"
    )


def _read_parquet(
    directory: Path,
    empty: pa.Schema,
    damaged: list[str] | None = None,
    kept: Kept | None = None,
    chosen: Callable[[pa.Table], pa.Table] = lambda table: table,
) -> pa.Table:
    """All complete files of a folder as one table, or an empty table with the schema `empty`. A
    damaged file is left out and named in `damaged`, if that is given. A file whose table `kept` has
    is not read again.

    Args:
        chosen: gives the wanted rows of a file's table. It raises pyarrow.ArrowInvalid if the file
            is damaged.
    """
    tables = []
    for path in sorted(directory.glob("*.parquet")):
        if path.name.startswith("."):
            continue
        try:
            tables.append(chosen(_table(path, kept)))
        except FileNotFoundError:  # merged into a larger file since the folder was listed
            return _read_parquet(directory, empty, damaged, kept, chosen)
        except (pa.ArrowInvalid, OSError) as error:
            if damaged is None:
                raise
            damaged.append(f"{directory.name}/{path.name}: {str(error).splitlines()[0]}")
    return pa.concat_tables(tables, promote_options="permissive") if tables else empty.empty_table()


def _table(path: Path, kept: Kept | None) -> pa.Table:
    if kept is None:
        return parquet.read_table(path)
    found = path.stat()
    stamp = (found.st_ino, found.st_size, found.st_mtime_ns)
    if path not in kept or kept[path][0] != stamp:
        kept[path] = (stamp, parquet.read_table(path))
    return kept[path][1]


def _distinct(table: pa.Table) -> pa.Table:
    """The last written row per (attempt, ordinal), ordered by attempt and ordinal."""
    numbered = table.append_column("row", pa.array(range(len(table)), pa.int64()))
    last = (
        numbered.group_by(["attempt", "ordinal"])
        .aggregate([("row", "max")])
        .sort_by([("attempt", "ascending"), ("ordinal", "ascending")])
    )
    return table.take(last["row_max"])


def _explode(groups: pa.Table) -> pa.Table:
    """The table of trajectories for a table of groups. Of the columns of turns, it has those in
    OF_TURNS, as one list per trajectory."""
    groups = groups.combine_chunks()
    parents = pc.list_parent_indices(groups["completion_ids"])
    for name in (REFERENCE_COLUMN, TOKEN_REWARDS_COLUMN, *TEACHER_TOKENS, *GENERATED):
        if name in groups.column_names and groups[name].null_count:
            # Some attempt had no reference policy, no per-token rewards, no top_k, or no times.
            groups = groups.drop_columns([name])
    lists = [name for name in PER_TRAJECTORY if name in groups.column_names]
    table = groups.drop_columns(lists).take(parents)
    counts = pc.list_value_length(groups["completion_ids"]).to_pylist()
    table = table.append_column(
        "index", pa.array([index for count in counts for index in range(count)], pa.int32())
    )
    of_turns = (TURN_ADVANTAGE_COLUMN, *TURN_COLUMNS)
    table = table.drop_columns([name for name in of_turns if name in table.column_names])
    for name in OF_TURNS:
        if name in groups.column_names:
            column = pa.array(_turn_lists(groups, name, counts), groups.schema.field(name).type)
            table = table.append_column(name, column)
    for name in lists:
        values = pc.list_flatten(groups[name])
        if name == "reward_parts":
            for part in values.type:
                table = table.append_column(
                    f"reward/{part.name}", pc.struct_field(values, part.name)
                )
        else:
            table = table.append_column(SINGULAR.get(name, name), values)
    return _with_versions(table)


def _turn_lists(groups: pa.Table, name: str, counts: list[int]) -> list[list[object] | None]:
    """The items of a column of turns for each trajectory, in order; None where it is missing.

    Args:
        counts: trajectories of each group.
    """
    found: list[list[object] | None] = []
    columns = (groups["turn_trajectory"].to_pylist(), groups[name].to_pylist(), counts)
    for trajectories, values, count in zip(*columns, strict=True):
        if values is None:
            found += [None] * count
            continue
        lists: list[list[object]] = [[] for _ in range(count)]
        for trajectory, value in zip(trajectories, values, strict=True):
            lists[trajectory].append(value)
        found += lists
    return found


def _with_versions(table: pa.Table) -> pa.Table:
    """Add `tokens`, `oldest_version` and `newest_version`. Versions of an empty completion are
    null."""
    spans = table["versions"].combine_chunks() if len(table) else pa.array([], pa.list_(SPAN))
    versions = [[span["version"] for span in spans_of] for spans_of in spans.to_pylist()]
    oldest = [min(found, default=None) for found in versions]
    newest = [max(found, default=None) for found in versions]
    table = table.append_column("tokens", pc.list_value_length(table["completion_ids"]))
    table = table.append_column("oldest_version", pa.array(oldest, pa.int32()))
    return table.append_column("newest_version", pa.array(newest, pa.int32()))


def _with_outcomes(table: pa.Table, outcomes: pa.Table) -> pa.Table:
    """Add the columns of the outcomes, or nulls. Arrow's own join does not support list columns."""
    rows = {
        key: row
        for row, key in enumerate(
            zip(outcomes["attempt"].to_pylist(), outcomes["ordinal"].to_pylist(), strict=True)
        )
    }
    keys = zip(table["attempt"].to_pylist(), table["ordinal"].to_pylist(), strict=True)
    found = outcomes.take(pa.array([rows.get(key) for key in keys], pa.int64()))
    for name in outcomes.column_names[2:]:
        table = table.append_column(name, found[name])
    return table


def _records_table(records: Iterable[Mapping[str, object]]) -> pa.Table:
    """A table of records with different keys: the union of their columns, in order of first
    appearance."""
    rows = list(records)
    names = list(dict.fromkeys(name for row in rows for name in row))
    return pa.table({name: _column([row.get(name) for row in rows]) for name in names})


def _column(values: list[object]) -> pa.Array:
    """Mixed integers and floats become floats; other mixed types become text."""
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        pass
    try:
        return pa.array(values, pa.float64())
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return pa.array([None if value is None else str(value) for value in values], pa.string())
