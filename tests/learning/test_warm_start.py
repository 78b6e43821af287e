"""The warm start, with a model whose accuracy grows linearly."""

from collections.abc import Callable, Sequence

import pyarrow as pa
import pytest

from asyncrl.config import WarmStartConfig
from asyncrl.contracts.offline_rows import token_table
from asyncrl.learning.warm_start import WarmStartCheck, WarmStartFailedError, warm_start
from asyncrl.observe.metric_catalog import known_names

ROWS = [((1, 2), (3, 4))] * 10


class Model:
    """A learner whose accuracy is the sum of the learning rates of its steps."""

    def __init__(
        self, accuracy: float = 0.0, skips: Callable[[int], bool] = lambda number: False
    ) -> None:
        self.accuracy, self.learning_rate, self.calls = accuracy, 0.0, list[str]()
        self.skips, self.attempted, self.applied = skips, 0, 0
        self.saved: tuple[float, float] | None = None

    async def supervised_step(self, table: pa.Table) -> dict[str, float]:
        assert table == token_table(ROWS[:4])
        applied = not self.skips(self.attempted)
        self.attempted += 1
        self.applied += applied
        self.accuracy += self.learning_rate * applied
        packing = {
            "fill": self.attempted / 100,
            "imbalance": 0.5,
            "micro_batches": 3.0,
            "pieces_left_out": 2.0,
            "tokens_left_out": 5.0,
        }
        return {
            "applied": float(applied),
            "loss": 1 - self.accuracy if applied else float("nan"),
            **packing,
        }

    async def exact_match(self, rows: Sequence[object]) -> float:
        return min(1.0, self.accuracy)

    async def snapshot(self) -> None:
        self.calls.append("snapshot")
        self.saved = (self.accuracy, self.learning_rate)

    async def restore(self) -> None:
        self.calls.append("restore")
        assert self.saved is not None
        self.accuracy, self.learning_rate = self.saved

    async def reset_optimizer(self, learning_rate: float, warmup_steps: int = 0) -> None:
        self.calls.append("reset")
        self.learning_rate = learning_rate

    async def set_learning_rate(self, learning_rate: float) -> None:
        self.calls.append(f"rate {learning_rate}")
        self.learning_rate = learning_rate


def config(**changes: float) -> WarmStartConfig:
    known = {"data": "unused.parquet", "batch_size": 4, "check_every_steps": 10}
    return WarmStartConfig.model_validate(known | changes)


async def test_the_warm_start_ends_in_the_window() -> None:
    progress: list[WarmStartCheck] = []
    report = await warm_start(
        Model(), ROWS, ROWS, config(learning_rate=0.0045), progress=progress.append
    )
    assert report.accuracy == pytest.approx(0.405) and report.jumps == 0
    assert report.checks == tuple(progress)
    # Below half of the window's lower edge, there are four times as many steps between checks.
    assert [check.steps for check in progress] == [0, 40, 80, 90]
    assert [check.pieces_left_out for check in progress] == [0, 80, 80, 20], "two in each step"
    assert [check.tokens_left_out for check in progress] == [0, 200, 200, 50]
    first = progress[1].metrics()
    assert (
        first["warm_start/fill"] == pytest.approx(0.205)
        and first["warm_start/imbalance"] == 0.5
        and first["warm_start/micro_batches"] == 3
    )
    assert set(first) <= known_names()


async def test_a_jump_restores_the_last_check_and_halves_the_learning_rate() -> None:
    model = Model()
    # 40 steps jump from 0 to 1, and 10 steps to 0.9. With half the rate, 10 reach 0.45.
    report = await warm_start(model, ROWS, ROWS, config(learning_rate=0.09))
    assert report.accuracy == pytest.approx(0.45) and report.jumps == 2
    assert [check.steps for check in report.checks] == [0, 40, 50, 60]
    assert model.calls == ["reset", "snapshot", "restore", "restore", "rate 0.045"]


async def test_a_jump_from_far_below_keeps_the_learning_rate() -> None:
    model = Model()
    report = await warm_start(model, ROWS, ROWS, config(learning_rate=0.017))
    assert [check.steps for check in report.checks] == [0, 40, 50, 60, 70]
    assert report.accuracy == pytest.approx(0.51) and report.jumps == 1
    assert model.calls == ["reset", "snapshot", "restore", "snapshot", "snapshot"]


async def test_two_jumps_from_the_same_check() -> None:
    report = await warm_start(Model(), ROWS, ROWS, config(learning_rate=0.2))
    assert report.jumps == 3 and report.accuracy == pytest.approx(0.5)


async def test_few_steps_are_checked_often() -> None:
    report = await warm_start(Model(), ROWS, ROWS, config(learning_rate=0.025, max_steps=40))
    assert report.steps == 20 and report.jumps == 0


async def test_no_more_steps_are_taken_than_allowed() -> None:
    model = Model()
    with pytest.raises(WarmStartFailedError, match="raise max_steps"):
        await warm_start(model, ROWS, ROWS, config(learning_rate=0.0001, max_steps=25))
    assert model.applied == 25


async def test_a_model_already_in_the_window_takes_no_step() -> None:
    assert (await warm_start(Model(0.5), ROWS, ROWS, config())).steps == 0


async def test_the_error_names_the_fix() -> None:
    with pytest.raises(WarmStartFailedError, match="raise max_steps"):
        await warm_start(Model(), ROWS, ROWS, config(learning_rate=0.0001, max_steps=20))
    with pytest.raises(WarmStartFailedError, match="before any supervised step"):
        await warm_start(Model(0.9), ROWS, ROWS, config())
    with pytest.raises(WarmStartFailedError, match="0 training"):
        await warm_start(Model(), [], ROWS, config())


async def test_a_skipped_step_does_not_count() -> None:
    model = Model(skips=lambda number: number % 3 > 0)
    report = await warm_start(model, ROWS, ROWS, config(learning_rate=0.01))
    assert report.steps == model.applied < model.attempted / 2 and all(
        check.loss == check.loss for check in report.checks[1:]
    )


async def test_skipped_steps_in_a_row_end_the_warm_start() -> None:
    model = Model(skips=lambda number: number >= 15)
    with pytest.raises(
        WarmStartFailedError,
        match=(
            r"^3 supervised steps in a row were skipped for NaN or Inf .*; lower"
            r" warm_start.learning_rate \(.*kept/"
        ),
    ):
        await warm_start(model, ROWS, ROWS, config(learning_rate=0.001))
    assert model.attempted == 18
    with pytest.raises(WarmStartFailedError, match=r"^5 supervised steps"):
        await warm_start(
            Model(skips=lambda number: True), ROWS, ROWS, config(), max_skipped_steps=5
        )


def test_an_empty_window_is_refused() -> None:
    with pytest.raises(ValueError, match=r"min_accuracy = 0\.7 is above max_accuracy = 0\.65"):
        config(min_accuracy=0.7)
