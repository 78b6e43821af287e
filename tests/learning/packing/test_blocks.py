"""Packing of Arrow tables. Every token is packed once, with its mask, for tables of any size."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from asyncrl.learning.packing.blocks import pack_blocks
from asyncrl.learning.packing.strategies import Strategy

STRATEGIES: list[Strategy] = ["bfd", "bfd_split", "wrapped"]


def rows_of(lengths: list[int]) -> pa.Table:
    """Make a table with distinct ids, a mask of even ids, and a column that is not per token."""
    ends = np.cumsum([0, *lengths])
    ids = [list(range(at, to)) for at, to in pairwise(ends.tolist())]
    return pa.table(
        {
            "text": [str(row) for row in ids],
            "input_ids": pa.array(ids, pa.list_(pa.int32())),
            "loss_mask": pa.array(
                [[token % 2 for token in row] for row in ids], pa.list_(pa.int8())
            ),
        }
    )


def cut_at(table: pa.Table, cuts: list[int]) -> Iterator[pa.Table]:
    """Split the table into blocks. They are slices, which share its memory."""
    yield from (table.slice(at, to - at) for at, to in pairwise([0, *sorted(cuts), table.num_rows]))


def content(tables: Iterator[pa.Table]) -> bytes:
    sink = pa.BufferOutputStream()
    for table in tables:
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    return sink.getvalue().to_pybytes()


CASES = st.lists(st.integers(1, 12), min_size=1, max_size=40).flatmap(
    lambda lengths: st.tuples(
        st.just(lengths),
        st.lists(st.integers(0, len(lengths)), max_size=6),
        st.integers(12, 30),
        st.integers(1, 15),
    )
)


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(deadline=None, derandomize=True)
@given(CASES)
def test_every_token_once_with_its_mask_however_the_rows_are_cut(
    strategy: Strategy, case: tuple[list[int], list[int], int, int]
) -> None:
    lengths, cuts, capacity, window = case
    capacity = capacity if strategy == "bfd" else capacity // 3
    table = rows_of(lengths)
    whole = list(pack_blocks([table], capacity, strategy, window=window))
    assert content(iter(whole)) == content(
        pack_blocks(cut_at(table, cuts), capacity, strategy, window=window)
    )
    rows = [row for packed in whole for row in packed.to_pylist()]
    assert set(rows[0]) == {"input_ids", "loss_mask", "seq_lengths"}
    assert sorted(token for row in rows for token in row["input_ids"]) == list(range(sum(lengths)))
    starts = np.cumsum([0, *lengths])
    for row in rows:
        assert len(row["input_ids"]) == len(row["loss_mask"]) == sum(row["seq_lengths"]) <= capacity
        assert row["loss_mask"] == [token % 2 for token in row["input_ids"]]
        for at, to in pairwise(np.cumsum([0, *row["seq_lengths"]])):
            segment = row["input_ids"][at:to]
            assert segment == list(range(segment[0], segment[0] + to - at)), (
                "a segment is a piece of one row, in order"
            )
            assert np.searchsorted(starts, segment[0], "right") == np.searchsorted(
                starts, segment[-1], "right"
            )
    if strategy == "wrapped":
        assert [token for row in rows for token in row["input_ids"]] == list(range(sum(lengths)))
        assert all(len(row["input_ids"]) == capacity for row in rows[:-1]), (
            "no room is left at the end of a block or a window"
        )


def test_rows_of_different_blocks_share_a_packed_row() -> None:
    blocks = [rows_of([3]), rows_of([2])]
    (packed,) = pack_blocks(blocks, 5)
    assert packed["seq_lengths"].to_pylist() == [[3, 2]] and packed.schema.field(
        "loss_mask"
    ).type == pa.list_(pa.int8())


def test_only_one_window_of_rows_is_in_memory() -> None:
    """The stream is endless. A packed table must arrive after each window of rows, before the next
    block is read."""
    blocks_read = 0

    def blocks() -> Iterator[pa.Table]:
        nonlocal blocks_read
        while True:
            blocks_read += 1
            yield rows_of([4, 1, 3])

    for strategy in STRATEGIES:
        blocks_read = 0
        stream = pack_blocks(blocks(), 8, strategy, window=6)
        next(stream), next(stream)
        assert blocks_read == 4


@pytest.mark.parametrize("kind", [pa.large_list(pa.int64()), pa.list_(pa.int64(), 2)])
def test_other_list_types_and_booleans(kind: pa.DataType) -> None:
    table = pa.table(
        {
            "ids": pa.array([[1, 2], [3, 4], [5, 6]], kind),
            "flag": [[True, False], [False, False], [True, True]],
        }
    ).slice(1)
    (packed,) = pack_blocks([table], 4, columns=["ids", "flag"])
    assert packed.to_pylist() == [
        {"ids": [3, 4, 5, 6], "flag": [False, False, True, True], "seq_lengths": [2, 2]}
    ]


def test_no_rows_give_nothing() -> None:
    assert (
        list(pack_blocks([], 8)) == []
        and list(pack_blocks([rows_of([3]).slice(1)], 8, "wrapped")) == []
    )


EVERYTHING = """
import hashlib
import numpy as np, pyarrow as pa
from asyncrl.learning.packing.blocks import pack_blocks
from asyncrl.learning.packing.strategies import pack, pack_rows
lengths = np.random.default_rng(5).integers(1, 700, 3000)
ids = pa.array([[row] * length for row, length in enumerate(lengths.tolist())])
table = pa.table({"input_ids": ids, "loss_mask": ids})
digest = hashlib.sha256(repr(pack(lengths[:300].tolist(), 700, 3, 1e-4)).encode())
for strategy in ("bfd_split", "wrapped"):
    pieces = pack_rows(lengths, 512, strategy)
    for part in (pieces.row, pieces.start, pieces.end, pieces.offsets):
        digest.update(part.tobytes())
    for packed in pack_blocks([table.slice(0, 7), table.slice(7)], 512, strategy, window=1000):
        for column in packed.columns:
            for buffer in column.combine_chunks().buffers():
                digest.update(buffer or b"")
print(digest.hexdigest())
"""


def test_byte_for_byte_in_two_processes() -> None:
    path = ":".join(sys.path)
    found = {
        subprocess.run(
            [sys.executable, "-c", EVERYTHING],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("0", "77")
    }
    assert len(found) == 1 and len(found.pop()) == 65


def test_errors_name_a_row_by_its_index_in_the_stream() -> None:
    blocks = [rows_of([3, 2, 4]), rows_of([2, 9])]
    with pytest.raises(ValueError, match="row 4 has 9 tokens, above the capacity of 8"):
        list(pack_blocks(blocks, 8, window=2))
    empty = pa.table({"input_ids": [[1], [2], None], "loss_mask": [[1], [1], None]})
    for strategy in STRATEGIES:
        with pytest.raises(ValueError, match="row 2 has 0 tokens"):
            list(pack_blocks([empty], 8, strategy, window=2))
    with pytest.raises(ValueError, match="row 1 has 1 items of 'loss_mask' and 2 of 'input_ids'"):
        list(pack_blocks([pa.table({"input_ids": [[1], [2, 3]], "loss_mask": [[1], [1]]})], 8))
    with pytest.raises(
        ValueError, match=r"columns \['loss_mask'\] are not in the block, which has \['input_ids'\]"
    ):
        list(pack_blocks([pa.table({"input_ids": [[1]]})], 8))
    with pytest.raises(ValueError, match="a window of 0 rows"):
        list(pack_blocks([], 8, window=0))
