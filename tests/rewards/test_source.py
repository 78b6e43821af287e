"""The source of the scoring stream: which groups make a block, and how many groups a task holds."""

import pickle
import queue
import threading
import time

import pyarrow as pa
import pytest
from fake_clock import FakeClock

from asyncrl.contracts.group_table import table_to_ipc
from asyncrl.rewards import source
from asyncrl.rewards.source import Slots, _blocks


class Group(str):
    nbytes = 1


class Stages:
    """Every event is a group that is ready, except those that it starts."""

    def handle(self, event, events):
        if isinstance(event, BaseException):
            raise event
        return None if event in ("started", "rewarded") else Group(event)


def blocks_of(*waiting):
    events = queue.Queue()
    for event in waiting:
        events.put(event)
    return events, _blocks(events, Stages())


def test_what_is_ready_makes_one_block_and_a_single_group_does_not_wait():
    events, blocks = blocks_of("a", "started", "b", "c")
    assert next(blocks) == ["a", "b", "c"]
    events.put("d")
    assert next(blocks) == ["d"]  # it would wait without end if it waited for more
    events.put(None)
    assert list(blocks) == []


def test_a_ready_group_waits_for_those_of_its_take(monkeypatch):
    """Until no reward is under way, or for BLOCK_WAIT_S."""
    monkeypatch.setattr(source, "BLOCK_WAIT_S", 60.0)
    under_way, events = [True], queue.Queue()
    blocks = _blocks(events, Stages(), lambda: under_way[0])
    events.put("a")
    reader = threading.Thread(target=lambda: found.append(next(blocks)))
    found = []
    reader.start()
    while not events.empty():
        time.sleep(0.01)
    assert found == []
    under_way[0] = False
    events.put("b")
    reader.join(30.0)
    assert found == [["a", "b"]]

    under_way[0] = True
    monkeypatch.setattr(source, "BLOCK_WAIT_S", 0.01)
    events.put("c")
    assert next(blocks) == ["c"]


def test_a_ready_group_does_not_wait_for_the_end_of_a_busy_time():
    """Events that never stop must not hold it for longer than BLOCK_WAIT_S."""
    events, handled = queue.Queue(), []

    class Slow(Stages):
        def handle(self, event, queue):
            handled.append(event)
            time.sleep(0.005)
            queue.put("busy")
            return Group(event) if event == "a" else None

    events.put("a")
    assert next(_blocks(events, Slow())) == ["a"]
    assert len(handled) <= 1 + source.BLOCK_WAIT_S / 0.005


def test_ready_groups_come_before_the_end():
    _, blocks = blocks_of("started", "a", "b", None)
    assert [group for block in blocks for group in block] == ["a", "b"]


def test_a_block_has_a_limit():
    _, blocks = blocks_of(*map(str, range(source.MOST_IN_BLOCK + 3)), None)
    assert [len(block) for block in blocks] == [source.MOST_IN_BLOCK, 3]


def test_a_block_has_a_limit_of_bytes(monkeypatch):
    monkeypatch.setattr(source, "MOST_BLOCK_BYTES", 2)
    _, blocks = blocks_of(*"abcde", None)
    assert list(blocks) == [["a", "b"], ["c", "d"], ["e"]]


def test_a_row_of_a_take_does_not_carry_the_whole_take():
    """Rewards that finish one by one make blocks of one group."""
    take = pa.table({"ids": [[list(range(100))] * 8] * 64}).combine_chunks()
    rows = source._rows(table_to_ipc(take))
    assert pa.concat_tables(rows).equals(take)
    assert len(pickle.dumps(rows[3])) < len(pickle.dumps(take)) / 16


def test_an_exception_ends_the_stream():
    _, blocks = blocks_of("started", RuntimeError("broken"))
    with pytest.raises(RuntimeError, match="broken"):
        next(blocks)


def test_slow_rewards_hold_few_groups_and_fast_ones_many(monkeypatch):
    clock = FakeClock(100.0)
    monkeypatch.setattr(source, "time", clock)
    slots = Slots(2)
    assert slots.wait(0) == 2
    slots.take(2)
    assert slots.wait(0) == 0
    for _ in range(200):  # 200 groups a second
        clock.s += 0.005
        slots.release()
        slots.take(1)
    held = 2
    ahead = int(source.AHEAD_S * 200)
    assert ahead - held - 1 <= slots.wait(0) <= ahead - held
    clock.s += 2.0  # the next reward takes long
    assert slots.wait(0) == 0
    slots.release()
    assert slots.wait(0) == 1, "two slots again"


def test_a_slot_that_becomes_free_wakes_the_waiter():
    slots = Slots(1)
    slots.take(1)
    found = []
    waiter = threading.Thread(target=lambda: found.append(slots.wait(60.0)))
    waiter.start()
    slots.release()
    waiter.join(60.0)
    assert found == [1]
