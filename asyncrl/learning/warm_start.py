"""The warm start: supervised steps until held-out greedy accuracy is in a window. RL needs a model
that solves some prompts, but not all."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Protocol

import pyarrow as pa

from asyncrl.config import WarmStartConfig
from asyncrl.contracts.offline_rows import token_table

Row = tuple[Sequence[int], Sequence[int]]
FAR = 4
"""How many times as many steps there are between checks far below the window."""


class WarmStartFailedError(RuntimeError):
    """The warm start did not reach the window. The message names the accuracy, the steps and the
    fix."""


class SupervisedLearner(Protocol):
    """The methods of the learner that the warm start uses."""

    async def supervised_step(self, table: pa.Table) -> dict[str, float]: ...

    async def exact_match(self, rows: Sequence[Row]) -> float: ...

    async def snapshot(self) -> None: ...

    async def restore(self) -> None: ...

    async def reset_optimizer(self, learning_rate: float, warmup_steps: int = 0) -> None: ...

    async def set_learning_rate(self, learning_rate: float) -> None: ...


@dataclass(frozen=True, slots=True)
class WarmStartCheck:
    """A check of held-out accuracy (0..1) after `steps` applied supervised steps. `loss` is that of
    the last step, in nats per token. The other figures cover the steps since the previous check."""

    steps: int
    accuracy: float
    loss: float
    learning_rate: float
    fill: float = float("nan")
    """Share of the packed rows' capacity in use: mean over the steps."""
    imbalance: float = float("nan")
    """Relative extra time of a step's rounds of micro-batches, compared with equal costs: mean over
    the steps."""
    micro_batches: float = float("nan")
    """Packed rows of a step, over all ranks: mean over the steps."""
    pieces_left_out: int = 0
    """Pieces of cut rows without a token to predict."""
    tokens_left_out: int = 0
    """Target tokens that no piece predicts: those of pieces left out, and the first token of each
    piece that begins within a target."""

    def metrics(self) -> dict[str, float]:
        """The metrics that a run records."""
        return {
            f"warm_start/{field.name}": getattr(self, field.name)
            for field in fields(self)
            if field.name != "steps"
        }


@dataclass(frozen=True, slots=True)
class WarmStartReport:
    """The result of a warm start, and its checks. `jumps` counts returns to a snapshot."""

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
    """Take supervised steps until held-out accuracy is in [min_accuracy, max_accuracy]. Calls
    `progress` at every check.

    If accuracy jumps over the window, weights and optimizer return to the last check. From there,
    checks come more often, or else the learning rate is halved. Steps that the learner skipped do
    not count. The caller must reset the optimizer for RL, because supervised steps are not policy
    versions.

    Raises:
        WarmStartFailedError: there are no rows, `max_steps` are used up, the model was above the
            window from the start, or `max_skipped_steps` steps in a row were skipped.
    """
    if not train_rows or not held_out_rows:
        raise WarmStartFailedError(
            f"warm_start.data = {config.data!r} gave {len(train_rows)} training and"
            f" {len(held_out_rows)} held-out rows; give at least one of each"
        )
    learning_rate, jumps, is_far = config.learning_rate, 0, True
    await learner.reset_optimizer(learning_rate)
    accuracy = await learner.exact_match(held_out_rows)
    checks = [WarmStartCheck(0, accuracy, float("nan"), learning_rate)]
    batches = _batches(train_rows, config.batch_size, seed)
    while True:
        progress(checks[-1])
        steps, accuracy = checks[-1].steps, checks[-1].accuracy
        if config.min_accuracy <= accuracy <= config.max_accuracy:
            return WarmStartReport(steps, accuracy, jumps, tuple(checks))
        _refuse_more_steps(checks[-1], config)
        if accuracy > config.max_accuracy:
            await learner.restore()
            jumps += 1
            if not is_far:
                learning_rate /= 2
                await learner.set_learning_rate(learning_rate)
        else:
            await learner.snapshot()
        left, far = config.max_steps - steps, FAR * config.check_every_steps
        is_far = is_far and accuracy < config.min_accuracy / 2 and 2 * far <= left
        count = far if is_far else min(config.check_every_steps, left)
        taken = await _applied_steps(learner, batches, count, max_skipped_steps)
        accuracy = await learner.exact_match(held_out_rows)
        checks.append(_check_after(steps + len(taken), accuracy, learning_rate, taken))


def _refuse_more_steps(check: WarmStartCheck, config: WarmStartConfig) -> None:
    """Raise WarmStartFailedError if the model started above the window, or `max_steps` are used
    up."""
    if check.accuracy > config.max_accuracy and check.steps == 0:
        raise WarmStartFailedError(
            f"held-out accuracy is {check.accuracy:.1%} before any supervised step, above"
            f" warm_start.max_accuracy = {config.max_accuracy:.1%}; leave warm_start out, or"
            " raise that"
        )
    if check.steps >= config.max_steps:
        raise WarmStartFailedError(
            f"held-out accuracy is {check.accuracy:.1%} after warm_start.max_steps ="
            f" {config.max_steps}, not {config.min_accuracy:.1%} to {config.max_accuracy:.1%};"
            " raise max_steps, change learning_rate, or widen the window"
        )


def _check_after(
    steps: int, accuracy: float, learning_rate: float, taken: Sequence[Mapping[str, float]]
) -> WarmStartCheck:
    """The check after the steps `taken` since the last one, given their metrics."""

    def mean(name: str) -> float:
        return fmean(metrics[name] for metrics in taken)

    def total(name: str) -> int:
        return int(sum(metrics[name] for metrics in taken))

    return WarmStartCheck(
        steps,
        accuracy,
        taken[-1]["loss"],
        learning_rate,
        fill=mean("fill"),
        imbalance=mean("imbalance"),
        micro_batches=mean("micro_batches"),
        pieces_left_out=total("pieces_left_out"),
        tokens_left_out=total("tokens_left_out"),
    )


async def _applied_steps(
    learner: SupervisedLearner, batches: Iterator[list[Row]], count: int, max_skipped_steps: int
) -> list[dict[str, float]]:
    """Take `count` applied steps, each on the next batch. Returns their metrics.

    Raises:
        WarmStartFailedError: `max_skipped_steps` steps in a row were skipped.
    """
    taken: list[dict[str, float]] = []
    skipped = 0
    while len(taken) < count:
        metrics = await learner.supervised_step(token_table(next(batches)))
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
    """Yield batches endlessly, in a new seeded order each epoch. An epoch's last batch is dropped
    if it is short, unless it is the only one."""
    generator = random.Random(seed)
    order = list(range(len(rows)))
    while True:
        generator.shuffle(order)
        for at in range(0, max(1, len(order) - batch_size + 1), batch_size):
            yield [rows[index] for index in order[at : at + batch_size]]
