"""Forward and backward passes over the micro-batches of a step. Most functions are collectives:
every rank calls them with the same arguments."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from asyncrl.algorithms.loss_metrics import LossSums
from asyncrl.contracts.offline_rows import TokenRow
from asyncrl.learning.engine import zero
from asyncrl.learning.engine.optimizer import set_learning_rates
from asyncrl.learning.engine.out_of_memory import explained
from asyncrl.learning.engine.state import LearnerState
from asyncrl.learning.packing.balance import quadratic_cost
from asyncrl.learning.packing.prefixes import pack_shared
from asyncrl.learning.packing.strategies import Packing, pack
from asyncrl.learning.steps.metrics import StepSums, step_metrics
from asyncrl.models.micro_batches import (
    Example,
    MicroBatch,
    micro_batch,
    packing_units,
    token_example,
)

Loss = Callable[[Tensor, Tensor, Tensor, MicroBatch], tuple[Tensor, LossSums]]
"""(log-probs [N], entropy [N], values [N] or empty, micro-batch) → loss and sums."""

WEIGHTS_NOT_FINITE = (
    "the weights contain NaN or Inf, or their norm overflows, after a step with finite loss and"
    " gradient; they are not published and not saved: lower the learning rate"
)


def train(
    state: LearnerState,
    examples: list[Example],
    weights: list[float],
    loss: Loss,
    learning_rate: float,
    value_learning_rate: float,
    temperature: float | None = None,
    parts: Sequence[str] = (),
    policy: bool = False,
) -> dict[str, float]:
    """Take one optimizer step on all examples, unless any rank has a loss or gradient that is not
    finite.

    Args:
        weights: weight of each example's loss tokens.
        temperature: default: the temperature of the rollouts.
        parts, policy: see `step_metrics`.

    Returns:
        Metrics. `applied` is 1.0 if the step was taken.

    Raises:
        RuntimeError: the step left NaN or Inf in the weights.
    """
    began = time.monotonic()
    tokens = sum(example.loss_tokens for example in examples)
    if not tokens:
        return {"applied": 0.0, "trajectories": 0.0, "tokens": 0.0}
    totals, plan = backward(state, examples, weights, loss, temperature, parts)
    applied = is_finite(totals)
    if applied:
        set_learning_rates(state.engine.optimizer, learning_rate, value_learning_rate)
        state.engine.step()
        applied = state.engine.was_step_applied()
        if not zero.parameters_finite(state.engine):
            raise RuntimeError(
                f"{WEIGHTS_NOT_FINITE} (it was {learning_rate:g}, at step {state.applied}), and"
                " resume from the newest checkpoint"
            )
    else:
        zero.discard_gradients(state.engine)
    state.applied += applied
    grad_norm = float(state.engine.get_global_grad_norm()) if applied else float("nan")
    seconds = time.monotonic() - began
    return step_metrics(
        totals, tokens, examples, plan, grad_norm, learning_rate, applied, seconds, parts, policy
    )


def backward(
    state: LearnerState,
    examples: Sequence[Example],
    weights: list[float],
    loss: Loss,
    temperature: float | None = None,
    parts: Sequence[str] = (),
) -> tuple[dict[str, float], Packing]:
    """Run forward and backward over all micro-batches. The gradients stay in the engine. Returns
    sums over all ranks, so every rank makes the same decision, and the micro-batches' plan."""
    engine = state.engine
    plan = plan_micro_batches(state, examples)
    sums = StepSums(state.device, state.own_metrics, parts)
    mine = plan.micro_batches[state.data_rank]
    state.threads.begin()
    for number, indices in enumerate(mine):
        engine.set_gradient_accumulation_boundary(number == len(mine) - 1)
        batch = micro_batch(examples, indices, state.device, weights, state.applied)
        with explained(batch, state.spec):
            logprobs, entropy, values = engine(batch, temperature)
            batch, logprobs = batch.evaluated(logprobs)
            batch_loss, loss_sums = loss(logprobs, entropy, values, batch)
            # ZeRO averages gradients over ranks. The weights are normalized over the whole step, so
            # the gradients must be summed: the factor undoes the average.
            engine.backward(batch_loss * state.spec.learner.world_size, scale_wrt_gas=False)
        if state.sequence_rank == 0:  # ranks that share a row have the same sums
            sums.add(loss_sums, entropy.detach())
        state.threads.adapt(batch.input_ids.shape[1])
    sums.nonfinite_gradient(not zero.gradients_finite(engine))
    return sums.over_ranks(), plan


def is_finite(totals: dict[str, float]) -> bool:
    """Whether loss and gradient of the sums that `backward` returned are finite on all ranks."""
    return not (totals["nonfinite_loss"] or totals["nonfinite_gradient"])


def forward_batches(
    state: LearnerState,
    examples: Sequence[Example],
    temperature: float | None = None,
    greedy: bool = False,
) -> Iterator[tuple[MicroBatch, tuple[Tensor, Tensor, Tensor]]]:
    """Run this rank's micro-batches through the engine, without gradient. Yields (micro-batch,
    (log-probs, entropies, values)). With `greedy`, matches of the argmax replace the log-probs."""
    plan = plan_micro_batches(state, examples)
    plain = [replace(example, teacher_ids=None, teacher_logprobs=None) for example in examples]
    for indices in plan.micro_batches[state.data_rank]:
        batch = micro_batch(plain, indices, state.device, version=state.applied)
        with torch.no_grad(), explained(batch, state.spec):
            outputs = state.engine(batch, temperature, greedy)
        yield batch, outputs


def forward_rows(
    state: LearnerState, rows: Sequence[TokenRow], temperature: float = 1.0, greedy: bool = False
) -> dict[int, np.ndarray]:
    """Log-probs [C] float32 of the second ids of each row that this rank processes: row index →
    array. With `greedy`, whether each id is the argmax."""
    examples = [token_example(row) for row in rows]
    found: dict[int, np.ndarray] = {}
    for batch, (values, *_) in forward_batches(state, examples, temperature, greedy):
        parts = values.cpu().split(list(batch.counts)) if batch.counts else ()
        found |= {index: part.numpy() for index, part in zip(batch.order, parts, strict=True)}
    return found


def plan_micro_batches(state: LearnerState, examples: Sequence[Example]) -> Packing:
    """Assign the examples to micro-batches. Every data-parallel rank gets the same number of them.
    Ranks that share rows fit as many tokens as the sum of their caps. Examples of one packing unit
    stay together, and so do those with a common prefix, as far as they fit."""
    learner, quadratic = state.spec.learner, _quadratic_cost(state)
    limit, ranks = learner.max_tokens_per_row, learner.data_parallel_size
    if state.packing == "none":
        lengths = [len(example.tokens) for example in examples]
        return pack(lengths, limit, ranks, quadratic, one_each=True)
    rows = [example.tokens for example in examples]
    return pack_shared(rows, limit, ranks, quadratic, packing_units(examples))


def _quadratic_cost(state: LearnerState) -> float:
    shape = zero.policy_of(state.engine).model.config.get_text_config()
    heads = getattr(shape, "num_attention_heads", None)
    if not heads:
        return 0.0
    head_dim = getattr(shape, "head_dim", None) or shape.hidden_size // heads
    return quadratic_cost(shape.num_hidden_layers, heads, head_dim, state.parameter_count)
