"""The tensors of one micro-batch: packed rows, no padding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from asyncrl.algorithms.objective import PolicyTokens
from asyncrl.models.attention import Segments

__all__ = [
    "Example",
    "MicroBatch",
    "TokenRow",
    "micro_batch",
    "plain_example",
    "token_example",
]

TokenRow = tuple[Sequence[int], Sequence[int]]
"""Prompt ids and the ids that follow them."""


@dataclass(frozen=True, slots=True)
class Example:
    """What the learner needs of one trajectory: P prompt tokens and C completion tokens."""

    tokens: np.ndarray
    """[P + C] int64."""
    prompt_length: int
    loss_mask: np.ndarray
    """[C] bool."""
    behavior_logprobs: np.ndarray
    """[C] float32, nats."""
    advantage: float | np.ndarray
    """One for all tokens, or [C]."""
    versions: np.ndarray
    """[C] int32: the policy version that made each token."""
    reference_logprobs: np.ndarray | None = None
    """[C] float32, nats: of the frozen reference policy."""
    returns: np.ndarray | None = None
    """[C], what the values should be; at loss tokens."""
    token_rewards: np.ndarray | None = None
    """[C] float32: the part of the reward that comes with each token."""
    group: int = -1
    """Ordinal of its group."""
    trajectory: int = 0
    """Its place among the group's trajectories."""

    @property
    def loss_tokens(self) -> int:
        return int(self.loss_mask.sum())


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One packed row of T input tokens, and its N loss tokens. The last token of a trajectory is
    only a target, never an input."""

    input_ids: Tensor
    """[1, T] int64."""
    position_ids: Tensor
    """[1, T] int64, from 0 in each segment."""
    segments: Segments
    select: Tensor
    """[N] int64: positions in the row whose hidden state predicts a loss token."""
    targets: Tensor
    """[N] int64."""
    behavior_logprobs: Tensor
    """[N] float32, nats."""
    advantages: Tensor
    """[N] float32."""
    order: tuple[int, ...]
    """Indices of the trajectories, in the order of their segments."""
    counts: tuple[int, ...]
    """Loss tokens of each segment."""
    weights: Tensor
    """[N] float32: of the step's loss."""
    sequence: Tensor
    """[N] int64: the segment of each loss token."""
    ages: Tensor
    """[N] float32: the learner's version minus the version that made the token."""
    reference_logprobs: Tensor | None = None
    """[N] float32, nats; None without a reference policy."""
    returns: Tensor | None = None
    """[N] float32; None without a value head."""

    def at_least(self, tokens: int) -> MicroBatch:
        """The same row; a shorter one with stand-ins, which nothing looks at, in a segment of their
        own: a model's forward takes no empty share."""
        missing = tokens - self.input_ids.shape[1]
        if missing <= 0:
            return self
        stand_ins = self.input_ids.new_zeros(1, missing)
        return replace(
            self,
            input_ids=torch.cat([self.input_ids, stand_ins], dim=1),
            position_ids=torch.cat([self.position_ids, stand_ins], dim=1),
            segments=Segments.of([*self.segments.lengths, missing], self.input_ids.device),
        )

    def share(self, start: int, end: int) -> tuple[MicroBatch, int]:
        """The same with tokens `start` to `end` of the row and the loss tokens that they predict,
        as far as a model's forward looks at them: segments and all else stay those of the whole
        row. And the place of the first of these loss tokens among the N.
        """
        first, last = torch.searchsorted(self.select, self.select.new_tensor([start, end])).tolist()
        row, chosen = slice(start, end), slice(first, last)
        return (
            replace(
                self,
                input_ids=self.input_ids[:, row],
                position_ids=self.position_ids[:, row],
                select=self.select[chosen] - start,
                targets=self.targets[chosen],
            ),
            first,
        )

    def policy_tokens(self, logprobs: Tensor, values: Tensor | None = None) -> PolicyTokens:
        """The loss tokens with the learner's log-probs [N], and its values [N] if there are returns
        to compare them with."""
        return PolicyTokens(
            logprobs,
            self.behavior_logprobs,
            self.advantages,
            self.weights,
            self.sequence,
            len(self.order),
            self.ages,
            self.reference_logprobs,
            values if self.returns is not None else None,
            self.returns,
        )


def token_example(row: TokenRow) -> Example:
    """Every token after the prompt is a loss token with log-prob 0 and advantage 1.

    Raises:
        ValueError: the prompt or what follows it is empty.
    """
    prompt, following = (np.asarray(part, dtype=np.int64) for part in row)
    if not prompt.size or not following.size:
        raise ValueError(
            f"a row of {prompt.size} prompt and {following.size} following tokens has nothing to"
            " predict; give at least one of each"
        )
    return plain_example(
        np.concatenate([prompt, following]), prompt.size, np.ones(following.size, dtype=bool)
    )


def plain_example(tokens: np.ndarray, prompt_length: int, loss_mask: np.ndarray) -> Example:
    """Log-prob 0 and advantage 1 for every token after the first `prompt_length`."""
    count = len(loss_mask)
    return Example(
        tokens,
        prompt_length,
        loss_mask,
        np.zeros(count, dtype=np.float32),
        1.0,
        np.zeros(count, dtype=np.int32),
    )


def micro_batch(
    examples: Sequence[Example],
    indices: Sequence[int],
    device: torch.device | str,
    weights: Sequence[float] | None = None,
    version: int = 0,
) -> MicroBatch:
    """Pack these trajectories into one row, longest first. An empty list gives one token without
    loss, so that the rank still takes part in the collectives.

    Args:
        indices: into `examples`.
        weights: of each example's loss tokens in the step's loss, one value for each example.
        version: the learner's.
    """
    order = tuple(sorted(indices, key=lambda index: (-len(examples[index].tokens), index)))
    if not order:
        return _empty(device)
    chosen = [examples[index] for index in order]
    lengths = [len(example.tokens) - 1 for example in chosen]
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    # The loss tokens of each trajectory, as places in its completion.
    places = [np.flatnonzero(example.loss_mask) for example in chosen]
    counts = tuple(len(at) for at in places)
    of_trajectory = np.array([weights[i] if weights else 1.0 for i in order], dtype=np.float32)

    def joined(parts: Iterable[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(list(parts))).to(device)

    def at_loss_tokens(values: Callable[[Example], np.ndarray]) -> Tensor:
        return joined(values(example)[at] for example, at in zip(chosen, places, strict=True))

    def optional(values: Callable[[Example], np.ndarray | None]) -> Tensor | None:
        found = [
            (at, array)
            for example, at in zip(chosen, places, strict=True)
            if (array := values(example)) is not None
        ]
        return joined(array[at].astype(np.float32) for at, array in found) if found else None

    return MicroBatch(
        input_ids=joined(example.tokens[:-1] for example in chosen)[None],
        position_ids=joined(np.arange(length) for length in lengths)[None],
        segments=Segments.of(lengths, device),
        select=joined(
            start + example.prompt_length - 1 + at
            for start, example, at in zip(starts, chosen, places, strict=True)
        ),
        targets=at_loss_tokens(lambda example: example.tokens[example.prompt_length :]),
        behavior_logprobs=at_loss_tokens(lambda example: example.behavior_logprobs),
        advantages=at_loss_tokens(_per_token),
        order=order,
        counts=counts,
        weights=torch.from_numpy(np.repeat(of_trajectory, counts)).to(device),
        sequence=torch.from_numpy(np.repeat(np.arange(len(chosen)), counts)).to(device),
        ages=at_loss_tokens(lambda example: (version - example.versions).astype(np.float32)),
        reference_logprobs=optional(lambda example: example.reference_logprobs),
        returns=optional(lambda example: example.returns),
    )


def _per_token(example: Example) -> np.ndarray:
    """The advantage of each completion token [C], float32."""
    return np.broadcast_to(example.advantage, example.loss_mask.shape).astype(np.float32)


def _empty(device: torch.device | str) -> MicroBatch:
    zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
    none, no_float = torch.zeros(0, dtype=torch.int64, device=device), torch.zeros(0, device=device)
    return MicroBatch(
        zero,
        zero,
        Segments.of([1], device),
        none,
        none,
        no_float,
        no_float,
        (),
        (),
        no_float,
        none,
        no_float,
    )
