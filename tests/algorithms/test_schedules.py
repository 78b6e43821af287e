import pytest

from asyncrl.algorithms.schedules import Constant, Cosine, Linear, learning_rate_at


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        (Constant(warmup_steps=2), [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        (Linear(warmup_steps=2), [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]),
        (Cosine(warmup_steps=2), [0.5, 1.0, 1.0, 0.85355, 0.5, 0.14645, 0.0]),
    ],
)
def test_the_rate_rises_during_warmup_and_falls_until_the_last_step(schedule, wanted):
    assert [learning_rate_at(applied, 1.0, schedule, 6) for applied in range(7)] == pytest.approx(
        wanted, abs=1e-5
    )


@pytest.mark.parametrize("schedule", [Linear(warmup_steps=2), Cosine(warmup_steps=2)])
def test_the_rate_falls_over_rows_when_a_resume_changes_the_batch_size(schedule):
    """10 steps of 8 rows, or the first 4 (of which 2 are warm-up) and then 12 of 4 rows."""
    whole = [learning_rate_at(applied, 1.0, schedule, 10) for applied in range(11)]
    sizes = ((0, 8), (4, 4))
    resumed = [learning_rate_at(applied, 1.0, schedule, 16, sizes) for applied in range(17)]
    assert resumed[:5] == whole[:5] and resumed[4::2] == whole[4:]
    assert resumed[1:] == sorted(resumed[1:], reverse=True)
    same = [learning_rate_at(applied, 1.0, schedule, 10, ((0, 8),)) for applied in range(11)]
    assert same == whole


def test_a_longer_run_has_a_higher_rate_at_the_same_step():
    short, long = (learning_rate_at(50, 1e-3, Linear(), steps) for steps in (100, 200))
    assert short < long
