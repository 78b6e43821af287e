"""Sequence parallelism as in DeepSpeed Ulysses (arXiv:2309.14509): the ranks of a group split each
packed row by tokens, and its attention by heads.

All layers except attention process each token independently, so each rank computes its share of the
row. Around attention, an all-to-all turns [share of the tokens, all heads] into [all tokens, share
of the heads], and back. DeepSpeed's own exchange needs equal shares, so rows would need padding.
This one allows unequal shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx


@dataclass(frozen=True, slots=True)
class SequenceRanks:
    """This rank's group of `size` neighboring ranks that share a row. All methods except `shares`
    and `bounds` are collectives of the group."""

    process_group: dist.ProcessGroup
    rank: int
    """0 to size - 1, in the order of the shares."""
    size: int

    @classmethod
    def join(cls, size: int) -> SequenceRanks | None:
        """Split all ranks into groups of `size` (a collective of all ranks). Returns None for size
        1, where each rank has its own rows."""
        if size == 1:
            return None
        own, _ = dist.new_subgroups(group_size=size)
        return cls(own, dist.get_rank(own), size)

    def shares(self, tokens: int) -> list[int]:
        """Return the number of tokens of each rank, in order. They differ by at most 1."""
        return [tokens // self.size + (rank < tokens % self.size) for rank in range(self.size)]

    def bounds(self, tokens: int) -> tuple[int, int]:
        """Return the first token of this rank's share, and the first token after it."""
        shares = self.shares(tokens)
        start = sum(shares[: self.rank])
        return start, start + shares[self.rank]

    def to_heads(
        self, query: Tensor, key: Tensor, value: Tensor, tokens: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange [1, heads, share, D] each for [1, heads / size, tokens, D] each. Key and value
        heads are repeated if `size` does not divide their number.

        Raises:
            ValueError: `size` does not divide the number of query heads, or the tensors do not have
                this rank's share of `tokens`.
        """
        share = self.shares(tokens)[self.rank]
        if query.shape[1] % self.size:
            raise ValueError(
                f"learner.sequence_parallel_size = {self.size} does not divide the {query.shape[1]}"
                " attention heads of a layer; use a divisor"
            )
        if query.shape[2] != share:
            raise ValueError(
                f"rank {self.rank} of {self.size} has {query.shape[2]} tokens of a row of"
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
        """Exchange [1, tokens, heads / size, D] for [1, share, heads, D]."""
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

    def whole(self, mine: Sequence[Tensor], chosen: Tensor, total: int) -> list[Tensor]:
        """Combine the values [n] of each rank's loss tokens into the values [total] of the row, the
        same on every rank.

        The gradient flows only to this rank's own values, and needs no collective. Every rank
        computes the same loss from the same values. So each rank has the full gradient of its own
        tokens, and the sum over ranks counts each token once.

        Args:
            mine: tensors [n] of this rank's values.
            chosen: [n] int64, the indices of these loss tokens among those of the row.
            total: loss tokens of the row.
        """
        if not total:
            return list(mine)
        values = mine[0].new_zeros(len(mine), total)
        values[:, chosen] = torch.stack([own.detach() for own in mine])
        dist.all_reduce(values, group=self.process_group)
        return [row.index_copy(0, chosen, own) for row, own in zip(values, mine, strict=True)]


def _exchange(
    rows: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Apply `_Exchange`. `Function.apply` has no types."""
    received: Tensor = _Exchange.apply(rows, send, receive, group)  # type: ignore[no-untyped-call]
    return received


class _ExchangeContext(FunctionCtx):
    """What `_Exchange.forward` keeps for its backward pass."""

    way: tuple[list[int], list[int], dist.ProcessGroup]
    """Rows sent to each rank, rows received from each rank, and the ranks."""


class _Exchange(torch.autograd.Function):
    """All-to-all over the first dimension. The first `send[0]` rows go to rank 0, and so on. The
    first `receive[0]` rows of the result come from rank 0. The gradient is the reverse exchange."""

    @staticmethod
    def forward(
        ctx: _ExchangeContext,
        rows: Tensor,
        send: list[int],
        receive: list[int],
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.way = send, receive, group
        received = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), receive, send, group=group)
        return received

    @staticmethod
    def backward(ctx: _ExchangeContext, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        send, receive, group = ctx.way
        return _exchange(gradients[0], receive, send, group), None, None, None
