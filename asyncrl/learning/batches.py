"""From Arrow rows to the tensors of one micro-batch: packed rows, no padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from asyncrl.algorithms.advantages import group_advantages
from asyncrl.algorithms.losses import PolicyTokens
from asyncrl.algorithms.values import gae
from asyncrl.learning.attention import Segments
from asyncrl.types import REFERENCE_COLUMN, TOKEN_REWARDS_COLUMN

__all__ = [
    "Example",
    "MicroBatch",
    "TokenRow",
    "examples_of",
    "micro_batch",
    "plain_example",
    "shuffle_rewards",
    "token_example",
    "with_values",
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
    behaviour_logprobs: np.ndarray
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
    """One packed row of T input tokens, and its N loss tokens. The last token of a trajectory is only a target, never an input."""

    input_ids: Tensor
    """[1, T] int64."""
    position_ids: Tensor
    """[1, T] int64, from 0 in each segment."""
    segments: Segments
    select: Tensor
    """[N] int64: positions in the row whose hidden state predicts a loss token."""
    targets: Tensor
    """[N] int64."""
    behaviour_logprobs: Tensor
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
        """The same row; a shorter one with stand-ins, which nothing looks at, in a segment of their own: a model's forward takes no empty share."""
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
        """The same with tokens `start` to `end` of the row and the loss tokens that they predict, as far as a model's forward looks at them: segments
        and all else stay those of the whole row. And the place of the first of these loss tokens among the N."""
        first, last = torch.searchsorted(self.select, self.select.new_tensor([start, end])).tolist()
        row, chosen = slice(start, end), slice(first, last)
        return replace(
            self,
            input_ids=self.input_ids[:, row],
            position_ids=self.position_ids[:, row],
            select=self.select[chosen] - start,
            targets=self.targets[chosen],
        ), first

    def policy_tokens(self, logprobs: Tensor, values: Tensor | None = None) -> PolicyTokens:
        """The loss tokens with the learner's log-probs [N], and its values [N] if there are returns to compare them with."""
        return PolicyTokens(
            logprobs,
            self.behaviour_logprobs,
            self.advantages,
            self.weights,
            self.sequence,
            len(self.order),
            self.ages,
            self.reference_logprobs,
            values if self.returns is not None else None,
            self.returns,
        )


def examples_of(table: pa.Table) -> list[Example]:
    """The trainable trajectories of a table of scored groups: status ok, and at least one loss token.

    Raises:
        ValueError: a trajectory with status ok has no advantage, or the table has not been scored.
    """
    missing = [name for name in ("status", "advantage") if name not in table.column_names]
    if missing:
        raise ValueError(
            f"columns {missing} are missing: the learner trains scored groups only; score them first"
        )
    return [example for row in range(table.num_rows) for example in _row_examples(table, row)]


def shuffle_rewards(
    tables: Sequence[pa.Table], advantage: str, seed: tuple[int, ...]
) -> list[pa.Table]:
    """The same scored groups with the usable trajectories' rewards permuted over all of them, and the advantages computed anew."""
    rewards = [table["reward"][row].as_py() for table in tables for row in range(table.num_rows)]
    usable = [
        [status == "ok" for status in table["status"][row].as_py()]
        for table in tables
        for row in range(table.num_rows)
    ]
    places = [
        (group, index)
        for group, flags in enumerate(usable)
        for index, use in enumerate(flags)
        if use
    ]
    drawn = [rewards[group][index] for group, index in places]
    for (group, index), source in zip(
        places, np.random.default_rng(seed).permutation(len(drawn)), strict=True
    ):
        rewards[group][index] = drawn[source]
    advantages = [
        group_advantages(group, flags, advantage)
        for group, flags in zip(rewards, usable, strict=True)
    ]
    shuffled, start = [], 0
    for table in tables:
        for name, values in (("reward", rewards), ("advantage", advantages)):
            column = pa.array(values[start : start + table.num_rows], table.schema.field(name).type)
            table = table.set_column(table.schema.get_field_index(name), name, column)
        shuffled.append(table)
        start += table.num_rows
    return shuffled


def _row_examples(table: pa.Table, row: int) -> list[Example]:
    prompt = table["prompt_ids"][row].values.to_numpy(zero_copy_only=False)
    statuses, advantages = table["status"][row].as_py(), table["advantage"][row].as_py()
    nested = [table[name][row].values for name in ("completion_ids", "loss_mask", "logprobs")]
    spans = table["versions"][row].values
    reference = (
        table[REFERENCE_COLUMN][row].values if REFERENCE_COLUMN in table.column_names else None
    )
    per_token = (
        table[TOKEN_REWARDS_COLUMN][row].as_py()
        if TOKEN_REWARDS_COLUMN in table.column_names
        else None
    )
    ordinal = table["ordinal"][row].as_py()
    examples = []
    for index, status in enumerate(statuses):
        if status != "ok":
            continue
        if advantages[index] is None:
            raise ValueError(
                f"group {ordinal}: trajectory {index} has status ok and no advantage; score it again"
            )
        ids, mask, logprobs = (
            values[index].values.to_numpy(zero_copy_only=False) for values in nested
        )
        tokens = np.concatenate([prompt, ids]).astype(np.int64)
        versions = _token_versions(spans[index].values)
        referred = (
            reference[index].values.to_numpy(zero_copy_only=False)
            if reference is not None
            else None
        )
        token_rewards = (
            np.asarray(per_token[index], dtype=np.float32) if per_token is not None else None
        )
        examples.append(
            Example(
                tokens=tokens,
                prompt_length=len(prompt),
                loss_mask=mask.astype(bool),
                behaviour_logprobs=logprobs.astype(np.float32),
                advantage=float(advantages[index]),
                versions=versions,
                reference_logprobs=referred,
                token_rewards=token_rewards,
                group=ordinal,
                trajectory=index,
            )
        )
    return [example for example in examples if example.loss_tokens]


def _token_versions(spans: pa.StructArray) -> np.ndarray:
    version, start, end = (
        spans.field(name).to_numpy(zero_copy_only=False) for name in ("version", "start", "end")
    )
    return np.repeat(version, end - start)


def token_example(row: TokenRow) -> Example:
    """Every token after the prompt is a loss token with log-prob 0 and advantage 1.

    Raises:
        ValueError: the prompt or what follows it is empty.
    """
    prompt, following = (np.asarray(part, dtype=np.int64) for part in row)
    if not prompt.size or not following.size:
        raise ValueError(
            f"a row of {prompt.size} prompt and {following.size} following tokens has nothing to predict; give at least one of each"
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


def with_values(example: Example, values: np.ndarray, gamma: float, lam: float) -> Example:
    """The example with an advantage for each token by generalised advantage estimation, its one advantage being the reward, and the returns that the
    values should have been.

    Args:
        values: of its loss tokens.
    """
    places = np.flatnonzero(example.loss_mask)
    advantages, returns = np.zeros(len(example.loss_mask)), np.zeros(len(example.loss_mask))
    token_rewards = example.token_rewards[places] if example.token_rewards is not None else None
    advantages[places] = gae(float(example.advantage), values, gamma, lam, token_rewards)
    returns[places] = advantages[places] + values
    return replace(example, advantage=advantages, returns=returns)


def micro_batch(
    examples: Sequence[Example],
    indices: Sequence[int],
    device: torch.device | str,
    weights: Sequence[float] | None = None,
    version: int = 0,
) -> MicroBatch:
    """Pack these trajectories, longest first. Without any, one token without loss stands in, so that the rank takes part in the collectives.

    Args:
        weights: of the step's loss, one for each example: of each of its loss tokens.
        version: the learner's.
    """
    order = tuple(sorted(indices, key=lambda index: (-len(examples[index].tokens), index)))
    if not order:
        return _empty(device)
    chosen = [examples[index] for index in order]
    lengths = [len(example.tokens) - 1 for example in chosen]
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    masked = [np.flatnonzero(example.loss_mask) for example in chosen]

    def optional(name: str) -> Tensor | None:
        """What every example of a step has, or none."""
        parts = [
            getattr(example, name)[at].astype(np.float32)
            for example, at in zip(chosen, masked, strict=True)
            if getattr(example, name) is not None
        ]
        return joined(parts) if parts else None

    def joined(parts: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device)

    return MicroBatch(
        input_ids=joined([example.tokens[:-1] for example in chosen])[None],
        position_ids=joined([np.arange(length) for length in lengths])[None],
        segments=Segments.of(lengths, device),
        select=joined(
            [
                start + example.prompt_length - 1 + at
                for start, example, at in zip(starts, chosen, masked, strict=True)
            ]
        ),
        targets=joined(
            [
                example.tokens[example.prompt_length + at]
                for example, at in zip(chosen, masked, strict=True)
            ]
        ),
        behaviour_logprobs=joined(
            [example.behaviour_logprobs[at] for example, at in zip(chosen, masked, strict=True)]
        ),
        advantages=joined(
            [_per_token(example)[at] for example, at in zip(chosen, masked, strict=True)]
        ),
        order=order,
        counts=tuple(len(at) for at in masked),
        weights=joined(
            [
                np.full(len(at), weights[index] if weights else 1.0, dtype=np.float32)
                for index, at in zip(order, masked, strict=True)
            ]
        ),
        sequence=joined(
            [np.full(len(at), segment, dtype=np.int64) for segment, at in enumerate(masked)]
        ),
        ages=joined(
            [
                (version - example.versions[at]).astype(np.float32)
                for example, at in zip(chosen, masked, strict=True)
            ]
        ),
        reference_logprobs=optional("reference_logprobs"),
        returns=optional("returns"),
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
