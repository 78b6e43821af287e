"""The rows of `trained/*.parquet` as the audit needs them: sums over the tokens of each."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from asyncrl.rundir.tokens import RowKey, row_keys, trained_fault
from asyncrl.runtime.files import parquet

SUMMED = ("logprobs", "weights", "advantages", "clipped", "masked")


@dataclass(frozen=True, slots=True)
class TrainedRow:
    """What the audit needs of a row: sums over its loss tokens, and their bounds."""

    tokens: int
    first: int
    """Index of the first loss token among the trajectory's sampled tokens."""
    last: int
    ordered: bool
    """Whether the indices rise."""
    largest: float
    """Largest log-prob, in nats."""
    sums: tuple[float, ...]
    """Of SUMMED."""


def read_trained(path: Path) -> list[tuple[RowKey, TrainedRow]]:
    """Read the rows of one file.

    Raises:
        ValueError: a column is missing or has the wrong type, a value is missing, or lists differ
            in length.
        OSError, pa.ArrowException: the file cannot be read.
    """
    table = parquet.read_table(path)
    if fault := trained_fault(table):
        raise ValueError(f"{path} is damaged: {fault}")
    lists = {name: table[name].combine_chunks() for name in SUMMED}
    lengths = lists["logprobs"].value_lengths().to_pylist()
    sums = [_sums(lists[name], lengths) for name in SUMMED]
    positions = table["positions"].to_pylist()
    logprobs = table["logprobs"].to_pylist()
    found = []
    for row, key in enumerate(row_keys(table)):
        at = positions[row] or range(lengths[row])
        found.append(
            (
                key,
                TrainedRow(
                    lengths[row],
                    at[0] if at else 0,
                    at[-1] if at else -1,
                    all(before < after for before, after in pairwise(at)),
                    max(logprobs[row], default=0.0),
                    tuple(float(values[row]) for values in sums),
                ),
            )
        )
    return found


def _sums(lists: pa.ListArray, lengths: list[int]) -> np.ndarray:
    """The sum of each list."""
    values = lists.flatten().to_numpy(zero_copy_only=False).astype(np.float64)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    return np.bincount(rows, values, minlength=len(lengths))
