"""Sequence parallelism after DeepSpeed Ulysses (arXiv:2309.14509): the ranks of a group share each
packed row by its tokens, and attend by heads.

Everything but attention looks at one token at a time, so each rank does it for its share of the
row. Around attention an all-to-all turns [share of the tokens, all heads] into [all tokens, share
of the heads], and back. DeepSpeed's own exchange wants equal shares, so rows would be padded; this
one takes any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["SequenceGroup"]


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """This rank among the `size` neighboring ranks that share a row. Every method but `shares` and
    `bounds` is a collective of the group."""

    process_group: Any
    rank: int
    """0 to size - 1, in the order of the shares."""
    size: int

    @classmethod
    def join(cls, size: int) -> SequenceGroup | None:
        """Cut the world into groups of `size` (a collective of all ranks). None for size 1, where
        nobody shares."""
        if size == 1:
            return None
        own, _ = dist.new_subgroups(group_size=size)
        return cls(own, dist.get_rank(own), size)

    def shares(self, tokens: int) -> list[int]:
        """Tokens of each rank, in order, as even as can be."""
        return [tokens // self.size + (rank < tokens % self.size) for rank in range(self.size)]

    def bounds(self, tokens: int) -> tuple[int, int]:
        """First token of this rank's share, and the first one after it."""
        shares = self.shares(tokens)
        start = sum(shares[: self.rank])
        return start, start + shares[self.rank]

    def to_heads(
        self, query: Tensor, key: Tensor, value: Tensor, tokens: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[1, heads, share, D] each → [1, heads / size, tokens, D] each, in one exchange. Key and
        value heads are repeated if the size does not divide them.

        Raises:
            ValueError: the size does not divide the query heads, or the tensors do not hold this
                rank's share of `tokens`.
        """
        share = self.shares(tokens)[self.rank]
        if query.shape[1] % self.size:
            raise ValueError(
                f"learner.sequence_parallel_size = {self.size} does not divide the {query.shape[1]}"
                " attention heads of a layer; use a divisor"
            )
        if query.shape[2] != share:
            raise ValueError(
                f"rank {self.rank} of {self.size} holds {query.shape[2]} tokens of a row of"
                f" {tokens}, not its share of {share}"
            )
        repeats = self.size // gcd(self.size, key.shape[1])
        if repeats > 1:
            key, value = (
                key.repeat_interleave(repeats, dim=1),
                value.repeat_interleave(repeats, dim=1),
            )
        by_rank = [
            tensor[0].transpose(0, 1).flatten(1).unflatten(-1, (self.size, -1))
            for tensor in (query, key, value)
        ]
        sent = torch.cat(by_rank, dim=-1).transpose(0, 1).flatten(0, 1)
        received = _exchange(sent, [share] * self.size, self.shares(tokens), self.process_group)
        parts = received.split([part.shape[-1] for part in by_rank], dim=-1)
        heads = [
            part.unflatten(-1, (-1, tensor.shape[3])).transpose(0, 1)[None]
            for part, tensor in zip(parts, (query, key, value), strict=True)
        ]
        return heads[0], heads[1], heads[2]

    def to_tokens(self, attended: Tensor) -> Tensor:
        """[1, tokens, heads / size, D] → [1, share, heads, D]."""
        tokens, heads, width = attended.shape[1:]
        share = self.shares(tokens)[self.rank]
        received = _exchange(
            attended[0].flatten(1), self.shares(tokens), [share] * self.size, self.process_group
        )
        whole: Tensor = (
            received.unflatten(0, (self.size, share))
            .transpose(0, 1)
            .reshape(1, share, self.size * heads, width)
        )
        return whole

    def whole(self, mine: Sequence[Tensor], first: int, total: int) -> list[Tensor]:
        """[n] values of this rank's loss tokens, each tensor's from place `first` on → [total]
        values of the row's, the same on every rank.

        The gradient goes to this rank's own values only, and no collective is needed for it: every
        rank computes the same loss from the same values, so its own tokens' part is whole already,
        and the sum over ranks counts each token once.
        """
        if not total:
            return list(mine)
        last = first + len(mine[0])
        values = mine[0].new_zeros(len(mine), total)
        values[:, first:last] = torch.stack([own.detach() for own in mine])
        dist.all_reduce(values, group=self.process_group)
        return [
            torch.cat([row[:first], own, row[last:]]) for row, own in zip(values, mine, strict=True)
        ]


def _exchange(rows: Tensor, send: Sequence[int], receive: Sequence[int], group: Any) -> Tensor:
    """`_Exchange`, which torch leaves untyped."""
    received: Tensor = _Exchange.apply(rows, send, receive, group)  # type: ignore[no-untyped-call]
    return received


class _Exchange(torch.autograd.Function):
    """All-to-all over the first dimension: the first `send[0]` rows go to rank 0, and so on;
    `receive[0]` rows from rank 0 come first. Its gradient is the exchange back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: Any) -> Tensor:
        ctx.way = send, receive, group
        received = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), receive, send, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        send, receive, group = ctx.way
        return _exchange(gradients[0], receive, send, group), None, None, None
