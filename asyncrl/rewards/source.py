"""The source of the scoring execution: takes finished groups from the rollout workers and yields
each as its rewards are done."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import ray.exceptions

from asyncrl.config import RewardConfig
from asyncrl.contracts.columns import row_values
from asyncrl.contracts.errors import OutboxClosedError
from asyncrl.contracts.rows import COLUMNS, SCORED_COLUMNS, table_from_ipc
from asyncrl.rewards.code import share_settings
from asyncrl.rewards.contract import RewardError, with_notes
from asyncrl.rewards.pool import GroupRewards, RewardPool, no_rewards
from asyncrl.rewards.score import attach_reference, attach_rewards, group_call, group_rows
from asyncrl.runtime.failures import unforeseen
from asyncrl.runtime.ray_objects import DEATHS

__all__ = ["rewarded_groups"]

TAKE_WAIT_S = 1.0
RESTART_PAUSE_S = 0.2
TAKEN_AHEAD = 2
"""Groups that a task takes for each that its processes run at once."""


def rewarded_groups(
    config: RewardConfig,
    reader: str,
    workers: Sequence[Any],
    reference: Any = None,
    least: float | None = None,
) -> Iterator[pa.Table]:
    """One-row tables with raw rewards, in the order in which rewards are done; ends when every
    worker has closed its outbox.

    A slow group holds back no other. The task takes as many groups as its reward processes run at
    once, and as many again, so that none of them waits for a take. Under policy `fail` the group
    that failed comes with its failure; the consumer ends the run. Runs in each read task of the
    execution.

    Args:
        reader: name of the execution. Its tasks are one reader to the workers, and each group is
            taken by one of them; another name takes over all that has not been acknowledged.
        reference: the actor of the reference policy, whose log-probs are added; None = there is
            none.
        least: as of `RewardPool`.
    """
    # A taken group; what is known of one; an error; None at the end.
    events: queue.Queue[Any] = queue.Queue()
    places = TAKEN_AHEAD * config.processes * config.concurrency
    room = threading.Semaphore(places)
    stop = threading.Event()
    share_settings(config.sandbox)
    with RewardPool(config, least) as pool:
        threading.Thread(
            target=_take,
            args=(workers, reader, places, room, stop, events),
            daemon=True,
            name="takes",
        ).start()
        try:
            while (event := events.get()) is not None:
                if isinstance(event, BaseException):
                    raise event
                if isinstance(event, _Rewarded):
                    room.release()
                if isinstance(event, _Rewarded) and reference is not None:
                    asked = reference.logprobs.remote(group_rows(event.group))
                    asked.future().add_done_callback(
                        partial(
                            _referred, events, attach_rewards(event.group, _result(config, event))
                        )
                    )
                    continue
                if isinstance(event, _Rewarded | _Referred):
                    yield (
                        attach_rewards(event.group, _result(config, event))
                        if isinstance(event, _Rewarded)
                        else _with_reference(event)
                    )
                    continue
                _submit(pool, event).add_done_callback(partial(_done, events, event))
        finally:
            stop.set()
            room.release(places)


def _submit(pool: RewardPool, group: pa.Table) -> Future[GroupRewards]:
    """Start the rewards of a group. A value that no function can take fails this group only."""
    columns = [name for name in group.column_names if name not in COLUMNS]
    try:
        return pool.submit(group_call(row_values(group)[0], columns))
    except Exception as error:
        failed: Future[GroupRewards] = Future()
        failed.set_exception(error)
        return failed


@dataclass(frozen=True, slots=True)
class _Rewarded:
    group: pa.Table
    rewards: Future[GroupRewards]


@dataclass(frozen=True, slots=True)
class _Referred:
    group: pa.Table
    logprobs: Future[list[Any]]


def _done(events: queue.Queue[Any], group: pa.Table, future: Future[GroupRewards]) -> None:
    events.put(_Rewarded(group, future))


def _referred(events: queue.Queue[Any], group: pa.Table, future: Future[list[Any]]) -> None:
    events.put(_Referred(group, future))


def _result(config: RewardConfig, event: _Rewarded) -> GroupRewards:
    n = len(event.group["completion_ids"][0])
    try:
        return event.rewards.result()
    except RewardError as error:
        return no_rewards(config, n, with_notes(error))
    except Exception as error:
        return no_rewards(config, n, unforeseen("the group could not be scored", error))


def _with_reference(event: _Referred) -> pa.Table:
    """The group with the reference policy's log-probs. Where the reference fails at this group, it
    is given up; where it died, the stream breaks."""
    try:
        return attach_reference(event.group, event.logprobs.result())
    except DEATHS:
        raise
    except Exception as error:
        failure = unforeseen("the reference policy failed", error)
        group = event.group.set_column(
            event.group.column_names.index("failure"),
            "failure",
            pa.array([failure], SCORED_COLUMNS["failure"]),
        )
        return attach_reference(
            group, [np.full(len(ids), math.nan) for ids in group["completion_ids"][0].as_py()]
        )


def _take(
    workers: Sequence[Any],
    reader: str,
    places: int,
    room: threading.Semaphore,
    stop: threading.Event,
    events: queue.Queue[Any],
) -> None:
    """Long-poll every worker; put one-row tables on the queue, and None when no worker is left."""
    try:
        left = list(workers)
        asked: dict[Any, Any] = {}
        while left and not stop.is_set():
            for worker in left:
                if worker not in asked.values():
                    asked[
                        worker.take.remote(reader, max(1, places // len(workers)), TAKE_WAIT_S)
                    ] = worker
            done, _ = ray.wait(list(asked), num_returns=1, timeout=TAKE_WAIT_S)
            for reference in done:
                worker = asked.pop(reference)
                try:
                    stream = ray.get(reference)
                except OutboxClosedError:
                    left.remove(worker)
                except ray.exceptions.ActorUnavailableError:
                    stop.wait(RESTART_PAUSE_S)
                except ray.exceptions.ActorDiedError:
                    left.remove(worker)
                else:
                    for group in _rows(stream):
                        room.acquire()
                        events.put(group)
        events.put(None)
    except Exception as error:
        # The generator raises it: this thread cannot.
        events.put(error)


def _rows(stream: pa.Buffer | None) -> Iterator[pa.Table]:
    """The one-row tables of a take, each with buffers of its own: a pickled slice would carry the
    whole table."""
    if stream is not None:
        table = table_from_ipc(stream)
        yield from (table.take([row]) for row in range(table.num_rows))
