"""Balances micro-batches between ranks, in rounds of similar cost. Pure and deterministic, so that
every rank computes the same plan.

ZeRO-3 gathers parameters in every forward pass, where the ranks wait for one another. So a round
takes as long as its costliest micro-batch. ZeRO-1 waits only at the end of a step, which a balance
of rounds does not harm.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import fsum

Part = tuple[float, list[int]]
"""The sum of some costs, and their indices."""


def quadratic_cost(layers: int, heads: int, head_dim: int, parameters: int) -> float:
    """Return the cost of attention, relative to a token: a trajectory of l tokens costs
    l + quadratic_cost * l².

    A forward pass takes 2 * parameters FLOPs for each token. Causal attention adds
    2 * layers * heads * head_dim * l (Kaplan et al. 2020, arXiv:2001.08361, table 1). In each
    layer, scores and values each take 2 * heads * head_dim for every token attended to. A token
    attends to l / 2 tokens on average.
    """
    return layers * heads * head_dim / parameters


def balanced_rounds(
    bins: Sequence[list[int]],
    lengths: Sequence[int],
    costs: Sequence[float],
    max_tokens: int,
    world_size: int,
) -> list[list[list[int]]]:
    """Return rounds of `world_size` micro-batches each. `rounds[i][rank]` lists the indices of
    trajectories, longest first.

    The costliest bins are split in two until their number is a multiple of `world_size`. Empty bins
    are added if no bin can be split. Bins of similar cost form a round. `karmarkar_karp` then
    distributes the round's trajectories again. The result is used if it respects `max_tokens` and
    makes the round's costliest micro-batch cheaper.

    Args:
        bins: indices of trajectories, each in one bin, with at most `max_tokens` tokens in a bin.
        lengths: tokens of each trajectory.
        costs: cost of each trajectory, above 0.
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
    """Return (sum over rounds of the largest cost) / (sum over rounds of the mean cost) - 1. This
    is 0 if all costs are 0."""
    sums = [[_sum(costs, items) for items in group] for group in rounds]
    mean = fsum(fsum(group) / len(group) for group in sums)
    # Rounding may make the ratio of equal sums slightly smaller than 1.
    return max(0.0, fsum(max(group) for group in sums) / mean - 1) if mean else 0.0


def karmarkar_karp(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Split costs into `parts` parts of similar sums by the largest differencing method, and return
    the indices of each part. Parts may be empty. Ties are broken by index.

    Each cost starts as its own partition, with all other parts empty. Each step merges the two
    partitions with the largest difference between their largest and smallest parts. The largest
    part of one joins the smallest part of the other, and so on.

    Source: Karmarkar and Karp 1982; for more than two parts, Michiels et al. 2003.
    """
    # A partition lists only its non-empty parts, largest first. Most have one.
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
    """Merge two partitions: the largest part of each joins the smallest part of the other, which
    may be empty."""
    pairs = max(0, len(left) + len(right) - parts)
    alone = left[: len(left) - pairs] + right[: len(right) - pairs]
    both = zip(left[len(left) - pairs :], reversed(right[len(right) - pairs :]), strict=True)
    return sorted(
        alone + [(a + b, first + second) for (a, first), (b, second) in both],
        key=lambda part: -part[0],
    )


def _multiple_of(
    world_size: int, bins: Sequence[list[int]], costs: Sequence[float]
) -> list[list[int]]:
    """Split the costliest bins in two until their number is a positive multiple of
    `world_size`."""
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
    """Distribute the round's trajectories again, if that lowers its largest cost and respects
    `max_tokens`. Otherwise return the round unchanged."""
    items = sorted(item for micro_batch in group for item in micro_batch)
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
    # fsum rounds correctly, so that the order of the items does not matter.
    return fsum(costs[item] for item in items)
