"""Compares packing with TRL's, in one process, on 1,000,000 rows of lognormal length (median 64, at
most 768, seeded).

    python -m benchmarks.packing

Both pack the same table of token lists: one window of all rows, with ids gathered into packed rows.
A second figure shows asyncrl's packing on the lengths alone. TRL's `bfd` is called on the whole
table; `pack_dataset` would call it for every 1,000 rows and pack them worse.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from asyncrl.learning import pack_blocks, pack_rows

ROWS, MEDIAN, SIGMA, LONGEST, SEED = 1_000_000, 64, 0.8, 768, 0
CAPACITIES, REPEATS = (4096, 8192), 3
MOST_FILL_LOST = 0.001
"""As a share of the capacity: a tenth of a point."""


def main() -> int:
    """Measure and print. The exit code is 0 if ours is at least as fast, with a fill within a tenth
    of a point."""
    try:
        from trl.data_utils import _pack_bfd
    except ImportError as error:
        print(
            f"bench: TRL cannot be imported ({error}); install it with: pip install"
            " 'asyncrl[bench]'",
            file=sys.stderr,
        )
        return 2
    lengths = seeded_lengths(ROWS)
    table = pa.table(
        {
            "input_ids": pa.ListArray.from_arrays(
                np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
                np.zeros(lengths.sum(), np.int32),
            )
        }
    )
    print(
        f"{ROWS:,} rows, {lengths.sum():,} tokens, lognormal: median {np.median(lengths):g},"
        f" largest {lengths.max()}, seed {SEED}"
    )
    print(
        f"{'capacity':>8} {'ours':>9} {'TRL':>9} {'TRL/ours':>9} {'lengths alone':>14}"
        f" {'fill ours':>10} {'fill TRL':>9}   best of {REPEATS}, alternating"
    )
    missed = [
        capacity for capacity in CAPACITIES if not compare(lengths, table, capacity, _pack_bfd)
    ]
    print(
        f"bar missed at {missed}" if missed else "bar met: at least as fast, fill within 0.1 point"
    )
    return 1 if missed else 0


def seeded_lengths(rows: int) -> np.ndarray:
    """Lognormal row lengths, [rows] int64."""
    return np.clip(
        np.random.default_rng(SEED).lognormal(np.log(MEDIAN), SIGMA, rows), 1, LONGEST
    ).astype(np.int64)


def compare(
    lengths: np.ndarray, table: pa.Table, capacity: int, pack_bfd: Callable[..., pa.Table]
) -> bool:
    """Print one line of the table, and return whether the bar is met."""
    ways: dict[str, Callable[[], Any]] = {
        "ours": lambda: fill_of(
            next(pack_blocks([table], capacity, "bfd", ["input_ids"], len(lengths))), capacity
        ),
        "trl": lambda: fill_of(pack_bfd(table, capacity), capacity),
        "lengths": lambda: pack_rows(lengths, capacity).row.size,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    results = {}
    for _ in range(REPEATS):
        for name, way in ways.items():
            began = time.perf_counter()
            results[name] = way()
            seconds[name].append(time.perf_counter() - began)
    ours, trl, alone = (min(seconds[name]) for name in ways)
    fill, fill_trl = results["ours"], results["trl"]
    print(
        f"{capacity:>8} {ours:>8.2f}s {trl:>8.2f}s {trl / ours:>8.1f}x {alone:>13.2f}s"
        f" {fill:>10.2%} {fill_trl:>9.2%}"
    )
    return ours <= trl and fill >= fill_trl - MOST_FILL_LOST


def fill_of(packed: pa.Table, capacity: int) -> float:
    """Share of the packed rows' capacity that is filled with tokens, 0..1."""
    return len(packed["input_ids"].combine_chunks().flatten()) / (packed.num_rows * capacity)


if __name__ == "__main__":
    sys.exit(main())
