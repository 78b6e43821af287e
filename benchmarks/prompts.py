"""Compares two ways to cut a block of the prompt stream out of a dataset: only its rows, and
`Table.take`, which copies the table.

    python -m benchmarks.prompts [MiB of the dataset, default 290]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from asyncrl.data import ROWS_PER_BLOCK, RowsByNumber

ROW_BYTES = 2048
CHUNK_ROWS = 8192
REPEATS = 15


def dataset(mebibytes: int) -> pa.Table:
    """Rows of 2 KiB of text in chunks, as the readers return them."""
    rows = (mebibytes << 20) // ROW_BYTES
    chunks = [
        pa.table(
            {
                "prompt": ["x" * ROW_BYTES] * min(CHUNK_ROWS, rows - start),
                "answer": ["1"] * min(CHUNK_ROWS, rows - start),
            }
        )
        for start in range(0, rows, CHUNK_ROWS)
    ]
    return pa.concat_tables(chunks)


def seconds(cut: Callable[[list[int]], pa.Table], rows: int) -> float:
    """Median seconds to cut a block of random rows."""
    generator, taken = np.random.default_rng(0), []
    for _ in range(REPEATS):
        wanted = generator.integers(0, rows, ROWS_PER_BLOCK).tolist()
        started = time.perf_counter()
        block = cut(wanted)
        taken.append(time.perf_counter() - started)
        assert block.num_rows == ROWS_PER_BLOCK
    return statistics.median(taken)


def main() -> None:
    table = dataset(int(sys.argv[1]) if len(sys.argv) > 1 else 290)
    rows = RowsByNumber(table)
    whole = seconds(table.take, table.num_rows)
    alone = seconds(
        lambda wanted: rows.table([rows.row(number) for number in wanted]), table.num_rows
    )
    print(
        f"{table.nbytes >> 20} MiB, {ROWS_PER_BLOCK} rows a block: Table.take {whole * 1e3:.2f} ms,"
        f" rows alone {alone * 1e3:.3f} ms, ratio {whole / alone:.0f}"
    )


if __name__ == "__main__":
    main()
