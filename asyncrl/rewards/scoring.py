"""Scoring: one long-lived Ray Data execution, from the rollout workers' outboxes to scored groups
in complete Parquet files.

    outboxes ──take──► source: rewards, in reward processes ──► map_batches: status, advantage
        ▲                                                                    │
        └──── ack ──── next() ◄── threads here: Parquet, object store ◄──────┘
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import queue
import threading
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NotRequired, TypedDict

import pyarrow as pa
import ray
import ray.exceptions

from asyncrl.config import DistillationConfig
from asyncrl.contracts.columns import SOURCE_COLUMN
from asyncrl.contracts.content_hash import content_hashes
from asyncrl.contracts.errors import RolloutFailedError, TeacherError
from asyncrl.contracts.group_table import table_to_ipc
from asyncrl.contracts.messages import RowRef, Scored, ScoredBaseline, TrajectoryText
from asyncrl.contracts.outcomes import FILTERED, NO_BASELINE, UNFORESEEN
from asyncrl.contracts.protocols import Rollouts
from asyncrl.contracts.rows import (
    BASELINE_COLUMNS,
    REFERENCE_VERSION_COLUMN,
    TEACHER_FAILURE_COLUMN,
    TRUNCATED,
    SpanRow,
)
from asyncrl.rewards.contract import RewardError
from asyncrl.rewards.files import FlushFiles, compact, write_groups
from asyncrl.rewards.score import score_table
from asyncrl.rewards.source import rewarded_groups
from asyncrl.rewards.spec import ScoringSpec
from asyncrl.rewards.text_quality import has_loop, unprintable
from asyncrl.runtime import parquet
from asyncrl.runtime.files import make_directory
from asyncrl.runtime.ray_objects import Actor, broken_stream, groups_at
from asyncrl.runtime.ray_stream import Deaths, Tasks, stream_blocks
from asyncrl.runtime.redact import redact

__all__ = ["RayScores", "scored_summary"]

logger = logging.getLogger(__name__)

STREAM_BYTES = 256 << 20
"""Bytes of unread scored groups in the object store at which the stream pauses."""
MOST_IN_FLUSH = 256
EXAMPLE_LENGTH = 1000
SUMMARIZED = (
    "ordinal",
    "prompt_text",
    "completion_text",
    "versions",
    "completion_ids",
    "logprobs",
    "finish_reason",
    "status",
    "reward",
    "reward_parts",
    "failure",
)
"""Columns of `_ScoredRow`."""


class _ScoredRow(TypedDict):
    """What control needs of a scored group's row. Lists have one item per trajectory."""

    ordinal: int
    prompt_text: str
    completion_text: list[str]
    versions: list[list[SpanRow]]
    completion_ids: list[list[int]]
    logprobs: list[list[float]]
    finish_reason: list[str]
    status: list[str]
    reward: list[float | None]
    reward_parts: list[dict[str, float | None]]
    failure: str | None
    baseline_ids: NotRequired[list[int]]
    baseline_versions: NotRequired[list[SpanRow]]
    baseline_finish_reason: NotRequired[str]
    baseline_reward: NotRequired[float | None]


FLUSH_LINGER_S = 0.1
"""Seconds from the first row of a flush to the flush. A flush costs a file, an object and an
acknowledgment, however many rows it has."""


class RayScores:
    """`Scores` over Ray actors. `next` returns each admitted group once, by ordinal. Further copies
    are acknowledged and dropped here."""

    def __init__(
        self,
        spec: ScoringSpec,
        attempt: int,
        workers: Sequence[Actor],
        rollouts: Rollouts,
        groups_directory: Path,
        reference: Actor | None = None,
        stacks: Path | None = None,
    ) -> None:
        """Start the execution. Call it on the event loop.

        Args:
            workers: Actor handles of the rollout workers (`RayRollouts.workers`).
            rollouts: Gets the acknowledgments of further copies.
            groups_directory: <run>/groups; created if missing.
            reference: Actor of the reference policy; None = there is none.
            stacks: See `stream_blocks`.
        """
        make_directory(groups_directory)
        self._spec, self._attempt, self._workers, self._rollouts = (
            spec,
            attempt,
            list(workers),
            rollouts,
        )
        self._directory, self._reference, self._stacks = groups_directory, reference, stacks
        self._loop = asyncio.get_running_loop()
        self._arrived: queue.Queue[pa.Table | BaseException | None] = queue.Queue()
        self._safe: asyncio.Queue[list[tuple[int, Scored | None]] | BaseException] = asyncio.Queue()
        self._seen: set[int] = set()
        """Ordinals that have arrived, except those below `_ended_below`, which have all ended."""
        self._ended_below = 0
        self._closed = False
        self._unscored_by_teacher = 0
        """Groups in a row of which the teacher scored nothing."""
        self._threads = [
            threading.Thread(target=target, name=target.__name__, daemon=True)
            for target in (self._read_stream, self._write_files)
        ]
        for thread in self._threads:
            thread.start()

    async def next(self) -> list[Scored]:
        """Groups scored since the last call, at least one. Their rows are in a complete Parquet
        file. The caller acknowledges them.

        Raises:
            RewardError: A reward failed under policy `fail`.
            TeacherError: The teacher scored none of the last groups.
            RuntimeError: The execution broke; PartDiedError if a process died.
        """
        while True:
            items = await self._safe.get()
            if isinstance(items, RewardError | TeacherError):
                raise items
            if isinstance(items, BaseException):
                raise broken_stream("scoring", items) from items
            if copies := [ordinal for ordinal, group in items if group is None]:
                await self._rollouts.ack(copies)
            if scored := [group for _, group in items if group is not None]:
                return scored

    def ended_below(self, ordinal: int) -> None:
        """From now on, acknowledge and drop copies of groups below this ordinal."""
        self._ended_below = ordinal

    async def save(self, groups: Sequence[Scored], path: Path) -> None:
        """Write the groups' rows as one Parquet file, in this order."""
        references = [scored.ref for scored in groups]

        def write() -> None:
            # Reads the object store, which may take seconds.
            write_groups(path, groups_at(references))

        await asyncio.to_thread(write)

    async def load(self, path: Path) -> list[Scored]:
        """Put the groups of a file that `save` wrote into the object store, and return them in the
        file's order. `next` does not return them."""
        return await asyncio.to_thread(self._load, path)

    def _load(self, path: Path) -> list[Scored]:
        groups = parquet.read_table(path)
        stream, rows = ray.put(table_to_ipc(groups)), enumerate(content_hashes(groups))
        return [
            scored_summary(groups.slice(place, 1), (stream, place), content)
            for place, content in rows
        ]

    async def started(self) -> bool:
        """Whether the execution's task has asked a worker for groups. Also true for a stream that
        broke: `next` raises its error."""
        reading = self._threads[0].is_alive()
        return not reading or any(
            await asyncio.gather(*(worker.has_reader.remote() for worker in self._workers))
        )

    def lost(self, ordinal: int, error: BaseException) -> None:
        """Report that a group will never arrive. After a RolloutFailedError, `next` returns the
        group as lost; it raises any other error."""
        if not isinstance(error, RolloutFailedError):
            self._safe.put_nowait(error)
            return
        why = f"lost with its rollout worker, and not generated again: {error}"
        self._safe.put_nowait(
            [
                (
                    ordinal,
                    Scored(
                        ordinal, 0, None, 0, (), {}, usable=0, truncated=0, failure=why, lost=True
                    ),
                )
            ]
        )

    async def close(self) -> None:
        """Close the workers' outboxes, which ends the execution and kills rewards that still run.
        Then merge the small files."""
        self._closed = True
        closing = [worker.close_outbox.remote() for worker in self._workers]
        for closed in closing:
            with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
                await asyncio.wait_for(closed, 5.0)
        for thread in self._threads:
            await asyncio.to_thread(thread.join, 20.0)
        if not any(thread.is_alive() for thread in self._threads):
            await asyncio.to_thread(compact, self._directory)

    def _read_stream(self) -> None:
        """Thread: queue rows from Ray Data as they arrive.

        If the task's process dies, start a new execution. The rollout workers treat it as a new
        reader and offer it every unacknowledged group.
        """
        least = 0.0 if self._spec.algorithm.advantage == "maxrl" else None
        reward = self._spec.reward
        tasks = Tasks(reward.tasks, reward.num_cpus, reward.num_gpus)
        stage = partial(score_table, spec=self._spec)
        deaths = Deaths("scoring")
        end: BaseException | None = None
        while end is None and not self._closed:
            try:
                source = partial(
                    rewarded_groups,
                    reward,
                    uuid.uuid4().hex,
                    self._workers,
                    self._reference,
                    least,
                    self._spec.algorithm.distillation,
                )
                for block in stream_blocks(
                    source, stage, STREAM_BYTES, "scoring", self._stacks, tasks
                ):
                    self._arrived.put(block)
                end = RuntimeError("it ended while its rollout workers were alive")
            except Exception as error:
                if not deaths.survived(error):
                    # next() raises it. Raised in this thread, it would be lost.
                    end = error
        self._arrived.put(None if self._closed else end)

    def _write_files(self) -> None:
        """Thread: write all waiting rows to one file and one object, then tell the event loop."""
        try:
            files = FlushFiles(self._directory, self._attempt)
            while True:
                tables, end = _waiting_tables(self._arrived)
                rows = [table.slice(row, 1) for table in tables for row in range(table.num_rows)]
                if rows:
                    self._flush(files, rows)
                if end is not None:
                    raise end
        except _EndedError:
            return
        except Exception as error:
            # As above, next() raises it.
            self._hand_over(error)

    def _flush(self, files: FlushFiles, rows: list[pa.Table]) -> None:
        ordinals = [row["ordinal"][0].as_py() for row in rows]
        if self._spec.reward.policy == "fail":
            for row, ordinal in zip(rows, ordinals, strict=True):
                if (failure := row["failure"][0].as_py()) and not failure.startswith(
                    (UNFORESEEN, FILTERED, NO_BASELINE)
                ):
                    raise RewardError(f"group {ordinal}: {failure}")
        self._unscored_by_teacher = _unscored_in_a_row(
            rows, self._unscored_by_teacher, self._spec.algorithm.distillation
        )
        new = {}
        for row, ordinal in zip(rows, ordinals, strict=True):
            if ordinal >= self._ended_below and ordinal not in self._seen:
                new[ordinal] = row
        self._seen = {ordinal for ordinal in (*self._seen, *new) if ordinal >= self._ended_below}
        scored: dict[int, Scored] = {}
        if new:
            files.write(list(new.values()))
            rows_table = pa.concat_tables(new.values(), promote_options="permissive")
            table, contents = ray.put(table_to_ipc(rows_table)), content_hashes(rows_table)
            scored = {
                ordinal: scored_summary(row, (table, place), contents[place])
                for place, (ordinal, row) in enumerate(new.items())
            }
        self._hand_over([(ordinal, scored.pop(ordinal, None)) for ordinal in ordinals])

    def _hand_over(self, item: list[tuple[int, Scored | None]] | BaseException) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._safe.put_nowait, item)


class _EndedError(Exception):
    """The stream was closed."""


def _unscored_in_a_row(
    rows: Sequence[pa.Table], before: int, distillation: DistillationConfig | None
) -> int:
    """Number of groups at the end of which the teacher scored nothing, `before` included.

    Raises:
        TeacherError: there are max_failed_groups of them.
    """
    if distillation is None:
        return 0
    count = before
    for row in rows:
        failure = row[TEACHER_FAILURE_COLUMN][0].as_py()
        count = 0 if failure is None else count + 1
        if count >= distillation.max_failed_groups:
            raise TeacherError(
                f"algorithm.distillation.teacher = {distillation.teacher!r} scored none of the last"
                f" {count} groups (max_failed_groups): {failure}"
            )
    return count


def _waiting_tables(
    arrived: queue.Queue[pa.Table | BaseException | None],
) -> tuple[list[pa.Table], BaseException | None]:
    """At least one table, with those that follow within FLUSH_LINGER_S; or the end."""
    tables: list[pa.Table] = []
    item = arrived.get()
    if isinstance(item, pa.Table):
        time.sleep(FLUSH_LINGER_S)
    while True:
        if item is None:
            return tables, _EndedError()
        if isinstance(item, BaseException):
            return tables, item
        tables.append(item)
        if len(tables) >= MOST_IN_FLUSH:
            return tables, None
        try:
            item = arrived.get_nowait()
        except queue.Empty:
            return tables, None


def scored_summary(row: pa.Table, reference: RowRef, content: str = "") -> Scored:
    """What control needs to know of a scored group, from its one-row table."""
    columns = [*SUMMARIZED, *(name for name in BASELINE_COLUMNS if name in row.column_names)]
    group: _ScoredRow = row.select(columns).to_pylist()[0]
    spanned = [*group["versions"], group.get("baseline_versions", [])]
    versions = [span["version"] for spans in spanned for span in spans] or [0]
    usable = [index for index, status in enumerate(group["status"]) if status == "ok"]
    return Scored(
        ordinal=group["ordinal"],
        oldest_version=min(versions),
        newest=max(versions),
        content=content,
        masked=Counter(status for status in group["status"] if status != "ok"),
        ref=reference,
        tokens=sum(len(ids) for ids in group["completion_ids"]),
        rewards=tuple(
            reward
            for reward, status in zip(group["reward"], group["status"], strict=True)
            if status == "ok" and reward is not None
        ),
        reward_parts=_part_means([group["reward_parts"][index] for index in usable]),
        usable=len(usable),
        truncated=sum(reason in TRUNCATED for reason in group["finish_reason"]),
        logprob_sum=math.fsum(
            logprob for known in group["logprobs"] for logprob in known if math.isfinite(logprob)
        ),
        looping=sum(map(has_loop, group["completion_ids"])),
        characters=sum(map(len, group["completion_text"])),
        unprintable=sum(map(unprintable, group["completion_text"])),
        unscored=_unscored(group["reward_parts"]),
        failure=group["failure"],
        source=row[SOURCE_COLUMN][0].as_py() if SOURCE_COLUMN in row.column_names else None,
        reference_version=(
            row[REFERENCE_VERSION_COLUMN][0].as_py()
            if REFERENCE_VERSION_COLUMN in row.column_names
            else None
        ),
        baseline=_baseline(group),
        example=TrajectoryText(
            prompt=_shortened(group["prompt_text"]),
            completion=_shortened(group["completion_text"][0]),
            reward=group["reward"][0],
            reward_parts=group["reward_parts"][0] or {},
            version=min((span["version"] for span in group["versions"][0]), default=0),
        ),
    )


def _baseline(group: _ScoredRow) -> ScoredBaseline | None:
    if "baseline_ids" not in group:
        return None
    return ScoredBaseline(
        reward=group.get("baseline_reward"),
        tokens=len(group["baseline_ids"]),
        truncated=group["baseline_finish_reason"] in TRUNCATED,
    )


def _shortened(text: str) -> str:
    """The text without secrets, and without its middle if it is longer than EXAMPLE_LENGTH."""
    # Redact before the cut: half a secret would not be recognized.
    text, half = redact(text), EXAMPLE_LENGTH // 2
    return text if len(text) <= EXAMPLE_LENGTH else f"{text[:half]} … {text[-half:]}"


def _unscored(parts: Sequence[Mapping[str, float | None]]) -> dict[str, int]:
    """Number of trajectories without a reward, by function. Entries NAME/PART are not functions,
    and are left out."""
    names = dict.fromkeys(name for part in parts for name in part if "/" not in name)
    return {name: sum(part[name] is None for part in parts) for name in names}


def _part_means(parts: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """Mean of each part over the trajectories that have it. A part without a value is left out."""
    names = dict.fromkeys(name for part in parts for name in part)
    values = {
        name: [value for part in parts if (value := part.get(name)) is not None] for name in names
    }
    return {name: sum(some) / len(some) for name, some in values.items() if some}
