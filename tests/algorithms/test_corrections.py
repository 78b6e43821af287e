"""Weights and masks on hand-computed numbers: two trajectories of two tokens and one."""

import math

import pytest
import torch

from asyncrl.algorithms.corrections import Band, Rejection, SequenceMask, Truncation
from asyncrl.algorithms.kl import kl_estimate
from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.algorithms.sequences import sequence_max, sequence_mean, sequence_sum

SEQUENCE = torch.tensor([0, 0, 1])
LOG_RATIO = torch.tensor([math.log(2.0), math.log(0.5), math.log(3.0)], dtype=torch.float64)


def tokens(
    log_ratio: torch.Tensor, sequence: torch.Tensor, sequences: int, advantages: torch.Tensor
) -> PolicyTokens:
    """Tokens with these log-ratios of learner to behavior policy."""
    zeros, ones = torch.zeros_like(log_ratio), torch.ones_like(log_ratio)
    return PolicyTokens(log_ratio, zeros, advantages, ones, sequence, sequences, zeros)


def importance_weights(
    log_ratio: torch.Tensor, sequence: torch.Tensor, sequences: int, level: str
) -> torch.Tensor:
    batch = tokens(log_ratio, sequence, sequences, torch.ones_like(log_ratio))
    return Truncation(level=level).weights(batch, "learner")


def test_sums_means_and_maxima_over_trajectories() -> None:
    values = torch.tensor([1.0, 3.0, -2.0])
    assert sequence_sum(values, SEQUENCE, 2).tolist() == [4.0, -2.0]
    assert sequence_mean(values, SEQUENCE, 2).tolist() == [2.0, -2.0]
    assert sequence_max(values, SEQUENCE, 2).tolist() == [3.0, -2.0]
    assert sequence_mean(values, SEQUENCE, 3).tolist() == [2.0, -2.0, 0.0]


def test_importance_weights() -> None:
    assert importance_weights(LOG_RATIO, SEQUENCE, 2, "token").clamp(
        max=2.5
    ).tolist() == pytest.approx([2.0, 0.5, 2.5])
    assert importance_weights(LOG_RATIO, SEQUENCE, 2, "sequence").clamp(
        max=2.5
    ).tolist() == pytest.approx([1.0, 1.0, 2.5])
    # The geometric mean of 2 and 0.5 is 1, and of 2, 0.5 and 3 it would be 3^(1/3).
    assert importance_weights(LOG_RATIO, SEQUENCE, 2, "geometric").tolist() == pytest.approx(
        [1.0, 1.0, 3.0]
    )
    one = torch.zeros(3, dtype=torch.int64)
    assert importance_weights(LOG_RATIO, one, 1, "geometric").tolist() == pytest.approx(
        [3 ** (1 / 3)] * 3
    )
    assert importance_weights(LOG_RATIO[:0], one[:0], 0, "geometric").shape == (0,)
    assert (
        importance_weights(torch.tensor([1000.0]), torch.tensor([0]), 1, "token").isfinite().all()
    )


@pytest.mark.parametrize("log_ratio", [1e-3, 3e-4, -1e-4])
def test_k3_of_close_policies_is_not_rounded_away(log_ratio: float) -> None:
    exact = math.expm1(log_ratio) - log_ratio
    assert kl_estimate(torch.tensor([log_ratio]), "k3").item() == pytest.approx(exact, rel=2e-3)


def test_band_mask_is_two_sided() -> None:
    assert Band(below=0.6, above=2.5).masked(LOG_RATIO).tolist() == [False, True, True]
    assert Band(below=0.6).masked(LOG_RATIO).tolist() == [False, True, False]
    assert Band(above=2.5).masked(LOG_RATIO).tolist() == [False, False, True]


def test_kl_estimates() -> None:
    assert kl_estimate(LOG_RATIO, "k1").tolist() == pytest.approx(
        [-math.log(2), math.log(2), -math.log(3)]
    )
    assert kl_estimate(LOG_RATIO, "k2").tolist() == pytest.approx(
        [math.log(2) ** 2 / 2, math.log(2) ** 2 / 2, math.log(3) ** 2 / 2]
    )
    assert kl_estimate(LOG_RATIO, "k3").tolist() == pytest.approx(
        [1 - math.log(2), -0.5 + math.log(2), 2 - math.log(3)]
    )


@pytest.mark.parametrize(
    ("estimator", "level", "above", "kept"),
    [
        ("k1", "token", 0.7, [True, True, False]),
        ("k1", "sequence_sum", 0.1, [True, True, False]),
        ("k3", "token", 0.25, [False, True, False]),
        ("k3", "sequence_mean", 0.26, [True, True, False]),
        ("k3", "sequence_max", 0.30, [False, False, False]),
        ("k3", "sequence_sum", 0.6, [True, True, False]),
        ("k2", "sequence_max", 0.3, [True, True, False]),
    ],
)
def test_rejection(estimator: str, level: str, above: float, kept: list[bool]) -> None:
    rejection = Rejection(above=above, estimator=estimator, level=level)
    batch = tokens(LOG_RATIO, SEQUENCE, 2, torch.ones(3))
    assert (~rejection.masked(LOG_RATIO, batch)).tolist() == kept


def test_off_policy_sequence_mask_keeps_good_answers() -> None:
    far = torch.tensor([-1.0, -3.0, -3.0])

    def masked(advantages: list[float], above: float) -> list[bool]:
        batch = tokens(far, SEQUENCE, 2, torch.tensor(advantages))
        return SequenceMask(above=above).masked(far, batch).tolist()

    assert masked([-1.0, -1.0, 1.0], 1.5) == [True, True, False]
    assert masked([-1.0, -1.0, -1.0], 2.5) == [False, False, True]


def test_what_is_not_a_number_is_masked() -> None:
    nan = torch.full((1,), math.nan)
    batch = tokens(nan, torch.zeros(1, dtype=torch.int64), 1, torch.tensor([-1.0]))
    assert Band(above=2.0).masked(nan).all()
    for level in ("token", "sequence_sum", "sequence_mean", "sequence_max"):
        assert Rejection(above=1.0, level=level).masked(nan, batch).all()
    assert SequenceMask(above=1.0).masked(nan, batch).all()
