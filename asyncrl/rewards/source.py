"""The source of the scoring execution. It takes finished groups from the rollout workers, and
yields those whose rewards are done, many in one table."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import ray
import ray.exceptions

from asyncrl.config import DistillationConfig, RewardConfig
from asyncrl.contracts.errors import OutboxClosedError, TeacherError
from asyncrl.contracts.group_table import table_from_ipc, table_to_ipc
from asyncrl.contracts.rows import SCORED_COLUMNS, ReferenceLogprobs
from asyncrl.rewards.code import share_settings
from asyncrl.rewards.contract import RewardError, with_notes
from asyncrl.rewards.pool import TEXT_ANSWERS, GroupRewards, RewardPool, no_rewards
from asyncrl.rewards.reference_rows import Answer, ReferenceRows, reference_rows
from asyncrl.rewards.score import (
    attach_reference,
    attach_reference_version,
    attach_rewards,
    attach_teacher,
    completions_scored,
    group_call,
)
from asyncrl.runtime.failures import unforeseen
from asyncrl.runtime.pace import Pace
from asyncrl.runtime.ray.objects import DEATHS, Actor
from asyncrl.text.answer import AnswerFormat

TAKE_WAIT_S = 1.0
RESTART_PAUSE_S = 0.2
TAKE_EVERY_S = 0.1
"""Least seconds between two takes from the workers. What finishes meanwhile comes in one take."""
TAKEN_AHEAD = 2
"""Groups that a task takes at least, as a multiple of those that its processes run at once."""
AHEAD_S = 0.5
"""A task whose rewards are fast takes the groups of this many seconds."""
MOST_IN_BLOCK = 256
MOST_BLOCK_BYTES = 32 << 20
"""A block with this many groups or bytes takes no more groups."""
BLOCK_WAIT_S = 0.05
"""Longest time that a ready group waits for others while rewards are under way."""


@dataclass(frozen=True, slots=True)
class _Taken:
    """A group that a worker handed over."""

    group: pa.Table


@dataclass(frozen=True, slots=True)
class _Rewarded:
    """A group whose rewards are done, or have failed."""

    group: pa.Table
    rewards: Future[GroupRewards]


@dataclass(frozen=True, slots=True)
class _Compared:
    """A group with raw rewards whose reference log-probs are done, or have failed."""

    group: pa.Table
    asked: ReferenceRows
    answer: Future[ReferenceLogprobs]


@dataclass(frozen=True, slots=True)
class _Referred:
    """A group with raw rewards whose log-probs of a teacher are done, or have failed."""

    group: pa.Table
    asked: ReferenceRows
    logprobs: Future[list[Answer]]
    seconds: float


_Event: TypeAlias = "_Taken | _Rewarded | _Compared | _Referred | BaseException | None"
_Events: TypeAlias = "queue.Queue[_Event]"
"""What happened to a group; an exception to raise; None once every outbox is closed."""


class Slots:
    """Slots for the groups that a task takes ahead of its rewards: as many as its rewards finish in
    AHEAD_S, at the pace of the last second, and at least `least`. So slow rewards leave groups to
    other tasks, and fast ones do not wait for a take."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._held = 0
        self._finished: deque[float] = deque()
        self._changed = threading.Condition()

    def wait(self, timeout_s: float) -> int:
        """The number of free slots, once there is one; 0 after the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self._free() > 0, timeout_s)
            return max(0, self._free())

    def under_way(self) -> bool:
        """Whether the task has groups whose rewards are not done."""
        return self._held > 0

    def take(self, groups: int) -> None:
        """The task has taken this many groups."""
        with self._changed:
            self._held += groups

    def release(self) -> None:
        """The rewards of a group are done."""
        with self._changed:
            self._held -= 1
            self._finished.append(time.monotonic())
            self._changed.notify()

    def _free(self) -> int:
        since = time.monotonic() - 1.0
        while self._finished and self._finished[0] < since:
            self._finished.popleft()
        return max(self._least, int(AHEAD_S * len(self._finished))) - self._held


def rewarded_groups(
    config: RewardConfig,
    reader: str,
    workers: Sequence[Actor],
    reference: Actor | None = None,
    least: float | None = None,
    distillation: DistillationConfig | None = None,
    answers: AnswerFormat = TEXT_ANSWERS,
) -> Iterator[pa.Table]:
    """Yield tables of the groups whose rewards are done, one row each with raw rewards, until every
    worker has closed its outbox. Runs in each read task of the execution.

    A table has the groups that are ready, 1 to MOST_IN_BLOCK. A slow group does not delay others.
    Under policy `fail`, a group that failed carries its failure, and the consumer ends the run.

    Args:
        reader: Name of the execution. The workers give each group to one task of this reader. A new
            reader gets every group that was not acknowledged.
        reference: Actor of the reference policy, whose log-probs are added; None = there is none.
        least: See `RewardPool`.
        distillation: If given, the reference policy is a teacher, whose failures mask trajectories.
        answers: See `RewardPool`.
    """
    share_settings(config.sandbox)
    with RewardPool(config, least, answers) as pool:
        slots = Slots(TAKEN_AHEAD * config.processes * config.concurrency)
        stages = _Stages(config, pool, slots, reference, distillation)
        with _taking(workers, reader, slots) as events:
            for ready in _blocks(events, stages, slots.under_way):
                yield pa.concat_tables(ready, promote_options="permissive").combine_chunks()


@dataclass(frozen=True, slots=True)
class _Stages:
    """What happens to a group after each event."""

    config: RewardConfig
    pool: RewardPool
    slots: Slots
    reference: Actor | None
    distillation: DistillationConfig | None

    def handle(self, event: _Event, events: _Events) -> pa.Table | None:
        """Start the next stage of the event's group, which reports to `events`. Returns the group
        after its last stage. Raises an event that is an exception."""
        match event:
            case BaseException():
                raise event
            case _Taken(group):
                _submit(self.pool, group).add_done_callback(partial(_done, events, group))
            case _Rewarded(group, rewards):
                self.slots.release()
                group = attach_rewards(group, _result(self.config, group, rewards))
                if self.reference is None:
                    return group
                self._ask(self.reference, group, events)
            case _Compared(group, asked, answer):
                return _with_reference(group, asked, answer)
            case _Referred(group, asked, logprobs, seconds):
                return _with_teacher(group, asked, logprobs, seconds, self._top_k)
        return None

    @property
    def _top_k(self) -> bool:
        return self.distillation is not None and self.distillation.top_k > 0

    def _ask(self, reference: Actor, group: pa.Table, events: _Events) -> None:
        """Ask the reference policy for its log-probs of a group."""
        asked = reference_rows(group)
        if self.distillation is None:
            answer = reference.versioned_logprobs.remote(asked.rows, asked.scored).future()
            answer.add_done_callback(partial(_compared, events, group, asked))
            return
        ask = reference.top_logprobs if self._top_k else reference.logprobs
        logprobs = ask.remote(asked.rows, asked.scored).future()
        logprobs.add_done_callback(partial(_referred, events, group, asked, time.monotonic()))


def _blocks(
    events: _Events, stages: _Stages, under_way: Callable[[], bool] = lambda: False
) -> Iterator[list[pa.Table]]:
    """Handle events, and yield the groups that are ready, until the events end.

    Args:
        under_way: whether rewards of groups are not done yet.
    """
    ready: list[pa.Table] = []
    size = 0
    due = math.inf
    ended = False
    while not ended:
        try:
            event = events.get(timeout=max(0.0, due - time.monotonic()) if ready else None)
            ended = event is None
            if event is not None and (group := stages.handle(event, events)) is not None:
                due = due if ready else time.monotonic() + BLOCK_WAIT_S
                ready.append(group)
                size += group.nbytes
        except queue.Empty:
            pass
        complete = time.monotonic() >= due or (events.empty() and not under_way())
        full = len(ready) == MOST_IN_BLOCK or size >= MOST_BLOCK_BYTES
        if ready and (ended or complete or full):
            yield ready
            ready, size = [], 0


@contextlib.contextmanager
def _taking(workers: Sequence[Actor], reader: str, slots: Slots) -> Iterator[_Events]:
    """Take groups in a thread. Yields the queue of events."""
    events: _Events = queue.Queue()
    stop = threading.Event()
    threading.Thread(
        target=_take, args=(workers, reader, slots, stop, events), daemon=True, name="takes"
    ).start()
    try:
        yield events
    finally:
        stop.set()


def _submit(pool: RewardPool, group: pa.Table) -> Future[GroupRewards]:
    """Start scoring a group. An error here, such as an unusable value, fails only this group."""
    try:
        return pool.submit(group_call(group))
    except Exception as error:
        failed: Future[GroupRewards] = Future()
        failed.set_exception(error)
        return failed


def _done(events: _Events, group: pa.Table, rewards: Future[GroupRewards]) -> None:
    events.put(_Rewarded(group, rewards))


def _compared(
    events: _Events, group: pa.Table, asked: ReferenceRows, answer: Future[ReferenceLogprobs]
) -> None:
    events.put(_Compared(group, asked, answer))


def _referred(
    events: _Events,
    group: pa.Table,
    asked: ReferenceRows,
    started: float,
    logprobs: Future[list[Answer]],
) -> None:
    events.put(_Referred(group, asked, logprobs, time.monotonic() - started))


def _result(config: RewardConfig, group: pa.Table, rewards: Future[GroupRewards]) -> GroupRewards:
    n = completions_scored(group)
    try:
        return rewards.result()
    except RewardError as error:
        return no_rewards(config, n, with_notes(error))
    except Exception as error:
        return no_rewards(config, n, unforeseen("the group could not be scored", error))


def _with_reference(
    group: pa.Table, asked: ReferenceRows, answer: Future[ReferenceLogprobs]
) -> pa.Table:
    """The group with the reference policy's log-probs and version. If the reference raised, the
    group has failed; if its process died, the stream breaks."""
    try:
        version, logprobs = answer.result()
        flat, _ = asked.of_trajectories(logprobs)
        return attach_reference_version(attach_reference(group, flat), version)
    except DEATHS:
        raise
    except Exception as error:
        failure = unforeseen("the reference policy failed", error)
        group = group.set_column(
            group.column_names.index("failure"),
            "failure",
            pa.array([failure], SCORED_COLUMNS["failure"]),
        )
        unknown = [np.full(len(ids), math.nan) for ids in group["completion_ids"][0].as_py()]
        return attach_reference_version(attach_reference(group, unknown), None)


def _with_teacher(
    group: pa.Table,
    asked: ReferenceRows,
    logprobs: Future[list[Answer]],
    seconds: float,
    top_k: bool = False,
) -> pa.Table:
    """The group with the teacher's log-probs, or with the reason why it has none. If the teacher's
    process died, the stream breaks."""
    try:
        of_tokens, top = asked.of_trajectories(logprobs.result())
        return attach_teacher(group, of_tokens, None, seconds, top if top_k else None)
    except DEATHS:
        raise
    except Exception as error:
        cause = getattr(error, "cause", None) or error
        line = next(iter(str(cause).strip().splitlines()), "")
        named = line if isinstance(cause, TeacherError) else f"{type(cause).__name__}: {line}"
        return attach_teacher(group, [], named, seconds, [] if top_k else None)


def _take(
    workers: Sequence[Actor],
    reader: str,
    slots: Slots,
    stop: threading.Event,
    events: _Events,
) -> None:
    """Thread: long-poll every worker and queue one-row tables; then None when no worker is left.
    Without a free slot it takes no groups, but still asks whether the outboxes are closed."""
    try:
        left = list(workers)
        takes: dict[ray.ObjectRef[pa.Buffer | None], tuple[Actor, int]] = {}
        pace = Pace(TAKE_EVERY_S)
        while left and not stop.wait(pace.left_s()):
            pace.sent()
            asked = sum(most for _, most in takes.values())
            free = max(0, slots.wait(TAKE_WAIT_S) - asked)
            busy = [worker for worker, _ in takes.values()]
            for worker in left:
                if worker not in busy:
                    most = max(1, free // len(left)) if free > 0 else 0
                    takes[worker.take.remote(reader, most, TAKE_WAIT_S)] = worker, most
                    free -= most
            done, _ = ray.wait(list(takes), num_returns=1, timeout=TAKE_WAIT_S)
            if done:
                done, _ = ray.wait(list(takes), num_returns=len(takes), timeout=0)
            for reference in done:
                worker, _ = takes.pop(reference)
                try:
                    stream = ray.get(reference)
                except OutboxClosedError:
                    left.remove(worker)
                except ray.exceptions.ActorUnavailableError:
                    stop.wait(RESTART_PAUSE_S)
                except ray.exceptions.ActorDiedError:
                    left.remove(worker)
                else:
                    groups = _rows(stream)
                    slots.take(len(groups))
                    for group in groups:
                        events.put(_Taken(group))
        events.put(None)
    except Exception as error:
        # The generator raises it. Raised in this thread, it would be lost.
        events.put(error)


def _rows(stream: pa.Buffer | None) -> list[pa.Table]:
    """The one-row tables of a take. Each has its own buffers: a slice would carry the whole take,
    and keep it in the object store. A round trip takes a tenth of the time of `Table.take`."""
    if stream is None:
        return []
    table = table_from_ipc(stream)
    return [table_from_ipc(table_to_ipc(table.slice(row, 1))) for row in range(table.num_rows)]
