"""What happened when in a part of a run: the bars of a timeline, as plain values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from asyncrl.contracts.rows import TIME_COLUMNS

TRAINED, WAITING = "trained", "waiting"
"""Outcomes of groups that are not lost."""
WAITS, GENERATES, TOOLS, SIBLINGS, SCORING, BUFFER = (
    "waits for the engine",
    "generates",
    "environment and tools",
    "waits for its siblings",
    "scoring",
    "waits in the buffer",
)
STEPS, PUBLICATIONS, PAUSES, EVALUATIONS, EVENTS = (
    "steps",
    "publications",
    "pauses",
    "evaluations",
    "events",
)
LANES = (STEPS, PUBLICATIONS, PAUSES, EVALUATIONS, EVENTS)
"""Lanes of a run, from the top."""
MARKED = ("stall", "error", "push_failed", "evaluation_lost", "checkpoint")
"""Events with a mark of their own."""
DRAWN = ("gather", "commit", "push", "evaluation", *MARKED)
"""Events of the lanes, besides steps."""
OUTCOME = ("attempt", "ordinal", "outcome", "reason", "step", "ended_in")
READ = (
    "attempt",
    "ordinal",
    "replica",
    "versions",
    "started_at",
    "finished_at",
    "scored_at",
    *TIME_COLUMNS,
)
TURNS = (
    "turn_trajectory",
    "turn_tokens",
    "turn_replica",
    "turn_started_at",
    "turn_finished_at",
)

Key = tuple[int, int]
"""(attempt, ordinal) of a group."""


_NO_OUTCOME: Mapping[str, Any] = {"outcome": WAITING}


class Bar(NamedTuple):
    """A stretch of time, in Unix seconds."""

    row: int | str
    """A trajectory's row, from 0 at the top, or a lane."""
    kind: str
    start: float
    end: float
    version: int | None
    """Of the tokens of GENERATES, of a step's result, or of a publication."""
    note: str


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a run."""

    lanes: list[Bar]
    bars: list[Bar]
    names: list[str]
    """Of each row."""
    first_step: int
    last_step: int
    groups: int
    """Groups of these steps, and those that were lost meanwhile."""
    shown: int
    """Groups that have rows here."""


class Moments:
    """The times of a run, for windows of it."""

    def __init__(
        self,
        groups: pa.Table,
        outcomes: pa.Table,
        metrics: pa.Table,
        taken_over: Collection[Key] = (),
    ) -> None:
        """
        Args:
            groups, outcomes, metrics, taken_over: of `asyncrl.open_run`.
        """
        self._taken_over = set(taken_over)
        attempts = metrics["attempt"].to_pylist() if "attempt" in metrics.column_names else []
        self._newest = max((one for one in attempts if one is not None), default=0)
        self._groups = groups
        keys = zip(groups["attempt"].to_pylist(), groups["ordinal"].to_pylist(), strict=True)
        self._at: dict[Key, int] = {key: index for index, key in enumerate(keys)}
        names = [name for name in OUTCOME if name in outcomes.column_names]
        ended = outcomes.select(names).to_pylist()
        self._outcome = {(row["attempt"], row["ordinal"]): row for row in ended}
        self._steps = {
            row["step"]: row for row in _records(metrics, "step") if row.get("time/started_at")
        }
        self._records = {event: _records(metrics, event) for event in DRAWN}
        self._flips: dict[tuple[int, str], dict[int, float]] = defaultdict(dict)
        for row in self._records["push"]:
            if row.get("weights/applied_at"):
                flips = self._flips[row["attempt"], row.get("replica") or ""]
                flips.setdefault(row["version"], row["weights/applied_at"])

    @property
    def steps(self) -> list[int]:
        """Steps whose times are recorded, in order."""
        return sorted(self._steps)

    def window(self, first_step: int, last_step: int, most_rows: int) -> Window:
        """The groups that these steps trained, and those that were lost meanwhile. With the run's
        last step, also those that wait for a step, and what the run did after it, for as long again
        at most.

        Args:
            most_rows: trajectories that have rows, but at least one group's. Of more, groups are
                chosen evenly by their admission. Lost ones come first, and get half of the rows.
        """
        steps = [self._steps[step] for step in self.steps if first_step <= step <= last_step]
        start = min((_started(step) for step in steps), default=0.0)
        end = max((_ended(step) for step in steps), default=0.0)
        trained, lost = list[int](), list[int]()
        for key, outcome in self._outcome.items():
            step = outcome["step"]
            if key not in self._at or step is None or not first_step <= step <= last_step:
                continue
            if self._of_newest(outcome) and outcome["outcome"] != WAITING:
                (trained if outcome["outcome"] == TRAINED else lost).append(self._at[key])
        waiting = list[int]()
        if steps and last_step >= self.steps[-1]:
            end = min(max(end, self._last_moment()), end + (end - start))
            waiting = self._waiting(start, end)
        rows = self._rows(sorted([*trained, *lost, *waiting]))
        shown = _chosen(rows, self._lost_keys(lost), most_rows)
        bars, names = self._trajectories(shown, end)
        begin = min((bar.start for bar in bars), default=start)
        return Window(
            self._lanes(min(begin, start), end),
            bars,
            names,
            first_step,
            last_step,
            len(rows),
            len(shown),
        )

    def _last_moment(self) -> float:
        """When the last commit or evaluation ended."""
        records = [*self._records["commit"], *self._records["evaluation"]]
        return max((row["time"] for row in records), default=0.0)

    def _waiting(self, start: float, end: float) -> list[int]:
        """The groups that were scored in this time, and that wait for a step of the newest
        attempt."""
        if "scored_at" not in self._groups.column_names:
            return []
        scored = self._groups["scored_at"].to_pylist()
        return [
            index
            for key, index in self._at.items()
            if (key[0] == self._newest or key in self._taken_over)
            and start <= (scored[index] or 0.0) <= end
            and self._outcome.get(key, _NO_OUTCOME)["outcome"] == WAITING
        ]

    def _of_newest(self, outcome: Mapping[str, Any]) -> bool:
        """Whether the group ended in the newest attempt that took its step. A step of which no
        times are recorded was not repeated later."""
        step = self._steps.get(outcome["step"])
        return step is None or outcome.get("ended_in", step["attempt"]) in (None, step["attempt"])

    def _lost_keys(self, lost: Iterable[int]) -> set[Key]:
        return {
            (self._groups["attempt"][index].as_py(), self._groups["ordinal"][index].as_py())
            for index in lost
        }

    def _rows(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """These groups, by their admission."""
        names = [name for name in (*READ, *TURNS) if name in self._groups.column_names]
        table = self._groups.select(names).take(pa.array(indices, pa.int64()))
        return sorted(table.to_pylist(), key=lambda row: (_admitted(row), row["ordinal"]))

    def _trajectories(
        self, groups: Sequence[Mapping[str, Any]], end: float
    ) -> tuple[list[Bar], list[str]]:
        bars: list[Bar] = []
        names: list[str] = []
        for group in groups:
            key = (group["attempt"], group["ordinal"])
            for index, spans in enumerate(group["versions"]):
                row = len(names)
                attempt = f" of attempt {group['attempt']}" if group["attempt"] else ""
                names.append(f"group {group['ordinal']}{attempt}, trajectory {index}")
                bars += self._generation(row, group, index, spans)
                bars += self._after(row, group, self._outcome.get(key, _NO_OUTCOME), end)
        return bars, names

    def _generation(
        self, row: int, group: Mapping[str, Any], index: int, spans: Sequence[Mapping[str, int]]
    ) -> list[Bar]:
        """From the group's admission until all its trajectories are there."""
        admitted, finished = _admitted(group), group["finished_at"]
        if group.get("turn_trajectory") is not None:
            return self._turns(row, group, index, spans, admitted)
        times = (group.get("generated_from"), group.get("generated_to"))
        began = times[0][index] if times[0] else group["started_at"]
        ended = times[1][index] if times[1] else finished
        flips = self._flips.get((group["attempt"], group["replica"]), {})
        return [
            Bar(row, WAITS, admitted, began, None, ""),
            *_by_version(row, began, ended, spans, flips),
            Bar(row, SIBLINGS, ended, finished, None, ""),
        ]

    def _turns(
        self,
        row: int,
        group: Mapping[str, Any],
        index: int,
        spans: Sequence[Mapping[str, int]],
        admitted: float,
    ) -> list[Bar]:
        bars, at, last = list[Bar](), 0, admitted
        columns = (group[name] for name in TURNS)
        for trajectory, tokens, replica, started, ended in zip(*columns, strict=True):
            if trajectory != index:
                continue
            kind = TOOLS if bars else WAITS
            if started > last:
                bars.append(Bar(row, kind, last, started, None, ""))
            flips = self._flips.get((group["attempt"], replica), {})
            mine = _cut(spans, at, at + tokens)
            bars += _by_version(row, max(started, last), ended, mine, flips)
            at, last = at + tokens, max(last, ended)
        return [*bars, Bar(row, SIBLINGS, last, group["finished_at"], None, "")]

    def _after(
        self, row: int, group: Mapping[str, Any], outcome: Mapping[str, Any], end: float
    ) -> list[Bar]:
        """From the group's last token until a step trains it, or until `end` if none has yet."""
        finished, scored = group["finished_at"], group.get("scored_at")
        if scored is None:
            return []
        bars = [Bar(row, SCORING, finished, scored, None, "")]
        if outcome["outcome"] == TRAINED:
            step = self._steps[outcome["step"]]
            note = f"trained by step {outcome['step']}"
            bars.append(Bar(row, BUFFER, scored, _started(step), None, note))
        elif outcome["outcome"] == WAITING:
            note = "no step has taken it yet"
            bars.append(Bar(row, BUFFER, scored, max(scored, end), None, note))
        else:
            why = f": {outcome['reason']}" if outcome["reason"] else ""
            note = f"{outcome['outcome']} by step {outcome['step']}{why}"
            bars.append(Bar(row, outcome["outcome"], scored, scored, None, note))
        return bars

    def _lanes(self, start: float, end: float) -> list[Bar]:
        """What the run did in this time."""
        bars = [
            Bar(STEPS, STEPS, _started(row), _ended(row), row["version"], f"step {row['step']}")
            for row in self._steps.values()
        ]
        gathers = {
            (row["attempt"], row["version"]): row["time"] - (row.get("weights/gather_s") or 0.0)
            for row in self._records["gather"]
        }
        for row in self._records["commit"]:
            if (
                began := gathers.get((row["attempt"], row["version"]))
            ) is not None and began <= row["time"]:
                note = f"version {row['version']}"
                bars.append(
                    Bar(PUBLICATIONS, PUBLICATIONS, began, row["time"], row["version"], note)
                )
        for row in self._records["push"]:
            if (paused := row.get("weights/paused_at")) and (seconds := row.get("weights/pause_s")):
                note = f"replica {row.get('replica')} takes version {row['version']}"
                bars.append(Bar(PAUSES, PAUSES, paused, paused + seconds, row["version"], note))
        for row in self._records["evaluation"]:
            began = row["time"] - (row.get("eval/seconds") or 0.0)
            note = f"version {row['version']}"
            bars.append(Bar(EVALUATIONS, EVALUATIONS, began, row["time"], row["version"], note))
        bars += [
            Bar(EVENTS, event, row["time"], row["time"], None, event)
            for event in MARKED
            for row in self._records[event]
        ]
        inside = [bar for bar in bars if bar.end >= start and bar.start <= end]
        return [bar._replace(start=max(bar.start, start), end=min(bar.end, end)) for bar in inside]


def _by_version(
    row: int,
    began: float,
    ended: float,
    spans: Sequence[Mapping[str, int]],
    flips: Mapping[int, float],
) -> list[Bar]:
    """The generation of some tokens, cut where their version changes: when the replica had it. If
    that was not recorded, in proportion to the tokens, which the note says.

    Args:
        spans: the versions of the tokens, `start` and `end` counted from any token on.
        flips: version → when the replica had it.
    """
    if not spans:
        return [Bar(row, GENERATES, began, ended, None, "no token")]
    first, tokens = spans[0]["start"], spans[-1]["end"] - spans[0]["start"]
    bars, at = list[Bar](), began
    had = flips.get(spans[0]["version"], began)
    if began < had <= ended:  # accepted before the replica paused, and computed after it
        bars, at = [Bar(row, WAITS, began, had, None, "")], had
    for number, span in enumerate(spans):
        until, guessed = ended, ""
        if number + 1 < len(spans):
            flip = flips.get(spans[number + 1]["version"])
            if flip is not None and at <= flip <= ended:
                until = flip
            else:
                later = [
                    flips[one["version"]] for one in spans[number + 1 :] if one["version"] in flips
                ]
                guess = began + (ended - began) * (span["end"] - first) / tokens
                until = max(
                    at, min([guess, *(moment for moment in later if at <= moment <= ended)])
                )
                guessed = (
                    "; its end is a guess: the replica's change was not recorded"
                    if flip is None
                    else "; its end is a guess: the recorded times contradict each other"
                )
        note = f"tokens {span['start']} to {span['end'] - 1}{guessed}"
        bars.append(Bar(row, GENERATES, at, until, span["version"], note))
        at = until
    return bars


def _cut(spans: Sequence[Mapping[str, int]], start: int, end: int) -> list[dict[str, int]]:
    """The spans of the tokens from `start` to `end`."""
    return [
        {
            "version": span["version"],
            "start": max(span["start"], start),
            "end": min(span["end"], end),
        }
        for span in spans
        if span["start"] < end and span["end"] > start
    ]


def _chosen(rows: Sequence[dict[str, Any]], lost: set[Key], most_rows: int) -> list[dict[str, Any]]:
    """As many groups as have room: lost ones in at most half of it, the others evenly."""
    if not rows:
        return []
    count = max(1, most_rows // max(1, max(len(row["versions"]) for row in rows)))
    first = [number for number, row in enumerate(rows) if (row["attempt"], row["ordinal"]) in lost]
    first = first[: count // 2]
    others = [number for number in range(len(rows)) if number not in set(first)]
    room = min(count - len(first), len(others))
    even = [others[number * len(others) // room] for number in range(room)]
    return [rows[number] for number in sorted([*first, *even])]


def _records(metrics: pa.Table, event: str) -> list[dict[str, Any]]:
    """The records of one event. Of a step or version that an attempt repeated, all."""
    if "event" not in metrics.column_names:
        return []
    table = metrics.filter(pc.equal(metrics["event"], event))
    kept = [name for name in table.column_names if table[name].null_count < len(table)]
    rows: list[dict[str, Any]] = table.select(kept).to_pylist()
    return rows


def _started(step: Mapping[str, Any]) -> float:
    return float(step["time/started_at"])


def _ended(step: Mapping[str, Any]) -> float:
    return _started(step) + float(step.get("time/step_s") or 0.0)


def _admitted(group: Mapping[str, Any]) -> float:
    admitted = group.get("admitted_at")
    return float(group["started_at"] if admitted is None else admitted)
