"""What the ranks do at the same time: micro-batches in rounds of similar cost. Pure and
deterministic, so that every rank computes the same plan.

ZeRO-3 gathers parameters in every forward, and there the ranks wait for one another: a round takes
as long as its costliest micro-batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import fsum

__all__ = ["balanced_rounds", "imbalance_of", "karmarkar_karp", "quadratic_cost"]

Part = tuple[float, list[int]]
"""Sum of costs, and the indices that make it."""


def quadratic_cost(layers: int, heads: int, head_dim: int, parameters: int) -> float:
    """What attention adds to the cost of a trajectory: l tokens cost l + quadratic_cost * l².

    A forward takes 2 * parameters FLOPs for each token, and causal attention 2 * layers * heads *
    head_dim * l more: scores and values take 2 * heads * head_dim for each token attended to, which
    is half of l on average. (Kaplan et al. 2020, arXiv 2001.08361, table 1.)
    """
    return layers * heads * head_dim / parameters


def balanced_rounds(
    bins: Sequence[list[int]],
    lengths: Sequence[int],
    costs: Sequence[float],
    max_tokens: int,
    world_size: int,
) -> list[list[list[int]]]:
    """Rounds of `world_size` micro-batches each: `rounds[i][rank]` holds indices, longest first.

    The costliest bins are split in two until the ranks share them evenly; where none can be split,
    empty ones stand in. Bins next to each other in cost make a round, whose trajectories are then
    dealt again by `karmarkar_karp`; that is kept if it respects the cap and makes the round's
    costliest micro-batch cheaper.

    Args:
        bins: indices of trajectories, each in one bin, at most `max_tokens` tokens in a bin.
        lengths: tokens of each trajectory.
        costs: of each trajectory, above 0.
    """
    by_cost = sorted(
        _multiple_of(world_size, bins, costs), key=lambda items: (-_sum(costs, items), items)
    )
    rounds = [by_cost[at : at + world_size] for at in range(0, len(by_cost), world_size)]
    if world_size > 1:
        rounds = [_leveled(group, lengths, costs, max_tokens) for group in rounds]
    return [
        [sorted(items, key=lambda item: (-lengths[item], item)) for items in group]
        for group in rounds
    ]


def imbalance_of(rounds: Sequence[Sequence[Sequence[int]]], costs: Sequence[float]) -> float:
    """Sum over rounds of the largest cost / sum over rounds of the mean cost - 1. 0 without any
    cost."""
    sums = [[_sum(costs, items) for items in group] for group in rounds]
    mean = fsum(fsum(group) / len(group) for group in sums)
    # Rounding may take equal sums a last bit below 1.
    return max(0.0, fsum(max(group) for group in sums) / mean - 1) if mean else 0.0


def karmarkar_karp(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Indices of the costs in so many parts of similar sums, by the largest differencing method;
    parts may be empty. Ties by index.

    Every number begins as a partition of its own, the other parts empty. Again and again the two
    partitions that differ most within themselves become one: the largest part of the one joins the
    smallest of the other, and so on. (Karmarkar and Karp 1982; for more than two parts, Michiels et
    al. 2003.)
    """
    # A partition lists only the parts that are not empty, largest first: most have one.
    heap: list[tuple[float, int, list[Part]]] = [
        (-cost, number, [(cost, [number])]) for number, cost in enumerate(costs)
    ]
    heapq.heapify(heap)
    for number in range(len(costs), 2 * len(costs) - 1):
        (_, _, left), (_, _, right) = heapq.heappop(heap), heapq.heappop(heap)
        joined = _joined(left, right, parts)
        smallest = joined[-1][0] if len(joined) == parts else 0.0
        heapq.heappush(heap, (smallest - joined[0][0], number, joined))
    found = [items for _, items in heap[0][2]] if heap else []
    return found + [[] for _ in range(parts - len(found))]


def _joined(left: list[Part], right: list[Part], parts: int) -> list[Part]:
    """One partition of two: the largest part of each goes with the smallest of the other, an empty
    one if there is any."""
    pairs = max(0, len(left) + len(right) - parts)
    alone = left[: len(left) - pairs] + right[: len(right) - pairs]
    both = zip(left[len(left) - pairs :], reversed(right[len(right) - pairs :]), strict=True)
    return sorted(
        alone + [(a + b, ones + others) for (a, ones), (b, others) in both],
        key=lambda part: -part[0],
    )


def _multiple_of(
    world_size: int, bins: Sequence[list[int]], costs: Sequence[float]
) -> list[list[int]]:
    """The bins, the costliest split in two until their number is a multiple of `world_size`, and
    above 0."""
    wanted = max(1, -(-len(bins) // world_size)) * world_size
    done = [items for items in bins if len(items) < 2]
    divisible = [(-_sum(costs, items), items) for items in bins if len(items) > 1]
    heapq.heapify(divisible)
    while divisible and len(done) + len(divisible) < wanted:
        _, items = heapq.heappop(divisible)
        for half in karmarkar_karp([costs[item] for item in items], 2):
            chosen = [items[at] for at in sorted(half)]
            if len(chosen) < 2:
                done.append(chosen)
            else:
                heapq.heappush(divisible, (-_sum(costs, chosen), chosen))
    whole = done + [items for _, items in divisible]
    return whole + [[] for _ in range(wanted - len(whole))]


def _leveled(
    group: list[list[int]], lengths: Sequence[int], costs: Sequence[float], max_tokens: int
) -> list[list[int]]:
    """The round's trajectories dealt again, if that lowers its largest cost within the cap.
    Otherwise the round is unchanged."""
    items = sorted(item for one in group for item in one)
    dealt = [
        [items[at] for at in part]
        for part in karmarkar_karp([costs[item] for item in items], len(group))
    ]
    fits = all(sum(lengths[item] for item in part) <= max_tokens for part in dealt)
    return (
        dealt
        if fits
        and max(_sum(costs, part) for part in dealt) < max(_sum(costs, part) for part in group)
        else group
    )


def _sum(costs: Sequence[float], items: Sequence[int]) -> float:
    """Correctly rounded, so that the order of the items does not matter."""
    return fsum(costs[item] for item in items)
