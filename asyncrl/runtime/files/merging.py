"""Merging the small files of a growing folder into few large ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

MERGE_EVERY = 64
"""Files merged into one."""
MERGED_BYTES = 64 << 20
"""A file of this many bytes is not merged again."""


class Merging:
    """Merges every 64 files into one, and every 64 of those again, up to about 64 MiB.

    The number of files stays small in a long run, and each row is rewritten only a few times. Not
    thread-safe.
    """

    def __init__(self, merge: Callable[[Sequence[Path]], None]) -> None:
        """
        Args:
            merge: merges files into one with the name of the last, and deletes the others.
        """
        self._merge = merge
        self._levels: list[list[Path]] = []

    def add(self, path: Path) -> None:
        """Register a complete file, and merge files where enough have come together."""
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
