"""Which trajectories share a micro-batch: best-fit decreasing under a hard token cap. Pure and deterministic, so every rank computes the same plan."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Packing", "pack"]


@dataclass(frozen=True, slots=True)
class Packing:
    """Micro-batches by rank: `micro_batches[rank][i]` holds indices of trajectories, longest first. All ranks have equally many; one may be empty."""

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    fill: float
    """Tokens placed / (micro-batches x cap), in 0..1."""


def pack(lengths: Sequence[int], max_tokens: int, world_size: int = 1) -> Packing:
    """Place every trajectory exactly once, at most `max_tokens` tokens in a micro-batch, equally many micro-batches for each rank.

    Best-fit decreasing gives the micro-batches; the fullest are then split in two until the ranks share them evenly. Round i of all ranks
    holds micro-batches of similar size, because ranks wait for one another in every forward.

    Raises:
        ValueError: a length is below 1 or above `max_tokens`.
    """
    for index, length in enumerate(lengths):
        if not 1 <= length <= max_tokens:
            raise ValueError(f"trajectory {index} has {length} tokens, not 1 to {max_tokens}; raise learner.max_tokens_per_gpu or shorten it")
    bins = _best_fit(lengths, max_tokens)
    while not bins or len(bins) % world_size:
        bins.append(_split_fullest(bins, lengths))
    bins.sort(key=lambda items: (-_tokens(items, lengths), items))
    micro_batches = tuple(tuple(tuple(bins[at]) for at in range(rank, len(bins), world_size)) for rank in range(world_size))
    return Packing(micro_batches, sum(lengths) / (len(bins) * max_tokens))


def _tokens(items: Sequence[int], lengths: Sequence[int]) -> int:
    return sum(lengths[item] for item in items)


def _best_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Longest first, each into the fullest bin that still has room; ties by index. O(n log n) through a sorted list of (room, bin)."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    for item in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        at = bisect_left(rooms, (lengths[item], -1))
        room, number = rooms.pop(at) if at < len(rooms) else (max_tokens, len(bins))
        if number == len(bins):
            bins.append([])
        bins[number].append(item)
        insort(rooms, (room - lengths[item], number))
    return bins


def _split_fullest(bins: list[list[int]], lengths: Sequence[int]) -> list[int]:
    """Take about half the tokens out of the fullest bin of two or more trajectories; nothing if there is none."""
    divisible = [items for items in bins if len(items) > 1]
    if not divisible:
        return []
    fullest = max(divisible, key=lambda items: (_tokens(items, lengths), len(items)))
    halves: tuple[list[int], list[int]] = ([], [])
    sizes = [0, 0]
    for item in fullest:
        half = int(sizes[1] < sizes[0])
        halves[half].append(item)
        sizes[half] += lengths[item]
    fullest[:] = halves[0]
    return halves[1]
