"""metrics.jsonl and the metric sinks: one record per step or event, with stable names.

The run's driver writes them. `asyncrl.open_run` and the report read metrics.jsonl.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeGuard

from asyncrl.contracts.protocols import Sink, TableRow
from asyncrl.runtime.clock import steady_time
from asyncrl.runtime.files.opening import append_to, open_regular
from asyncrl.runtime.redact import redact

SCHEMA = 1
"""Version of the record layout. It increases when a name changes its meaning."""

METRICS_FILE = "metrics.jsonl"

GROUPS = {"step": "train", "evaluation": "eval"}
"""Event → sink group of its metrics that name no group. For other events the group is the event's
name."""

REPEATED = ("eval/accuracy", "eval/prompts")
"""Metrics that duplicate those of the first evaluation set."""

ONCE = ("startup", "first_step", "truncation")
"""Events with one record per attempt, which are not plotted."""

RESERVED = ("schema", "event", "attempt", "step", "version", "time")
"""Fields of every record: layout version, kind of record, attempt, steps attempted (supervised ones
in a warm start), policy version, Unix seconds."""


class MetricsWriter:
    """Appends records to `<run>/metrics.jsonl` and passes their numbers to the sinks.

    In a sink, a metric named `<group>/<name>` keeps its name. Other metrics get the prefix `train/`
    for steps and `<event>/` for other events. An evaluation is plotted at the step that made its
    version.

    Each record is one line, written at once and flushed, so a reader of a live run sees complete
    lines, except perhaps the last. NaN and Inf, which JSON lacks, become null. A new attempt
    appends to the same file.
    """

    def __init__(
        self,
        directory: Path,
        attempt: int = 0,
        sinks: Sequence[Sink] = (),
        made_at: Mapping[int, int] | None = None,
    ) -> None:
        """
        Args:
            made_at: version → the step that made it, for the initial version of the attempt.
        """
        path = directory / METRICS_FILE
        self._attempt = attempt
        self._file = append_to(path)
        _end_last_line(path, self._file)
        self._sinks = sinks
        self._made_at = dict(made_at or {})
        """Version → the step that made it. A skipped step makes none."""

    def write(
        self, event: str, step: int, version: int, values: Mapping[str, object]
    ) -> dict[str, object]:
        """Write one record and return it. Values are numbers, strings, None, or lists and mappings
        of these.

        Raises:
            ValueError: a value has the name of a reserved field.
        """
        taken = sorted(set(values) & set(RESERVED))
        if taken:
            raise ValueError(
                f"metrics named {taken} would replace fields of the record; rename them"
            )
        now = steady_time()
        record: dict[str, object] = {
            "schema": SCHEMA,
            "event": event,
            "attempt": self._attempt,
            "step": step,
            "version": version,
            "time": now,
            **{str(name): _plain(value) for name, value in values.items()},
        }
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        left_out = REPEATED if any(name.endswith("_accuracy") for name in record) else ()
        scalars = {
            _plotted(event, name): float(value)
            for name, value in _items(record)
            # A time of day is no curve.
            if _is_number(value) and name not in left_out and not name.endswith("_at")
        }
        if scalars and event not in ONCE:
            if event == "step" and values.get("applied", True):
                self._made_at.setdefault(version, step)
            for sink in self._sinks:
                sink.add(
                    self._made_at.get(version, version) if event == "evaluation" else step,
                    now,
                    scalars,
                )
        return record

    def show_batch(
        self, step: int, distributions: Mapping[str, Sequence[float]], rows: Sequence[TableRow]
    ) -> None:
        """Pass a batch to the sinks: histograms of values by name, and sample trajectories as the
        table `completions`, each with the step."""
        rows = [{"step": step, **row} for row in rows]
        for sink in self._sinks:
            for name, values in distributions.items():
                if values:
                    sink.add_histogram(step, steady_time(), name, values)
            if rows:
                sink.add_table(step, steady_time(), "completions", rows)

    def close(self, failed: bool = False) -> None:
        self._file.close()
        for sink in self._sinks:
            sink.close(failed)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(failed=error is not None)


def read_metrics(directory: Path) -> Iterator[dict[str, Any]]:
    """The records of a run directory, oldest first. Skips a last line that is still being written.

    Raises:
        ValueError: a complete line is not a record. The message names the file and the line.
    """
    for record, _ in records_from(directory, 0):
        yield record


def records_from(directory: Path, start: int) -> Iterator[tuple[dict[str, Any], int]]:
    """The records behind this byte of the file, each with the byte behind it. Raises as
    `read_metrics` does."""
    path = directory / METRICS_FILE
    if not path.exists():
        return
    with open_regular(path) as lines:
        lines.seek(start)
        for line in lines:
            if not line.endswith(b"\n"):
                return
            start += len(line)
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
                where = _line_number(path, start)
                raise ValueError(
                    f"{path}, line {where} is not a JSON record ({why}); remove that line"
                ) from None
            if not isinstance(record, dict) or not isinstance(record.get("event"), str):
                raise ValueError(
                    f"{path}, line {_line_number(path, start)} is a record without an event; remove"
                    " that line"
                )
            yield record, start


def _line_number(path: Path, behind: int) -> int:
    with open_regular(path) as lines:
        return lines.read(behind).count(b"\n")


def refuse_odd(records: Sequence[Mapping[str, Any]], directory: Path) -> None:
    """Raise ValueError if a record lacks what every record has. `asyncrl audit` counts these."""
    for number, record in enumerate(records, start=1):
        for name in ("attempt", "step", "version", "time"):
            if not _is_number(record.get(name)):
                raise ValueError(
                    f"{directory / METRICS_FILE}, line {number} is a record without a number as its"
                    f" {name}; remove that line"
                )


def first_entropies(directory: Path, steps: int) -> list[float]:
    """The entropies of a run's first steps, at most `steps`. Stops at a damaged line."""
    found: list[float] = []
    with contextlib.suppress(ValueError):
        for record in read_metrics(directory):
            if record["event"] == "step" and _is_number(record.get("entropy")):
                found.append(record["entropy"])
            if len(found) == steps:
                break
    return found


def _end_last_line(path: Path, appending: IO[str]) -> None:
    """Remove an incomplete last line, which a killed attempt left."""
    with open_regular(path) as file:
        appending.truncate(file.read().rfind(b"\n") + 1)


def _items(record: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """The record's metrics, with the items of a list as `<name>/<index>`."""
    for name, value in record.items():
        if name in RESERVED:
            continue
        if isinstance(value, list):
            yield from ((f"{name}/{index}", item) for index, item in enumerate(value))
        else:
            yield name, value


def _plotted(event: str, name: str) -> str:
    """A metric's name in a sink, which always has a group."""
    return name if "/" in name else f"{GROUPS.get(event, event)}/{name}"


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain(value: object) -> object:
    """The value for JSON: numpy scalars become numbers, NaN and Inf become None, and secrets are
    redacted."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item") and not isinstance(value, str | bytes):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return redact(value) if isinstance(value, str) else value
