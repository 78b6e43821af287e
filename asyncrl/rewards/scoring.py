"""Scoring: one long-lived Ray Data execution, from the rollout workers' outboxes to scored groups
in complete Parquet files.

    outboxes ──take──► source: rewards, in reward processes ──► map_batches: status, advantage,
        ▲                                                                    │        summary
        └──── ack ──── next() ◄── threads here: Parquet, object store ◄──────┘
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import ray
import ray.exceptions

from asyncrl.config import DistillationConfig, PolicyGradient
from asyncrl.config.schema import FailRun
from asyncrl.contracts.content_hash import content_hashes
from asyncrl.contracts.errors import RolloutFailedError, TeacherError
from asyncrl.contracts.group_table import table_to_ipc
from asyncrl.contracts.messages import Scored
from asyncrl.contracts.outcomes import FILTERED, NO_BASELINE, UNFORESEEN
from asyncrl.contracts.protocols import Rollouts
from asyncrl.contracts.rows import SUMMARY_COLUMN, TEACHER_FAILURE_COLUMN
from asyncrl.rewards.contract import RewardError
from asyncrl.rewards.files import FlushFiles, compact, write_groups
from asyncrl.rewards.score import score_table
from asyncrl.rewards.source import rewarded_groups
from asyncrl.rewards.spec import ScoringSpec
from asyncrl.rewards.summary import (
    examples,
    scored_from_text,
    scored_to_text,
    summaries,
)
from asyncrl.runtime.files import parquet
from asyncrl.runtime.files.opening import make_directory
from asyncrl.runtime.pace import Pace
from asyncrl.runtime.ray.objects import Actor, broken_stream, groups_at
from asyncrl.runtime.ray.stream import Deaths, Tasks, stream_blocks

logger = logging.getLogger(__name__)

STREAM_BYTES = 256 << 20
"""Bytes of unread scored groups in the object store at which the stream pauses."""
MOST_IN_FLUSH = 256
FLUSH_EVERY_S = 0.1
"""Least seconds between the starts of two flushes. A flush costs a file, an object and an
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
        stream = ray.put(table_to_ipc(groups))
        return _located(_summaries(groups), groups, stream)

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
        algorithm = self._spec.algorithm
        least = algorithm.advantage.least_reward if isinstance(algorithm, PolicyGradient) else None
        reward = self._spec.reward
        tasks = Tasks(reward.tasks, reward.num_cpus, reward.num_gpus)
        stage = partial(scored_block, spec=self._spec)
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
                    self._spec.answers,
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
            pace = Pace(FLUSH_EVERY_S)
            while True:
                tables, end = _waiting_tables(self._arrived, pace)
                if tables:
                    self._flush(files, tables)
                if end is not None:
                    raise end
        except _EndedError:
            return
        except Exception as error:
            # As above, next() raises it.
            self._hand_over(error)

    def _flush(self, files: FlushFiles, blocks: list[pa.Table]) -> None:
        table = pa.concat_tables(blocks, promote_options="permissive")
        found = [scored_from_text(text) for text in table[SUMMARY_COLUMN].to_pylist()]
        table = table.drop_columns([SUMMARY_COLUMN])
        if isinstance(self._spec.reward.policy, FailRun):
            for scored in found:
                if scored.failure and not scored.failure.startswith(
                    (UNFORESEEN, FILTERED, NO_BASELINE)
                ):
                    raise RewardError(f"group {scored.ordinal}: {scored.failure}")
        self._unscored_by_teacher = _unscored_in_a_row(
            table, self._unscored_by_teacher, self._spec.algorithm.distillation
        )
        new: dict[int, int] = {}
        for row, scored in enumerate(found):
            if scored.ordinal >= self._ended_below and scored.ordinal not in self._seen:
                new.setdefault(scored.ordinal, row)
        self._seen = {ordinal for ordinal in (*self._seen, *new) if ordinal >= self._ended_below}
        items: list[tuple[int, Scored | None]] = [(scored.ordinal, None) for scored in found]
        if new:
            kept = table if len(new) == table.num_rows else table.take(list(new.values()))
            files.write([kept])
            stream = ray.put(table_to_ipc(kept.combine_chunks()))
            located = _located([found[row] for row in new.values()], kept, stream)
            for row, scored in zip(new.values(), located, strict=True):
                items[row] = scored.ordinal, scored
        self._hand_over(items)

    def _hand_over(self, item: list[tuple[int, Scored | None]] | BaseException) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._safe.put_nowait, item)


class _EndedError(Exception):
    """The stream was closed."""


def scored_block(table: pa.Table, spec: ScoringSpec) -> pa.Table:
    """The map stage of scoring: score the groups of a table, and add a column with each one's
    `Scored`. So the driver computes no sums over tokens."""
    table = score_table(table, spec)
    texts = [scored_to_text(scored) for scored in _summaries(table)]
    return table.append_column(SUMMARY_COLUMN, pa.array(texts, pa.string()))


def _summaries(table: pa.Table) -> list[Scored]:
    """What control needs to know of each group, without the location of its row."""
    return [
        replace(scored, content=content)
        for scored, content in zip(summaries(table), content_hashes(table), strict=True)
    ]


def _located(
    found: Sequence[Scored], groups: pa.Table, stream: ray.ObjectRef[pa.Buffer]
) -> list[Scored]:
    """The summaries of the groups of a table, with the index of each one's row in the object, and
    an example to show. The driver makes the examples, because it redacts its own secrets."""
    return [
        replace(scored, ref=(stream, index), example=example)
        for index, (scored, example) in enumerate(zip(found, examples(groups), strict=True))
    ]


def _unscored_in_a_row(
    groups: pa.Table, before: int, distillation: DistillationConfig | None
) -> int:
    """Number of groups at the end of which the teacher scored nothing, `before` included.

    Raises:
        TeacherError: there are max_failed_groups of them.
    """
    if distillation is None:
        return 0
    count = before
    for failure in groups[TEACHER_FAILURE_COLUMN].to_pylist():
        count = 0 if failure is None else count + 1
        if count >= distillation.max_failed_groups:
            raise TeacherError(
                f"algorithm.distillation.teacher = {distillation.teacher_text!r} scored none of the"
                f" last {count} groups (max_failed_groups): {failure}"
            )
    return count


def _waiting_tables(
    arrived: queue.Queue[pa.Table | BaseException | None], pace: Pace
) -> tuple[list[pa.Table], BaseException | None]:
    """At least one table, with those that arrive until the next flush is due; or the end."""
    tables: list[pa.Table] = []
    groups = 0
    item = arrived.get()
    if isinstance(item, pa.Table):
        time.sleep(pace.left_s())
        pace.sent()
    while True:
        if item is None:
            return tables, _EndedError()
        if isinstance(item, BaseException):
            return tables, item
        tables.append(item)
        groups += item.num_rows
        if groups >= MOST_IN_FLUSH:
            return tables, None
        try:
            item = arrived.get_nowait()
        except queue.Empty:
            return tables, None
