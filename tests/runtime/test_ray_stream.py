"""Endless Ray Data streams: back-pressure, separate contexts, and column metadata."""

import functools
import itertools
import os
import threading
import time

import psutil
import pyarrow as pa
import pytest
import ray.data

from asyncrl.contracts.columns import json_field, row_values
from asyncrl.runtime.ray.stream import (
    LONGEST_WAIT_S,
    STEP_EVERY_S,
    EndlessExecution,
    stream_blocks,
)

ROWS = 32


def numbered(counter):
    """Yield tables of 32 rows without end. The file contains the number of rows so far."""
    for start in itertools.count(0, ROWS):
        temporary = counter.with_suffix(".new")
        temporary.write_text(str(start + ROWS))
        os.replace(temporary, counter)
        yield pa.table({"number": list(range(start, start + ROWS)), "ids": [[1] * 16] * ROWS})


def unchanged(table):
    return table


def read_tasks():
    names = [
        process.info["cmdline"]
        for process in psutil.process_iter(["cmdline", "ppid"])
        if process.info["cmdline"]
    ]
    return [name[0] for name in names if "EndlessSource->MapBatches(unchanged)" in name[0]]


def test_a_source_without_a_reader_pauses_and_ends_when_closed(ray_cluster, tmp_path):
    counter = tmp_path / "made"
    make = functools.partial(numbered, counter)
    ray_cluster.cloudpickle.register_pickle_by_value(__import__(__name__))
    blocks = stream_blocks(make, unchanged, 512 << 10, "bounded")
    taken = next(blocks)["number"].to_pylist()
    # Without a bound the source makes over ten thousand rows per second.
    before, made, deadline = -1, 0, time.monotonic() + 60
    while made != before and time.monotonic() < deadline:
        before = made
        time.sleep(1.0)
        made = int(counter.read_text())
    assert made == before and made < 50_000
    while len(taken) < 2 * made:
        taken += next(blocks)["number"].to_pylist()
    assert taken == list(range(len(taken)))
    blocks.close()
    while read_tasks() and time.monotonic() < deadline + 30:
        time.sleep(0.1)
    assert not read_tasks()


def of_sizes(sizes):
    for size in sizes:
        yield pa.table({"number": list(range(size)), "ids": [[1] * 16] * size})


def test_every_table_of_the_source_is_one_block(ray_cluster):
    """One row at low load, and many in one block when many are ready."""
    ray_cluster.cloudpickle.register_pickle_by_value(__import__(__name__))
    sizes = [1, 300, 1, 2, 4096, 1]
    blocks = stream_blocks(functools.partial(of_sizes, sizes), unchanged, 1 << 20, "sizes")
    assert [block.num_rows for block in blocks] == sizes


def waits_after_the_first(until):
    yield pa.table({"number": [0]})
    while not until.exists():
        time.sleep(0.01)
    yield pa.table({"number": [1]})


def test_a_block_does_not_wait_for_the_next(ray_cluster, tmp_path):
    ray_cluster.cloudpickle.register_pickle_by_value(__import__(__name__))
    until = tmp_path / "go on"
    source = functools.partial(waits_after_the_first, until)
    blocks = stream_blocks(source, unchanged, 1 << 20, "waits")
    assert next(blocks)["number"].to_pylist() == [0]
    until.touch()
    assert [block["number"].to_pylist() for block in blocks] == [[1]]


@pytest.mark.parametrize(
    ("tables", "pause_s", "least_s"),
    [
        pytest.param(200, 0.005, STEP_EVERY_S, id="busy"),
        pytest.param(2, 2.0, LONGEST_WAIT_S, id="quiet"),
    ],
)
def test_scheduling_steps_are_rare(ray_cluster, monkeypatch, tables, pause_s, least_s):
    """Blocks that come fast share a step, and a stream without blocks takes few."""

    def paused():
        for number in range(tables):
            yield pa.table({"number": [number]})
            time.sleep(pause_s)

    steps, original = [], EndlessExecution.on_execution_step
    monkeypatch.setattr(
        EndlessExecution,
        "on_execution_step",
        lambda *arguments: (steps.append(time.monotonic()), original(*arguments)),
    )
    blocks = stream_blocks(paused, unchanged, 64 << 20, "paused")
    found = [next(blocks)["number"].to_pylist()]
    steps.clear()
    found += [block["number"].to_pylist() for block in blocks]
    assert found == [[number] for number in range(tables)]
    assert len(steps) <= (steps[-1] - steps[0]) / least_s + 4


def test_two_streams_created_at_once_keep_their_limits(ray_cluster, monkeypatch):
    read_datasource = ray.data.read_datasource
    both, limits = threading.Barrier(2), {}

    def slowly(*arguments, **options):
        # Long enough for the other thread to replace the context, if it could.
        time.sleep(0.5)
        context = ray.data.DataContext.get_current()
        resources = context.execution_options.resource_limits
        limits[threading.current_thread().name] = resources.object_store_memory
        return read_datasource(*arguments, **options)

    monkeypatch.setattr(ray.data, "read_datasource", slowly)

    def consume(memory_bytes):
        both.wait()
        assert list(stream_blocks(functools.partial(of_sizes, [1]), unchanged, memory_bytes, "of"))

    ray_cluster.cloudpickle.register_pickle_by_value(__import__(__name__))
    threads = [
        threading.Thread(target=consume, args=(size,), name=str(size))
        for size in (1 << 20, 2 << 20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert limits == {"1048576": 1 << 20, "2097152": 2 << 20}


def marked():
    for text in ("1", None, '{"a":null}'):
        yield pa.Table.from_arrays(
            [pa.array([text], pa.string()), pa.array([1])],
            schema=pa.schema([json_field("value"), pa.field("number", pa.int64())]),
        )


def test_a_column_of_json_text_keeps_its_mark_in_the_stream(ray_cluster):
    """Without the mark, `groups/*.parquet` could not distinguish JSON text from plain text."""
    ray_cluster.cloudpickle.register_pickle_by_value(__import__(__name__))
    blocks = list(stream_blocks(marked, unchanged, 1 << 20, "marked"))
    assert [row for block in blocks for row in row_values(block)] == [
        {"value": value, "number": 1} for value in (1, None, {"a": None})
    ]
