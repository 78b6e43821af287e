"""The tensors of one micro-batch: a packed row without padding. A common prefix of its trajectories
is in it once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.contracts.offline_rows import TokenRow
from asyncrl.models.forest import Forest, separate_rows, shared_rows
from asyncrl.models.segments import Segments

ALONE = -1
"""Packing unit of an example that need not stay with others."""
WHOLE = -1
"""Leaf of an example that is a whole trajectory."""


@dataclass(frozen=True, slots=True)
class Example:
    """One trajectory for the learner, with P prompt tokens and C completion tokens."""

    tokens: np.ndarray
    """[P + C] int64."""
    prompt_length: int
    loss_mask: np.ndarray
    """[C] bool."""
    behavior_logprobs: np.ndarray
    """[C] float32, nats."""
    advantage: float | np.ndarray
    """One value for all tokens, or [C]."""
    versions: np.ndarray
    """[C] int32: the policy version that made each token."""
    reference_logprobs: np.ndarray | None = None
    """[C] float32, nats, from the frozen reference policy."""
    teacher_ids: np.ndarray | None = None
    """[C, K] int32: the teacher's most probable tokens, other than the completion's."""
    teacher_logprobs: np.ndarray | None = None
    """[C, K] float32, nats: their log-probs by the teacher."""
    returns: np.ndarray | None = None
    """[C], the targets of the value head, valid at loss tokens."""
    token_rewards: np.ndarray | None = None
    """[C] float32: the part of the reward that each token gets."""
    truncated: bool = False
    """Whether the completion was cut off."""
    selected: np.ndarray | None = None
    """[C] bool: the tokens that clip_cov and kl_cov treat differently."""
    positions: np.ndarray | None = None
    """[C] int64: the index of each token among the trajectory's sampled tokens. None: 0 to C-1."""
    group: int = -1
    """Ordinal of its group."""
    trajectory: int = 0
    """Index of the trajectory in its group."""
    leaf: int = WHOLE
    """Index of the leaf of a session's row. Rows of one session are one trajectory. WHOLE: the
    trajectory is this one row."""
    unit: int = ALONE
    """Number of its packing unit. The two sides of a pair have the same one."""
    chosen: bool | None = None
    """Whether it is the chosen side of its pair, or a desirable completion. None without a
    preference."""
    slope: float = 0.0
    """The derivative of the step's loss for its summed log-prob, where that loss was computed
    before the backward pass."""
    components: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Weights [C] of its tokens in further components of the loss: 1 / the component's denominator
    over the whole step, or 0 outside the component's mask."""

    @property
    def loss_tokens(self) -> int:
        return int(self.loss_mask.sum())


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One packed row of T input tokens with N loss tokens of B trajectories. The last token of a
    trajectory is a target and not an input. Input tokens that trajectories begin with in common are
    in the row once."""

    input_ids: Tensor
    """[1, T] int64."""
    position_ids: Tensor
    """[1, T] int64: the position of each token in its trajectories, from 0."""
    segments: Segments
    select: Tensor
    """[N] int64: the positions in the row whose hidden states predict the loss tokens, in the order
    of the trajectories. Several trajectories may use one position."""
    targets: Tensor
    """[N] int64."""
    behavior_logprobs: Tensor
    """[N] float32, nats."""
    advantages: Tensor
    """[N] float32."""
    order: tuple[int, ...]
    """[B] the indices of the trajectories, longest first."""
    counts: tuple[int, ...]
    """[B] loss tokens of each trajectory."""
    weights: Tensor
    """[N] float32: each token's weight in the step's loss."""
    sequence: Tensor
    """[N] int64: the trajectory of each loss token. Rows of one session have the same one."""
    ages: Tensor
    """[N] float32: the learner's version minus the version that made the token."""
    reference_logprobs: Tensor | None = None
    """[N] float32, nats; None without a reference policy."""
    teacher_ids: Tensor | None = None
    """[N, K] int64: further tokens whose log-probs a forward pass returns; None without any."""
    teacher_logprobs: Tensor | None = None
    """[N, K] float32, nats: their log-probs by the teacher."""
    learner_logprobs: Tensor | None = None
    """[N, K] float32, nats: their log-probs by the learner, with gradient. None before the forward
    pass."""
    returns: Tensor | None = None
    """[N] float32; None without a value head."""
    selected: Tensor | None = None
    """[N] float32: 1 for tokens that clip_cov and kl_cov treat differently, else 0; None with other
    losses."""
    sequences: int = 0
    """Trajectories, which `sequence` numbers."""
    units: tuple[int, ...] = ()
    """[B] packing unit of each trajectory, or `ALONE`."""
    chosen: tuple[bool | None, ...] = ()
    """[B] side of each trajectory."""
    slopes: Tensor | None = None
    """[N] float32: `Example.slope` at each loss token; None if all are 0."""
    components: Mapping[str, Tensor] = field(default_factory=dict)
    """[N] float32 each: the tokens' weights in further components of the loss. A component is
    missing if no trajectory has it."""

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """The two sides of each pair, as indices into `order`: chosen, rejected."""
        sides: dict[int, dict[bool | None, int]] = {}
        for index, (unit, chosen) in enumerate(zip(self.units, self.chosen, strict=True)):
            if unit != ALONE:
                sides.setdefault(unit, {})[chosen] = index
        return tuple((found[True], found[False]) for found in sides.values())

    def at_least(self, tokens: int) -> MicroBatch:
        """Pad a row that is shorter than this. No rank may have an empty share, because a model's
        forward pass does not take one. The padding is its own segment, and its output is unused."""
        missing = tokens - self.input_ids.shape[1]
        if missing <= 0:
            return self
        padding = self.input_ids.new_zeros(1, missing)
        return replace(
            self,
            input_ids=torch.cat([self.input_ids, padding], dim=1),
            position_ids=torch.cat([self.position_ids, padding], dim=1),
            segments=self.segments.with_padding(missing),
        )

    def share(self, start: int, end: int) -> tuple[MicroBatch, Tensor]:
        """Return tokens `start` to `end` of the row with the loss tokens that they predict, and the
        indices of these loss tokens, int64.

        Only the fields that a forward pass reads are cut. The segments and all other fields remain
        those of the whole row.
        """
        row = slice(start, end)
        chosen = torch.nonzero((self.select >= start) & (self.select < end))[:, 0]
        return (
            replace(
                self,
                input_ids=self.input_ids[:, row],
                position_ids=self.position_ids[:, row],
                select=self.select[chosen] - start,
                targets=self.targets[chosen],
                teacher_ids=None if self.teacher_ids is None else self.teacher_ids[chosen],
            ),
            chosen,
        )

    def evaluated(self, logprobs: Tensor) -> tuple[MicroBatch, Tensor]:
        """Return the micro-batch with its `learner_logprobs`, and the log-probs [N] of its targets,
        from the log-probs that a forward pass returned."""
        if self.teacher_ids is None:
            return self, logprobs
        return replace(self, learner_logprobs=logprobs[:, 1:]), logprobs[:, 0]

    def policy_tokens(self, logprobs: Tensor, values: Tensor | None = None) -> PolicyTokens:
        """Return the loss tokens with the learner's log-probs [N]. Its values [N] are included if
        there are returns."""
        return PolicyTokens(
            logprobs,
            self.behavior_logprobs,
            self.advantages,
            self.weights,
            self.sequence,
            self.sequences,
            self.ages,
            self.reference_logprobs,
            values if self.returns is not None else None,
            self.returns,
            None if self.selected is None else self.selected > 0,
        )


def token_example(row: TokenRow) -> Example:
    """Make an example in which every token after the prompt is a loss token, with log-prob 0 and
    advantage 1.

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
    """Make an example with log-prob 0 and advantage 1 for every token after the prompt."""
    count = len(loss_mask)
    return Example(
        tokens,
        prompt_length,
        loss_mask,
        np.zeros(count, dtype=np.float32),
        1.0,
        np.zeros(count, dtype=np.int32),
    )


def packing_units(examples: Sequence[Example]) -> list[tuple[int, ...]] | None:
    """Return the indices of the examples of each packing unit, in the order of their first
    examples. None if every example is alone."""
    if all(example.unit == ALONE for example in examples):
        return None
    units: dict[tuple[bool, int], list[int]] = {}
    for index, example in enumerate(examples):
        alone = example.unit == ALONE
        units.setdefault((alone, index if alone else example.unit), []).append(index)
    return [tuple(members) for members in units.values()]


def trajectories_of(examples: Sequence[Example]) -> list[int]:
    """Number the trajectories of the examples: an example that is a whole trajectory has a number
    of its own, and the rows of one session share theirs."""
    numbers: dict[tuple[int, int] | int, int] = {}
    return [
        numbers.setdefault(
            index if example.leaf == WHOLE else (example.group, example.trajectory), len(numbers)
        )
        for index, example in enumerate(examples)
    ]


def micro_batch(
    examples: Sequence[Example],
    indices: Sequence[int],
    device: torch.device | str,
    weights: Sequence[float] | None = None,
    version: int = 0,
    shared: bool = True,
) -> MicroBatch:
    """Pack these trajectories into one row. Without any, the row is one token without loss, so that
    the rank still takes part in the collectives.

    Args:
        indices: into `examples`.
        weights: the weight of each example's loss tokens in the step's loss; default: 1.
        version: the learner's policy version.
        shared: compute a common prefix once. False = each trajectory is computed alone.
    """
    order = tuple(sorted(indices, key=lambda index: (-len(examples[index].tokens), index)))
    if not order:
        return _empty(device)
    chosen = [examples[index] for index in order]
    rows = [example.tokens[:-1] for example in chosen]
    forest = (shared_rows if shared else separate_rows)(rows)
    loss = _LossTokens(chosen, device)
    trajectories = trajectories_of(chosen)
    weight = np.array([weights[i] if weights else 1.0 for i in order], dtype=np.float32)
    segments = list(zip(forest.origins, forest.lengths, strict=True))
    return MicroBatch(
        input_ids=_joined(
            (rows[row][depth : depth + length] for (row, depth), length in segments), device
        )[None],
        position_ids=_joined(
            (np.arange(depth, depth + length) for (_, depth), length in segments), device
        )[None],
        segments=Segments.of(forest.lengths, device, forest.parents),
        select=loss.positions(forest),
        targets=loss.values(lambda example: example.tokens[example.prompt_length :]),
        behavior_logprobs=loss.values(lambda example: example.behavior_logprobs),
        advantages=loss.values(_per_token),
        order=order,
        counts=loss.counts,
        weights=loss.repeated(weight),
        sequence=loss.repeated(np.array(trajectories)),
        sequences=max(trajectories) + 1,
        ages=loss.values(lambda example: (version - example.versions).astype(np.float32)),
        reference_logprobs=loss.optional(lambda example: example.reference_logprobs),
        teacher_ids=(
            loss.values(_teacher_ids)
            if any(example.teacher_ids is not None for example in chosen)
            else None
        ),
        teacher_logprobs=loss.optional(lambda example: example.teacher_logprobs),
        returns=loss.optional(lambda example: example.returns),
        selected=loss.optional(lambda example: example.selected),
        units=tuple(example.unit for example in chosen),
        chosen=tuple(example.chosen for example in chosen),
        slopes=(
            loss.repeated(np.array([example.slope for example in chosen], dtype=np.float32))
            if any(example.slope for example in chosen)
            else None
        ),
        components={
            name: loss.values(partial(_component, name))
            for name in sorted({name for example in chosen for name in example.components})
        },
    )


class _LossTokens:
    """The N loss tokens of some trajectories, one trajectory after the other."""

    def __init__(self, examples: Sequence[Example], device: torch.device | str) -> None:
        self._examples, self._device = examples, device
        # Positions of the loss tokens in each completion.
        self._at = [np.flatnonzero(example.loss_mask) for example in examples]
        self.counts = tuple(map(len, self._at))
        """Loss tokens of each trajectory."""

    def positions(self, forest: Forest) -> Tensor:
        """[N] int64: where in the packed row each loss token is predicted."""
        pairs = zip(self._examples, self._at, strict=True)
        return _joined(
            (
                forest.positions(row, example.prompt_length - 1)[at]
                for row, (example, at) in enumerate(pairs)
            ),
            self._device,
        )

    def values(self, of: Callable[[Example], np.ndarray]) -> Tensor:
        """[N]: `of(example)` [C] at the loss tokens."""
        pairs = zip(self._examples, self._at, strict=True)
        return _joined((of(example)[at] for example, at in pairs), self._device)

    def optional(self, of: Callable[[Example], np.ndarray | None]) -> Tensor | None:
        """[N] float32: the same from the examples that have the array; None if none has it."""
        pairs = [(of(example), at) for example, at in zip(self._examples, self._at, strict=True)]
        found = [array[at].astype(np.float32) for array, at in pairs if array is not None]
        return _joined(found, self._device) if found else None

    def repeated(self, values: np.ndarray) -> Tensor:
        """[N]: one value of each trajectory, at each of its loss tokens."""
        return torch.from_numpy(np.repeat(values, self.counts)).to(self._device)


def _joined(parts: Iterable[np.ndarray], device: torch.device | str) -> Tensor:
    return torch.from_numpy(np.concatenate(list(parts))).to(device)


def _per_token(example: Example) -> np.ndarray:
    """The advantage of each completion token [C], float32."""
    return np.broadcast_to(example.advantage, example.loss_mask.shape).astype(np.float32)


def _teacher_ids(example: Example) -> np.ndarray:
    """The teacher's tokens at each completion token [C, K], int64."""
    if example.teacher_ids is None:
        raise ValueError("a trajectory has no tokens of the teacher, and others of its row do")
    return example.teacher_ids.astype(np.int64)


def _component(name: str, example: Example) -> np.ndarray:
    """The weights of each completion token [C], float32, in this component of the loss."""
    if name not in example.components:
        return np.zeros(example.loss_mask.shape, dtype=np.float32)
    return example.components[name].astype(np.float32)


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
