import pytest

from asyncrl.learning.schedule import learning_rate_at


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]),
        ("cosine", [0.5, 1.0, 1.0, 0.85355, 0.5, 0.14645, 0.0]),
    ],
)
def test_the_rate_rises_during_warmup_and_falls_until_the_last_step(kind, wanted):
    assert [learning_rate_at(applied, 1.0, 2, 6, kind) for applied in range(7)] == pytest.approx(
        wanted, abs=1e-5
    )


def test_a_longer_run_has_a_higher_rate_at_the_same_step():
    assert learning_rate_at(50, 1e-3, 0, 100, "linear") < learning_rate_at(
        50, 1e-3, 0, 200, "linear"
    )
