"""The metrics of a step. The metric catalog explains each of them."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import pytest

from asyncrl.algorithms.loss_metrics import LossSums
from asyncrl.learning.packing.strategies import Packing, pack
from asyncrl.learning.steps.metrics import NAMES, step_metrics
from asyncrl.models.micro_batches import token_example
from asyncrl.observe.metric_catalog import known_names


def test_a_steps_metrics_include_its_packing_and_are_documented() -> None:
    examples = [token_example(([1] * (length - 1), [2])) for length in (6, 3, 3)]
    plan = pack([len(example.tokens) for example in examples], 8, world_size=2, quadratic=0.1)
    metrics = step_metrics(
        dict.fromkeys((*NAMES, "ratio_max"), 1.0),
        3,
        examples,
        plan,
        0.5,
        1e-3,
        True,
        2.0,
        policy=True,
    )
    assert metrics["micro_batches"] == 2 and metrics["fill"] == 12 / 16
    assert metrics["imbalance"] == pytest.approx((6 + 3.6) / ((9.6 + 2 * 3.9) / 2) - 1), (
        "6 tokens cost 9.6, twice 3 cost 7.8"
    )
    assert set(metrics) <= known_names()


def test_means_are_taken_over_the_steps_tokens() -> None:
    # four tokens with r = 0.5, 1, 1, 1.5
    totals = dict.fromkeys(NAMES, 0.0) | {
        "ratio": 4.0,
        "ratio_squared": 4.5,
        "ratio_max": 1.5,
        "loss": 0.25,
        "entropy": 2.0,
    }
    totals |= {
        "clipped": 1.0,
        "masked": 2.0,
        "masked_band": 2.0,
        "masked_rejected": 1.0,
        "weight": 3.0,
        "capped": 1.0,
        "kl_k1": 0.4,
        "kl_k3": 0.2,
    }
    totals |= {"drift": 0.3, "drift_tokens": 2.0}
    examples = [token_example(((5, 6), (7, 8, 9))), token_example(((5,), (7,)))]
    plan = Packing((((0, 1),),), 6, 6.0, 0.5, 0.0)
    found = step_metrics(totals, 4, examples, plan, 2.0, 1e-3, True, 0.5, policy=True)
    expected = {
        "loss": 0.25,
        "ratio_mean": 1.0,
        "ratio_max": 1.5,
        "ess": 16 / 18,
        "chi2": 0.125,
        "clip_fraction": 0.25,
        "mask_fraction": 0.5,
        "mask_fraction/band": 0.5,
        "mask_fraction/rejected": 0.25,
        "mask_fraction/sequence": 0.0,
        "weight_mean": 0.75,
        "capped_fraction": 0.25,
        "kl_k1": 0.1,
        "kl_k3": 0.05,
        "entropy": 0.5,
        "in_flight_drift": 0.15,
        "in_flight_drift_tokens": 2.0,
        "tokens": 4.0,
        "input_tokens": 7.0,
        "computed_tokens": 6.0,
        "trajectories": 2.0,
        "micro_batches": 1.0,
        "fill": 0.5,
        "tokens_per_s": 14.0,
        "applied": 1.0,
        "grad_norm": 2.0,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_a_mean_over_no_tokens_is_nan() -> None:
    found = step_metrics(
        dict.fromkeys(NAMES, 0.0) | {"ratio_max": 0.0},
        1,
        [],
        Packing(((),), 0, 0.0, 0.0, 0.0),
        np.nan,
        0.0,
        False,
        1.0,
        policy=True,
    )
    assert math.isnan(found["in_flight_drift"]) and math.isnan(found["ess"])


def test_every_sum_of_the_loss_is_summed_over_the_ranks() -> None:
    apart = {"ratio_max", "nonfinite", "own", "parts", "tokens"}
    assert {field.name for field in fields(LossSums)} <= {*NAMES, *apart}


def test_a_step_on_fixed_rows_has_the_metrics_of_its_components_only() -> None:
    totals = dict.fromkeys((*NAMES, "ratio_max"), 1.0) | {"pref/loss": 0.25, "pref/margin": 0.5}
    plan = Packing((((0,),),), 3, 3.0, 0.5, 0.0)
    example = token_example(((5,), (7, 8)))
    found = step_metrics(
        totals, 2, [example], plan, 1.0, 1e-3, True, 1.0, ("pref/loss", "pref/margin")
    )
    assert found["pref/loss"] == 0.25 and found["pref/margin"] == 0.5 and found["entropy"] == 0.5
    assert not {"ratio_mean", "kl_k1", "value_loss", "clip_fraction"} & set(found)
    assert set(found) <= known_names()


def test_chi2_of_small_ratios_is_not_negative() -> None:
    ratios = [0.8, 0.9]
    totals = dict.fromkeys(NAMES, 0.0) | {
        "ratio": sum(ratios),
        "ratio_squared": sum(ratio**2 for ratio in ratios),
        "ratio_max": 0.9,
    }
    plan = Packing(((),), 0, 0.0, 0.0, 0.0)
    found = step_metrics(totals, 2, [], plan, 1.0, 1e-3, True, 1.0, policy=True)
    chi2 = sum((ratio - 1) ** 2 for ratio in ratios) / 2
    assert found["chi2"] == pytest.approx(chi2) and chi2 > 0
