"""Few files in place of many, while they are still being written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["MERGED_BYTES", "Merging"]

MERGE_EVERY = 64
"""Files that become one."""
MERGED_BYTES = 64 << 20
"""A file of this size is not merged again."""


class Merging:
    """Merges every 64 files into one, and every 64 of those again, up to about 64 MiB: their number
    stays small however long a run is, and each row is written again a few times at most. One thread
    uses it."""

    def __init__(self, merge: Callable[[Sequence[Path]], None]) -> None:
        """
        Args:
            merge: makes one file of several, under the last one's name, and deletes the others.
        """
        self._merge = merge
        self._levels: list[list[Path]] = []

    def add(self, path: Path) -> None:
        """A complete file is there."""
        level = 0
        while True:
            if level == len(self._levels):
                self._levels.append([])
            files = self._levels[level]
            files.append(path)
            if (
                len(files) < MERGE_EVERY
                and sum(file.stat().st_size for file in files) < MERGED_BYTES
            ):
                return
            self._merge(files)
            path = files[-1]
            files.clear()
            if path.stat().st_size >= MERGED_BYTES:
                return
            level += 1
