"""Supervised steps until held-out greedy accuracy lies in a window: neither hopeless nor finished,
so that RL has something to do."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Any, Protocol

from asyncrl.config import WarmStartConfig

__all__ = [
    "SupervisedLearner",
    "WarmStartCheck",
    "WarmStartFailedError",
    "WarmStartReport",
    "warm_start",
]

Row = tuple[Sequence[int], Sequence[int]]


class WarmStartFailedError(RuntimeError):
    """The window was not reached. The message names the accuracy, the steps and the fix."""


class SupervisedLearner(Protocol):
    """What the warm start needs of the learner group."""

    async def supervised_step(self, rows: Sequence[Row]) -> dict[str, float]: ...

    async def exact_match(self, rows: Sequence[Row]) -> float: ...

    async def snapshot(self) -> None: ...

    async def restore(self) -> None: ...

    async def reset_optimizer(self, learning_rate: float, warmup_steps: int = 0) -> None: ...

    async def set_learning_rate(self, learning_rate: float) -> None: ...


@dataclass(frozen=True, slots=True)
class WarmStartCheck:
    """One check of held-out accuracy (0..1), after `steps` applied supervised steps; `loss` is the
    last step's, in nats per token."""

    steps: int
    accuracy: float
    loss: float
    learning_rate: float
    fill: float = float("nan")
    """Share of the packed rows' capacity in use: mean of the steps since the check before, as the
    next two."""
    imbalance: float = float("nan")
    """How much longer the steps' rounds of micro-batches take than with equal costs."""
    micro_batches: float = float("nan")
    """Packed rows of a step, over all ranks."""
    pieces_left_out: int = 0
    """Pieces of cut rows without a token to predict, since the check before."""
    tokens_left_out: int = 0
    """Target tokens that no piece predicts, since the check before: those of pieces left out, and
    the first of each piece that begins within a target."""

    def metrics(self) -> dict[str, float]:
        """What a run records of it."""
        return {
            f"warm_start/{field.name}": getattr(self, field.name)
            for field in fields(self)
            if field.name != "steps"
        }


@dataclass(frozen=True, slots=True)
class WarmStartReport:
    """Where the warm start ended, and its checks. `jumps` counts returns to a snapshot."""

    steps: int
    accuracy: float
    jumps: int
    checks: tuple[WarmStartCheck, ...]


async def warm_start(
    learner: SupervisedLearner,
    train_rows: Sequence[Row],
    held_out_rows: Sequence[Row],
    config: WarmStartConfig,
    seed: int = 0,
    progress: Callable[[WarmStartCheck], None] = lambda check: None,
    max_skipped_steps: int = 3,
) -> WarmStartReport:
    """Take supervised steps until held-out accuracy lies in [min_accuracy, max_accuracy]; call
    `progress` at every check.

    A run that jumps over the window goes back to its last check, with its optimizer, and halves the
    learning rate. The caller resets the optimizer for RL: supervised steps are not policy versions.
    A step that the learner skipped counts as none.

    Raises:
        WarmStartFailedError: `max_steps` are used up, the model was above the window from the
            start, or `max_skipped_steps` steps in a row were skipped.
    """
    if not train_rows or not held_out_rows:
        raise WarmStartFailedError(
            f"warm_start.data = {config.data!r} gave {len(train_rows)} training and"
            f" {len(held_out_rows)} held-out rows; give at least one of each"
        )
    learning_rate = config.learning_rate
    await learner.reset_optimizer(learning_rate)
    checks = [
        WarmStartCheck(0, await learner.exact_match(held_out_rows), float("nan"), learning_rate)
    ]
    batches = _batches(train_rows, config.batch_size, seed)
    steps = jumps = 0
    while True:
        progress(checks[-1])
        accuracy = checks[-1].accuracy
        if config.min_accuracy <= accuracy <= config.max_accuracy:
            return WarmStartReport(steps, accuracy, jumps, tuple(checks))
        if accuracy > config.max_accuracy and steps == 0:
            raise WarmStartFailedError(
                f"held-out accuracy is {accuracy:.1%} before any supervised step, above"
                f" warm_start.max_accuracy = {config.max_accuracy:.1%}; leave warm_start out, or"
                " raise that"
            )
        if steps >= config.max_steps:
            raise WarmStartFailedError(
                f"held-out accuracy is {accuracy:.1%} after warm_start.max_steps ="
                f" {config.max_steps}, not {config.min_accuracy:.1%} to {config.max_accuracy:.1%};"
                " raise max_steps, change learning_rate, or widen the window"
            )
        if accuracy > config.max_accuracy:
            await learner.restore()
            learning_rate, jumps = learning_rate / 2, jumps + 1
            await learner.set_learning_rate(learning_rate)
        else:
            await learner.snapshot()
        taken = await _applied_steps(learner, batches, config.check_every_steps, max_skipped_steps)
        steps += config.check_every_steps
        accuracy = await learner.exact_match(held_out_rows)
        means: dict[str, Any] = {
            name: fmean(metrics[name] for metrics in taken)
            for name in ("fill", "imbalance", "micro_batches")
        }
        left_out = {
            name: int(sum(metrics[name] for metrics in taken))
            for name in ("pieces_left_out", "tokens_left_out")
        }
        checks.append(
            WarmStartCheck(steps, accuracy, taken[-1]["loss"], learning_rate, **means, **left_out)
        )


async def _applied_steps(
    learner: SupervisedLearner, batches: Iterator[list[Row]], count: int, max_skipped_steps: int
) -> list[dict[str, float]]:
    """The metrics of so many applied steps, each on the next batch.

    Raises:
        WarmStartFailedError: so many steps in a row were skipped.
    """
    taken: list[dict[str, float]] = []
    skipped = 0
    while len(taken) < count:
        metrics = await learner.supervised_step(next(batches))
        if metrics["applied"]:
            taken.append(metrics)
        skipped = 0 if metrics["applied"] else skipped + 1
        if skipped >= max_skipped_steps:
            raise WarmStartFailedError(
                f"{skipped} supervised steps in a row were skipped for NaN or Inf in loss or"
                " gradient; lower warm_start.learning_rate (their rows are in"
                " kept/supervised_*.parquet of the run's directory)"
            )
    return taken


def _batches(rows: Sequence[Row], batch_size: int, seed: int) -> Iterator[list[Row]]:
    """Batches without end, in a new seeded order every epoch. An epoch's last short batch is left
    out unless it is the only one."""
    generator = random.Random(seed)
    order = list(range(len(rows)))
    while True:
        generator.shuffle(order)
        for at in range(0, max(1, len(order) - batch_size + 1), batch_size):
            yield [rows[index] for index in order[at : at + batch_size]]
