"""Which row an ordinal means: one seeded permutation per epoch, or a weighted mixture. Pure.

In a mixture, each epoch has a fixed number of prompts from each source, in an order permuted by
(seed, epoch). Each source is read row by row, again and again, in its own permutations. So an
ordinal always means the same row, in every attempt.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

LEAST_EPOCH = 1000
"""Minimum prompts in a mixture's epoch. It keeps the shares of small sources accurate to 0.1%."""


@functools.lru_cache(maxsize=64)
def _permutation(rows: int, *seed: int) -> np.ndarray:
    return np.random.default_rng(list(seed)).permutation(rows).astype(np.int32)


def ordinal_to_row(ordinal: int, rows: int, seed: int, shuffle: bool = True) -> tuple[int, int]:
    """(Epoch, row index) of an ordinal, for a dataset of `rows` rows."""
    epoch, position = divmod(ordinal, rows)
    return epoch, int(_permutation(rows, seed, epoch)[position]) if shuffle else position


@dataclass(frozen=True)
class Order:
    """The order of a run's prompts."""

    rows: tuple[int, ...]
    """Rows of each source."""
    weights: tuple[float, ...] | None
    """Weight of each source. None: every row of every source once per epoch."""
    seed: int
    shuffle: bool = True

    @property
    def epoch(self) -> int:
        """Prompts per epoch."""
        return sum(self.rows) if self.weights is None else max(sum(self.rows), LEAST_EPOCH)

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """Prompts from each source per epoch, rounded by weight, and at least one."""
        if self.weights is None:
            return self.rows
        exact = np.array(self.weights) / sum(self.weights) * self.epoch
        counts = np.maximum(1, np.floor(exact)).astype(int)
        order = np.argsort(counts - exact, kind="stable")
        for source in order[: max(0, self.epoch - int(counts.sum()))]:
            counts[source] += 1
        counts[int(counts.argmax())] += self.epoch - int(counts.sum())
        return tuple(int(count) for count in counts)

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of each source among the prompts."""
        return tuple(count / self.epoch for count in self.counts)

    def epoch_and_row(self, ordinal: int) -> tuple[int, int]:
        """(Epoch, row) of an ordinal. Row numbers continue from one source to the next."""
        if self.weights is None:
            return ordinal_to_row(ordinal, sum(self.rows), self.seed, self.shuffle)
        epoch, position = divmod(ordinal, self.epoch)
        sources, drawn = _epoch_slots(self.counts, self.seed, epoch if self.shuffle else None)
        source = int(sources[position])
        before = epoch * self.counts[source] + int(drawn[position])
        round_, row = divmod(before, self.rows[source])
        if self.shuffle:
            row = int(_permutation(self.rows[source], self.seed, source, round_, 1)[row])
        return epoch, sum(self.rows[:source]) + row


@functools.lru_cache(maxsize=4)
def _epoch_slots(
    counts: tuple[int, ...], seed: int, epoch: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """The source at each position of an epoch, and how many prompts of that source come before it.

    `epoch` None: sources stay in file order, spread as evenly as possible.
    """
    sources = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    if epoch is None:
        positions = [(np.arange(count) + 0.5) / count for count in counts]
        sources = sources[np.argsort(np.concatenate(positions), kind="stable")]
    else:
        sources = sources[_permutation(len(sources), seed, epoch)]
    drawn = np.empty(len(sources), np.int64)
    for source, count in enumerate(counts):
        drawn[sources == source] = np.arange(count)
    return sources, drawn
