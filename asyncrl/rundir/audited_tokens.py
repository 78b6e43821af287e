"""The rows of `trained/*.parquet` as the audit needs them: sums over the tokens of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from asyncrl.contracts.rows import TRAINED_COLUMNS
from asyncrl.rundir.tokens import OF_TOKENS, RowKey, row_keys
from asyncrl.runtime.files import parquet

SUMMED = ("weights", "clipped", "masked")


@dataclass(frozen=True, slots=True)
class TrainedRow:
    """Sums over the loss tokens of a row."""

    tokens: int
    finite: bool
    """Whether all log-probs are finite."""
    sums: dict[str, float]
    """Column of SUMMED → its sum."""


def read_trained(path: Path) -> dict[RowKey, TrainedRow]:
    """Read the rows of one file.

    Raises:
        ValueError: a column is missing or has the wrong type, or lists differ in length.
        OSError, pa.ArrowException: the file cannot be read.
    """
    table = parquet.read_table(path)
    for name, kind in TRAINED_COLUMNS.items():
        if name not in table.column_names or not table.schema.field(name).type.equals(kind):
            raise ValueError(f"{path} is damaged: it has no column {name!r} of type {kind}")
    lists = {name: table[name].combine_chunks() for name in OF_TOKENS}
    lengths = [length or 0 for length in lists["logprobs"].value_lengths().to_pylist()]
    if any(one.null_count or one.value_lengths().to_pylist() != lengths for one in lists.values()):
        raise ValueError(f"{path} is damaged: a row has lists of different lengths")
    finite = _sums(lists["logprobs"], lengths, np.isfinite)
    sums = {name: _sums(lists[name], lengths) for name in SUMMED}
    return {
        key: TrainedRow(
            lengths[row],
            finite[row] == lengths[row],
            {name: float(values[row]) for name, values in sums.items()},
        )
        for row, key in enumerate(row_keys(table))
    }


def _sums(lists: pa.ListArray, lengths: list[int], of: np.ufunc | None = None) -> np.ndarray:
    """The sum of each list."""
    values = lists.flatten().to_numpy(zero_copy_only=False).astype(np.float64)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    return np.bincount(rows, values if of is None else of(values), minlength=len(lengths))
