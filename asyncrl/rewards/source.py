"""The source of the scoring execution: leases finished groups from the rollout workers and yields each as its rewards are done."""

from __future__ import annotations

import queue
import threading
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import pyarrow as pa
import ray
import ray.exceptions

from asyncrl.config import RewardConfig
from asyncrl.rewards.contract import RewardError
from asyncrl.rewards.pool import GROUPS_AT_ONCE, GroupRewards, RewardPool, no_rewards
from asyncrl.rewards.score import attach_rewards, group_request
from asyncrl.rollout.outbox import OutboxClosed
from asyncrl.types import COLUMNS, table_from_ipc

__all__ = ["rewarded_groups"]

LEASE_WAIT_S = 1.0
RESTART_PAUSE_S = 0.2


def rewarded_groups(config: RewardConfig, workers: Sequence[Any]) -> Iterator[pa.Table]:
    """One-row tables with raw rewards, in the order in which rewards are done; ends when every worker has closed its outbox.

    A slow group holds back no other: up to 64 are in the pool at once. Under policy `fail` the group that failed comes with its
    failure; the consumer ends the run. Runs in the read task; a task run again after a crash is a new reader to the workers.
    """
    events: queue.Queue[pa.Table | tuple[pa.Table, Future[GroupRewards]] | BaseException | None] = queue.Queue()
    room = threading.Semaphore(GROUPS_AT_ONCE)
    stop = threading.Event()
    with RewardPool(config) as pool:
        threading.Thread(target=_lease, args=(workers, uuid.uuid4().hex, room, stop, events), daemon=True, name="leases").start()
        try:
            while (event := events.get()) is not None:
                if isinstance(event, BaseException):
                    raise event
                if isinstance(event, tuple):
                    room.release()
                    yield attach_rewards(event[0], _result(config, *event))
                    continue
                prompts, completions, ids, columns = group_request(event.to_pylist()[0], [name for name in event.column_names if name not in COLUMNS])
                pool.submit(prompts, completions, ids, columns).add_done_callback(partial(_done, events, event))
        finally:
            stop.set()
            room.release(GROUPS_AT_ONCE)


def _done(events: queue.Queue[Any], group: pa.Table, future: Future[GroupRewards]) -> None:
    events.put((group, future))


def _result(config: RewardConfig, group: pa.Table, future: Future[GroupRewards]) -> GroupRewards:
    try:
        return future.result()
    except RewardError as error:
        return no_rewards(config, len(group["completion_ids"][0]), str(error))


def _lease(workers: Sequence[Any], reader: str, room: threading.Semaphore, stop: threading.Event, events: queue.Queue[Any]) -> None:
    """Long-poll every worker; put one-row tables on the queue, and None when no worker is left."""
    try:
        left = list(workers)
        asked: dict[Any, Any] = {}
        while left and not stop.is_set():
            for worker in left:
                if worker not in asked.values():
                    asked[worker.lease.remote(reader, max(1, GROUPS_AT_ONCE // len(workers)), LEASE_WAIT_S)] = worker
            done, _ = ray.wait(list(asked), num_returns=1, timeout=LEASE_WAIT_S)
            for reference in done:
                worker = asked.pop(reference)
                try:
                    stream = ray.get(reference)
                except OutboxClosed:
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
    """The one-row tables of a lease, each with buffers of its own: a pickled slice would carry the whole table."""
    if stream is not None:
        table = table_from_ipc(stream)
        yield from (table.take([row]) for row in range(table.num_rows))
