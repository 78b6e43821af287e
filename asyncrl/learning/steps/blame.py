"""Diagnoses a bad step: keeps its batch and finds the trajectory that caused it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa

from asyncrl.contracts.outcomes import NOT_FINITE, NOTHING_TO_LEARN
from asyncrl.learning.engine import zero
from asyncrl.learning.engine.state import LearnerState
from asyncrl.learning.steps.passes import Loss, backward, is_finite
from asyncrl.learning.steps.quarantine import culprit, keep_batch
from asyncrl.models.micro_batches import ALONE, Example, packing_units

NAMED_TOKENS = 16
"""Number of first tokens that identify a supervised row in a message."""


def keep_if_bad(
    state: LearnerState,
    metrics: dict[str, float],
    moment: str,
    tables: Sequence[pa.Table],
    find_culprit: Callable[[], str] | None,
) -> str:
    """Keep the batch of a step that was skipped or had a spike of the gradient norm.

    Args:
        moment: see `keep_batch`.
        find_culprit: called for a step that was not finite, if `learner.find_nonfinite` is on. None
            for a batch without a loss token.

    Returns:
        A message with the problem and the path of the batch, or "" for a good step.
    """
    learner = state.spec.learner
    if metrics["applied"]:
        ratio = metrics["grad_norm_ratio"]
        if ratio <= learner.grad_norm_spike:
            return ""
        reason = "spike"
        message = (
            f"gradient norm {metrics['grad_norm']:.3g} is {ratio:.3g} times the median of the last"
            " steps"
        )
    elif find_culprit is None:
        reason, message = "empty", NOTHING_TO_LEARN
    else:
        reason = "nonfinite"
        message = NOT_FINITE + (find_culprit() if learner.find_nonfinite else "")
    if state.rank != 0:
        return f"{message}; rank 0 keeps its batch"
    directory = state.spec.run_directory / "kept"
    return f"{message}; {keep_batch(directory, moment, reason, tables)}"


def name_culprit(
    state: LearnerState,
    examples: list[Example],
    weights: list[float],
    loss: Loss,
    temperature: float | None = None,
) -> str:
    """Find by bisection which packing unit makes a step not finite (a collective). Returns the end
    of the step's message."""
    if not zero.parameters_finite(state.engine):
        return ": the weights contain NaN or Inf"

    units = packing_units(examples) or [(index,) for index in range(len(examples))]

    def bad(indices: Sequence[int]) -> bool:
        members = [member for index in indices for member in units[index]]
        chosen = [examples[member] for member in members]
        chosen_weights = [weights[member] for member in members]
        totals, _ = backward(state, chosen, chosen_weights, loss, temperature)
        zero.discard_gradients(state.engine)
        return not is_finite(totals)

    found = culprit(len(units), bad)
    if found is None:
        return " from several trajectories together; no single one causes it"
    example = examples[units[found][0]]
    if example.group >= 0:
        return f" from group {example.group}, trajectory {example.trajectory}"
    what = "row" if example.unit == ALONE else "pair"
    return f" from the {what} with the tokens {example.tokens[:NAMED_TOKENS].tolist()}"
