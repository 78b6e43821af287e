"""Keeps the batches of skipped steps and of gradient-norm spikes for inspection, as Parquet in
`<run>/kept/`."""

from __future__ import annotations

import re
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa

from asyncrl.contracts.errors import EscapesDirectoryError
from asyncrl.runtime.files import parquet
from asyncrl.runtime.files.opening import make_directory

KEPT = 32
"""Batches that a run keeps for each reason. Further ones are only reported. A run that spikes at
every step then does not fill the disk, and the batch that ends the run can still be kept."""

WINDOW, LEAST = 32, 8
"""Number of steps that a gradient norm is compared with, and the minimum number of them."""


class NormWatch:
    """The gradient norms of the last applied steps."""

    def __init__(self, known: Sequence[float] = ()) -> None:
        self._norms: deque[float] = deque(known, maxlen=WINDOW)

    @property
    def known(self) -> list[float]:
        """The remembered norms, oldest first."""
        return list(self._norms)

    def ratio(self, norm: float) -> float:
        """The ratio of `norm` to the median of the last norms; 1.0 while fewer than eight are
        known. Remembers `norm`."""
        median = statistics.median(self._norms) if len(self._norms) >= LEAST else norm
        self._norms.append(norm)
        return norm / median if median > 0 else 1.0

    def forget(self) -> None:
        """Forget all norms. Called for a new optimizer, whose norms have another scale."""
        self._norms.clear()


def culprit(count: int, bad: Callable[[Sequence[int]], bool]) -> int | None:
    """Find by bisection a trajectory, out of `count`, for which `bad([index])` is true. It takes
    about log2(count) calls, over `count` trajectories in total.

    None if neither half of a bad set is bad alone: several trajectories together cause it.
    """
    suspects: Sequence[int] = range(count)
    while len(suspects) > 1:
        first, second = suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]
        suspects = first if bad(first) else second
    return suspects[0] if suspects and bad(suspects) else None


def keep_batch(directory: Path, moment: str, reason: str, tables: Sequence[pa.Table]) -> str:
    """Write the rows of a batch as `<moment>_<reason>.parquet`. Returns a message with the path, or
    with the reason why the batch was not kept. A full disk or a table that cannot be written does
    not raise: a diagnosis must not end a run.

    Args:
        moment: the step of the batch, such as `version_000123`: the policy version at its start. A
            number distinguishes batches of the same moment and reason.
    """
    try:
        path = _write(directory, moment, reason, tables)
    except (OSError, EscapesDirectoryError, pa.ArrowException) as error:
        return f"its batch could not be kept in {directory}: {' '.join(str(error).split())}"
    return (
        f"its batch is {path}"
        if path
        else f"its batch was not kept: {KEPT} such batches exist already"
    )


def _write(directory: Path, moment: str, reason: str, tables: Sequence[pa.Table]) -> Path | None:
    make_directory(directory)
    there = {path.name for path in directory.glob("*.parquet")}
    if sum(re.search(rf"_{reason}(_\d+)?\.parquet$", name) is not None for name in there) >= KEPT:
        return None
    stem = f"{moment}_{reason}"
    names = (f"{stem}{f'_{number}' if number else ''}.parquet" for number in range(KEPT + 1))
    path = directory / next(name for name in names if name not in there)
    parquet.write_table(pa.concat_tables(tables, promote_options="permissive"), path)
    return path
