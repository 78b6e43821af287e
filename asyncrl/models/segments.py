"""The segments of a packed row, and the attention calls that they need.

A segment's tokens attend to the segments that it continues, and to those before them in their own
segment. Segments are joined into blocks, and equal blocks into runs. A run needs one attention
call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from asyncrl.models.forest import ROOT

CALL = 8192
"""The scores that an attention call could compute in the time that its start takes."""

BLOCK = 512
"""Most queries in a call with a mask. A mask has at most this many rows."""


@dataclass(frozen=True, slots=True)
class Run:
    """`count` neighboring blocks of `size` tokens. All continue the same segments."""

    size: int
    count: int
    path: tuple[int, ...] = ()
    """The runs of the segments that the blocks continue, in order. Each has one block."""
    past: int = 0
    """Tokens of `path`."""
    shapes: tuple[Shape, ...] | None = None
    """The segments in each block. None: each block is one segment."""
    masks: dict[tuple[torch.device, torch.dtype, int | None, int], Tensor] = field(
        default_factory=dict, compare=False
    )
    """The masks that were needed. All layers use the same ones."""

    @property
    def tokens(self) -> int:
        return self.size * self.count

    def mask(self, query: Tensor, window: int | None) -> Tensor:
        """Return what is added to the scores of a block: 0 for the tokens that a token attends to,
        else -inf. It has the device and dtype of `query`.

        Args:
            window: the tokens that a sliding window contains.

        Returns:
            [size, past + size], or [count, 1, size, past + size] if the blocks differ.
        """
        return self._kept(query, window, 0, lambda: self._whole_mask(window))

    def part_of_mask(self, query: Tensor, window: int | None, start: int, first: int) -> Tensor:
        """Return the same for BLOCK tokens of a block that is one segment.

        Args:
            start: the first of these tokens in the block.
            first: the first token to attend to, of `past` and the block.

        Returns:
            [tokens, past + start + tokens - first]
        """

        def made() -> np.ndarray:
            end = min(start + BLOCK, self.size)
            attending = np.arange(self.past + start, self.past + end)
            distance = attending[:, None] - np.arange(first, self.past + end)
            return (distance >= 0) & (distance < (window or self.past + end))

        return self._kept(query, window, start, made)

    def _kept(
        self, query: Tensor, window: int | None, start: int, made: Callable[[], np.ndarray]
    ) -> Tensor:
        """A mask that is made once. SDPA keeps it for the backward pass, and would keep a copy for
        each layer if it had to convert it."""
        key = query.device, query.dtype, window, start
        if key not in self.masks:
            seen = torch.from_numpy(made())
            added = torch.zeros(seen.shape, dtype=query.dtype).masked_fill_(~seen, float("-inf"))
            self.masks[key] = added.to(query.device)
        return self.masks[key]

    def _whole_mask(self, window: int | None) -> np.ndarray:
        shapes = self.shapes or (((self.size, ROOT),),)
        different = shapes if len(set(shapes)) > 1 else shapes[:1]
        found = [_block_mask(shape, self.past, window) for shape in different]
        return np.stack(found)[:, None] if len(found) > 1 else found[0]


Shape = tuple[tuple[int, int], ...]
"""(tokens, parent) of each segment of a block. The parent is an index in the block, or ROOT."""


@dataclass(frozen=True, slots=True)
class Segments:
    """The S segments of one packed row of T tokens, in order. Neighbors of equal length share one
    attention call, so sort them by length."""

    lengths: tuple[int, ...]
    """[S] tokens."""
    parents: tuple[int, ...]
    """[S] the segment that each one continues, or ROOT. See `forest.Forest`."""
    runs: tuple[Run, ...]
    """They contain the whole row, in order."""
    cu_seqlens: Tensor
    """[S + 1] int32: the start of each segment, and T, on the device of the row."""
    attended: list[int] = field(default_factory=list, compare=False)
    """The `id` of each attention module that has used these segments. After a forward pass, the
    caller checks that no module bypassed them."""
    _keys: list[tuple[Tensor, Tensor, int]] = field(default_factory=list, compare=False)
    """The result of `keys`, once it was needed."""

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        device: torch.device | str,
        parents: Sequence[int] | None = None,
    ) -> Segments:
        """Make segments of these lengths, in tokens. Without `parents`, none continues another."""
        chosen = tuple(parents) if parents is not None else (ROOT,) * len(lengths)
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return cls(tuple(lengths), chosen, runs_of(lengths, chosen), ends.to(device))

    @property
    def tokens(self) -> int:
        """T."""
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest trajectory."""
        ends = list[int]()
        for length, parent in zip(self.lengths, self.parents, strict=True):
            ends.append(length + (ends[parent] if parent != ROOT else 0))
        return max(ends)

    @property
    def shared(self) -> bool:
        """Whether a segment continues another one."""
        return any(parent != ROOT for parent in self.parents)

    def with_padding(self, tokens: int) -> Segments:
        """Add a segment that continues no other."""
        device = self.cu_seqlens.device
        return Segments.of([*self.lengths, tokens], device, [*self.parents, ROOT])

    def keys(self) -> tuple[Tensor, Tensor, int]:
        """Return the keys of each segment, for a kernel that takes their lengths.

        Returns:
            Where in the row the tokens are that each segment attends to, in order, int64 [K]. The
            start of each segment's part, and K: int32 [S + 1]. The longest part.
        """
        if not self._keys:
            starts = np.concatenate([[0], np.cumsum(self.lengths)])
            parts = list[np.ndarray]()
            for segment, parent in enumerate(self.parents):
                own = np.arange(starts[segment], starts[segment + 1])
                parts.append(own if parent == ROOT else np.concatenate([parts[parent], own]))
            lengths = [len(part) for part in parts]
            ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            device = self.cu_seqlens.device
            positions = torch.from_numpy(np.concatenate(parts)).to(device)
            self._keys.append((positions, ends.to(device), max(lengths)))
        return self._keys[0]


def runs_of(lengths: Sequence[int], parents: Sequence[int]) -> tuple[Run, ...]:
    """Choose the attention calls of a row whose segments have these lengths and parents.

    A block is either one segment, or a segment with everything that continues it. The latter
    computes scores that its mask drops, but takes one call. The cheaper of the two is chosen.
    """
    if all(parent == ROOT for parent in parents):
        return tuple(Run(length, len(list(same))) for length, same in groupby(lengths))
    return _Planner(lengths, parents).runs()


class _Planner:
    """Chooses the blocks of a row with parents."""

    def __init__(self, lengths: Sequence[int], parents: Sequence[int]) -> None:
        self.lengths, self.parents = lengths, parents
        count = len(lengths)
        self.ends = list(range(1, count + 1))
        """The segment after the last one that continues each."""
        self.sizes = list(lengths)
        """Tokens of each segment and of all that continue it."""
        self.past = [0] * count
        self.children: list[list[int]] = [[] for _ in range(count)]
        self.roots = [segment for segment in range(count) if parents[segment] == ROOT]
        for segment, parent in enumerate(parents):
            if parent != ROOT:
                self.children[parent].append(segment)
                self.past[segment] = self.past[parent] + lengths[parent]
        for segment in reversed(range(count)):
            if parents[segment] != ROOT:
                self.ends[parents[segment]] = max(self.ends[parents[segment]], self.ends[segment])
                self.sizes[parents[segment]] += self.sizes[segment]
        self.whole = [False] * count
        """Whether each segment forms a block with all that continue it."""
        self._choose()

    def _choose(self) -> None:
        costs = [0] * len(self.lengths)
        for segment in reversed(range(len(self.lengths))):
            size, own, past = self.sizes[segment], self.lengths[segment], self.past[segment]
            children = self.children[segment]
            different = len({self.sizes[child] for child in children})
            # A causal call without `past` computes half of the scores.
            alone = own * (past + own) if past else own * own // 2
            apart = alone + sum(costs[child] for child in children) + CALL * different
            together = size * (past + size) if children else alone
            self.whole[segment] = not children or (size <= BLOCK and together <= apart)
            costs[segment] = together if self.whole[segment] else apart

    def runs(self) -> tuple[Run, ...]:
        found = list[Run]()
        top: tuple[int, ...] = ()
        waiting = [(members, top) for members in self._alike(self.roots)]
        while waiting:
            members, path = waiting.pop()
            first, past = members[0], self.past[members[0]]
            if self.whole[first]:
                shapes = tuple(self._shape(segment) for segment in members)
                single = all(len(shape) == 1 for shape in shapes)
                size = self.sizes[first]
                found.append(Run(size, len(members), path, past, None if single else shapes))
            else:
                found.append(Run(self.lengths[first], 1, path, past))
                below = (*path, len(found) - 1)
                waiting += [(group, below) for group in self._alike(self.children[first])]
        return tuple(found)

    def _alike(self, siblings: Sequence[int]) -> list[list[int]]:
        """Group neighbors that form blocks of one size, from the last to the first. A segment that
        forms no block with what continues it is alone."""
        groups = list[list[int]]()
        for segment in siblings:
            last = groups[-1][-1] if groups else None
            if (
                last is not None
                and self.whole[segment]
                and self.whole[last]
                and self.sizes[segment] == self.sizes[last]
            ):
                groups[-1].append(segment)
            else:
                groups.append([segment])
        return groups[::-1]

    def _shape(self, segment: int) -> Shape:
        inside = range(segment, self.ends[segment])
        return tuple(
            (self.lengths[one], ROOT if one == segment else self.parents[one] - segment)
            for one in inside
        )


def _block_mask(shape: Shape, past: int, window: int | None) -> np.ndarray:
    """[size, past + size] bool: see `Run.mask`."""
    size = sum(tokens for tokens, _ in shape)
    mask = np.zeros((size, past + size), dtype=bool)
    mask[:, :past] = True
    depths = np.concatenate([np.arange(past), np.zeros(size, dtype=np.int64)])
    ends, start = list[int](), 0
    for tokens, parent in shape:
        end, before = start + tokens, past
        if parent != ROOT:
            last = ends[parent] - 1
            mask[start:end] = mask[last]
            before = int(depths[past + last]) + 1
        own = slice(past + start, past + end)
        mask[start:end, own] = np.tri(tokens, dtype=bool)
        depths[own] = np.arange(before, before + tokens)
        ends.append(end)
        start = end
    if window is not None:
        mask &= depths[past:, None] - depths[None, :] < window
    return mask
