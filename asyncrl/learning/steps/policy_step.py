"""One policy step: computes advantages and weights over the whole step, then trains on the policy
objective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.algorithms.advantages.gae import Gae
from asyncrl.algorithms.advantages.group_advantage import StepAdvantage, StepInputs
from asyncrl.algorithms.advantages.over_step import standardized
from asyncrl.algorithms.covariance import covariances
from asyncrl.algorithms.loss_metrics import LossSums
from asyncrl.algorithms.objective import policy_loss, token_weights, truncated_weights
from asyncrl.config import PolicyGradient
from asyncrl.config.distillation import TeacherTopK
from asyncrl.contracts.messages import StepResult
from asyncrl.contracts.outcomes import NOT_FINITE, NOTHING_TO_LEARN
from asyncrl.learning.engine.state import LearnerState
from asyncrl.learning.examples.batches import (
    examples_of,
    shuffle_rewards,
    with_next_token,
    with_values,
)
from asyncrl.learning.examples.session_examples import rows_of_trajectory, with_trajectory_units
from asyncrl.learning.steps.blame import keep_if_bad, name_culprit
from asyncrl.learning.steps.components import CE, Component, ce_loss, weighted_sum, with_token_mean
from asyncrl.learning.steps.distillation import (
    DISTILL,
    DISTILL_PARTS,
    distillation_metrics,
    top_k_loss,
    with_teacher_advantages,
)
from asyncrl.learning.steps.passes import Loss, forward_batches, train
from asyncrl.learning.steps.stale_tokens import kept_metrics, with_fresh_tokens
from asyncrl.learning.steps.step_tokens import StepTokens
from asyncrl.models.micro_batches import Example, MicroBatch, trajectories_of


def policy_step(
    state: LearnerState,
    tables: Sequence[pa.Table],
    record: Callable[[pa.Table], None] | None = None,
) -> StepResult:
    """Take one policy step on scored groups, one table each (a collective).

    The step is skipped on all ranks if any rank finds NaN or Inf, or if no loss token is left.

    Args:
        record: gets this rank's part of the step, with TRAINED_COLUMNS except `trained_in`.
    """
    spec, version = state.spec, state.applied
    algorithm, staleness = spec.policy, spec.online.staleness
    if spec.online.reward.shuffle:
        tables = shuffle_rewards(tables, algorithm.advantage, (spec.seed, version))
    scored = [example for table in tables for example in examples_of(table)]
    examples = _with_step_advantages(state, scored, tables)
    if algorithm.distillation is not None:
        examples = with_teacher_advantages(examples, algorithm.distillation)
    whole_weights = _weights_of_trajectories(state, examples)
    examples, further, parts = _components(algorithm, examples, tables)
    examples, weights = _fresh(state, examples, whole_weights)
    if algorithm.compares_sequences:
        examples = with_trajectory_units(examples)
    if algorithm.loss.selects_tokens and examples:
        examples = _with_selected_tokens(state, examples)
    truncation = algorithm.correction.truncation
    normalizes = truncation is not None and truncation.normalize and bool(examples)
    mean_weight = _mean_weight(state, examples) if normalizes else 1.0
    seen = StepTokens() if record is not None and not state.sequence_rank else None
    components = [Component(1.0, _loss(state, mean_weight, seen)), *further]
    metrics = train(
        state,
        examples,
        weights,
        weighted_sum(components),
        state.scheduled(state.learning_rate),
        state.scheduled(state.value_learning_rate),
        parts=parts,
        policy=True,
    )
    if record is not None and seen is not None:
        record(seen.table(examples, tables, version))
    if algorithm.distillation is not None:
        metrics |= distillation_metrics(scored, tables)
    if staleness.masks:
        metrics |= kept_metrics(scored, version - staleness.max_staleness)
    applied = bool(metrics["applied"])
    if applied:
        state.trained_tokens += int(metrics["tokens"])
        metrics["grad_norm_ratio"] = state.norms.ratio(metrics["grad_norm"])
    reason = "" if applied else NOT_FINITE if examples else NOTHING_TO_LEARN
    find_culprit = partial(_culprit, state, scored, whole_weights, tables)
    note = keep_if_bad(
        state, metrics, f"version_{version:06d}", tables, find_culprit if examples else None
    )
    return StepResult(applied, metrics, note, reason)


def _culprit(
    state: LearnerState,
    scored: list[Example],
    weights: list[float],
    tables: Sequence[pa.Table],
) -> str:
    """See `name_culprit` (a collective). The search uses examples without statistics of the step,
    which spread a NaN to all of them."""
    examples, further, _ = _components(state.spec.policy, scored, tables)
    examples, weights = _fresh(state, examples, weights)
    loss = weighted_sum([Component(1.0, _loss(state, 1.0)), *further])
    return name_culprit(state, examples, weights, loss)


def _weights_of_trajectories(state: LearnerState, examples: Sequence[Example]) -> list[float]:
    """The weight of each example's loss tokens. The rows of one session count as one trajectory,
    with the tokens of all of them."""
    numbers = trajectories_of(examples)
    lengths = np.bincount(numbers, [example.loss_tokens for example in examples]).astype(int)
    algorithm, longest = state.spec.policy, state.spec.online.rollout.max_completion_length
    weights = token_weights(lengths.tolist(), algorithm.loss_aggregation, longest)
    return [weights[number] for number in numbers]


def _fresh(
    state: LearnerState, examples: list[Example], weights: list[float]
) -> tuple[list[Example], list[float]]:
    """The examples and their weights, without tokens beyond the staleness bound."""
    staleness = state.spec.online.staleness
    if not staleness.masks:
        return examples, weights
    return with_fresh_tokens(examples, weights, state.applied - staleness.max_staleness)


def _components(
    algorithm: PolicyGradient, examples: list[Example], tables: Sequence[pa.Table]
) -> tuple[list[Example], list[Component], tuple[str, ...]]:
    """The examples with the tokens of the loss's further components, these components, and the
    names of their metrics."""
    components: list[Component] = []
    parts: tuple[str, ...] = ()
    if algorithm.ce is not None:
        rewarded = _at_least(tables, algorithm.ce.min_reward)
        examples = with_token_mean(
            examples, CE, lambda example: (example.group, example.trajectory) in rewarded
        )
        components.append(Component(algorithm.ce.coef, ce_loss))
        parts += ("ce/loss",)
    distillation = algorithm.distillation
    if distillation is not None and isinstance(distillation.use, TeacherTopK):
        examples = with_token_mean(examples, DISTILL, lambda example: True)
        components.append(Component(distillation.use.coef, top_k_loss))
        parts += DISTILL_PARTS
    return examples, components, parts


def _loss(state: LearnerState, mean_weight: float, seen: StepTokens | None = None) -> Loss:
    def loss(
        logprobs: Tensor, entropy: Tensor, values: Tensor, batch: MicroBatch
    ) -> tuple[Tensor, LossSums]:
        tokens = batch.policy_tokens(logprobs, values)
        found, sums = policy_loss(tokens, state.spec.policy, entropy, mean_weight)
        if seen is not None:
            seen.add(batch, sums)
        return found, sums

    return loss


def _at_least(tables: Sequence[pa.Table], reward: float) -> set[tuple[int, int]]:
    """(ordinal, index) of the step's trajectories with at least this reward."""
    return {
        (ordinal, index)
        for table in tables
        for ordinal, rewards in zip(
            table["ordinal"].to_pylist(), table["reward"].to_pylist(), strict=True
        )
        for index, value in enumerate(rewards)
        if value is not None and value >= reward
    }


def _usable_rewards(tables: Sequence[pa.Table]) -> list[float]:
    """The rewards of the step's trajectories with status ok."""
    return [
        reward
        for table in tables
        for rewards, statuses in zip(
            table["reward"].to_pylist(), table["status"].to_pylist(), strict=True
        )
        for reward, status in zip(rewards, statuses, strict=True)
        if status == "ok"
    ]


def _with_step_advantages(
    state: LearnerState, examples: list[Example], tables: Sequence[pa.Table]
) -> list[Example]:
    """The examples with the advantages of methods that use statistics of the whole step."""
    advantage = state.spec.policy.advantage
    if not examples:
        return examples
    if isinstance(advantage, Gae):
        return _with_value_advantages(state, examples, advantage)
    if not isinstance(advantage, StepAdvantage):
        return examples
    step = StepInputs(
        tokens=[example.loss_tokens for example in examples],
        rows=rows_of_trajectory(examples),
        rewards=_usable_rewards(tables),
    )
    own = [float(example.advantage) for example in examples]
    normalized = advantage.of_step(own, step)
    return [
        replace(example, advantage=value)
        for example, value in zip(examples, normalized, strict=True)
    ]


def _with_value_advantages(state: LearnerState, examples: list[Example], gae: Gae) -> list[Example]:
    """The examples with returns, and with advantages from the current value head, normalized over
    the step's loss tokens (a collective). All ranks get those of all examples, because a rank may
    train other examples than it evaluated: a truncated one has one more token here."""
    cut = [gae.bootstrap_truncated and example.truncated for example in examples]
    valued = [
        with_next_token(example) if longer else example
        for example, longer in zip(examples, cut, strict=True)
    ]
    begins = np.cumsum([0, *(example.loss_tokens for example in valued)])
    of_step = np.zeros(begins[-1])
    for batch, (_, _, values) in forward_batches(state, valued):
        if state.sequence_rank or not batch.counts:  # ranks that share a row have the same values
            continue
        parts = values.cpu().double().split(list(batch.counts))
        for index, part in zip(batch.order, parts, strict=True):
            of_step[begins[index] : begins[index + 1]] = part.numpy()
    of_examples = np.split(_sum_over_ranks(state, of_step), begins[1:-1])
    found = []
    for example, longer, known in zip(examples, cut, of_examples, strict=True):
        own, after = (known[:-1], float(known[-1])) if longer else (known, 0.0)
        found.append(with_values(example, own, gae.gamma, gae.gae_lambda, after))
    advantages = [np.asarray(example.advantage) for example in found]
    masked = [each[example.loss_mask] for example, each in zip(found, advantages, strict=True)]
    every = np.concatenate(masked)
    return [
        replace(example, advantage=standardized(each, every))
        for example, each in zip(found, advantages, strict=True)
    ]


def _with_selected_tokens(state: LearnerState, examples: list[Example]) -> list[Example]:
    """The examples with the tokens that clip_cov or kl_cov selects, by their covariances over the
    whole step (a collective)."""
    loss, spec = state.spec.policy.loss, state.spec
    begins = np.cumsum([0, *(example.loss_tokens for example in examples)])
    of_step = np.zeros((3, begins[-1]))  # log-prob, advantage, clipped: from one rank each
    for batch, (logprobs, *_) in forward_batches(state, examples):
        tokens = batch.policy_tokens(logprobs)
        if state.sequence_rank or not batch.counts:  # ranks that share a row have the same tokens
            continue
        stopped = loss.terms(tokens, tokens.log_ratio(loss.old_policy)).stopped
        rows = torch.stack([logprobs.double(), batch.advantages.double(), stopped.double()])
        for index, part in zip(batch.order, rows.cpu().split(list(batch.counts), 1), strict=True):
            of_step[:, begins[index] : begins[index + 1]] = part.numpy()
    logprobs_of, advantages_of, stopped_of = _sum_over_ranks(state, of_step)
    values = covariances(logprobs_of, advantages_of)
    seed = spec.seed, state.applied, 1  # the shuffle of rewards has the first two
    selected = loss.select(values, stopped_of > 0, seed)
    return [
        replace(example, selected=_at_loss_tokens(example, part))
        for example, part in zip(examples, np.split(selected, begins[1:-1]), strict=True)
    ]


def _at_loss_tokens(example: Example, values: np.ndarray) -> np.ndarray:
    """[C] bool: these values at the loss tokens, False elsewhere."""
    full = np.zeros(len(example.loss_mask), dtype=bool)
    full[example.loss_mask] = values
    return full


def _sum_over_ranks(state: LearnerState, values: np.ndarray) -> np.ndarray:
    """The sum of these float64 values over all ranks (a collective)."""
    sums = torch.from_numpy(values).to(state.device)
    dist.all_reduce(sums)
    return sums.cpu().numpy()


def _mean_weight(state: LearnerState, examples: list[Example]) -> float:
    """Mean of the step's truncated weights over the tokens of all ranks (a collective)."""
    total, count = 0.0, 0
    for batch, (logprobs, *_) in forward_batches(state, examples):
        weights = truncated_weights(batch.policy_tokens(logprobs), state.spec.policy)
        total, count = total + float(weights.sum()), count + weights.numel()
    sums = _sum_over_ranks(state, np.array([total, float(count)]))
    return float(sums[0] / sums[1])
