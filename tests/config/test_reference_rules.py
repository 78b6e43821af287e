"""The refreshed reference policy in the config: what it refuses, and what the plan says."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from small_config import small_config

from asyncrl.config import Config, OfflineConfig, explain, field_names
from asyncrl.config.aliases import explain_unknown
from asyncrl.preflight.plan.sections import algorithm_text

ONLINE: dict[str, Any] = {"preference": {}}
KL = {"reference": {"kl_loss_coef": 0.1}}
OTHER = {**ONLINE, "reference": {"ref_load": "/other"}}
DISTILLED = {"distillation": {"teacher": "/teacher"}}


def refreshed(algorithm: dict[str, Any], every: int | None = 8, **sections: Any) -> Config:
    reference = {**algorithm.get("reference", {}), "update_interval": every}
    config: Config = small_config(algorithm={**algorithm, "reference": reference}, **sections)
    return config


@pytest.mark.parametrize("algorithm", [ONLINE, KL, OTHER])
def test_every_run_with_its_own_reference_can_refresh_it(algorithm: dict[str, Any]) -> None:
    assert refreshed(algorithm).reference_interval == 8
    assert refreshed(algorithm, None).reference_interval is None
    text = algorithm_text(refreshed(algorithm))
    assert ", then the policy's version 8, 16, 24, …; each checkpoint has a copy of it" in text
    assert "then the policy's version" not in algorithm_text(refreshed(algorithm, None))


@pytest.mark.parametrize(
    ("algorithm", "sections", "message"),
    [
        ({}, {}, "algorithm.reference: give one of kl_loss_coef, kl_coef"),
        (DISTILLED, {}, "algorithm.reference: give one of kl_loss_coef, kl_coef"),
        (
            {**DISTILLED, **KL},
            {},
            "algorithm.reference has no effect with algorithm.distillation, whose teacher replaces"
            " the reference policy; leave it out, or write algorithm: {distillation: {use: {name:"
            " ref_kl, kl: {kl_loss_coef: …}}}}",
        ),
        (
            ONLINE,
            {"lora": {"r": 8}},
            "algorithm.reference.update_interval = 8 does not work with lora, whose versions are"
            " adapters and not whole weights; leave one of them out",
        ),
    ],
)
def test_where_it_has_no_meaning_it_is_refused(
    algorithm: dict[str, Any], sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError) as refused:
        refreshed(algorithm, **sections)
    assert explain(refused.value) == message


def test_an_interval_of_0_is_refused() -> None:
    with pytest.raises(ValidationError, match="greater than 0"):
        refreshed(KL, 0)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("ref_update_interval", "did you mean algorithm.reference.update_interval?"),
        ("ref_model_sync_steps", "asyncrl calls it algorithm.reference.update_interval"),
        ("sync_ref_model", "it algorithm.reference.update_interval, with a number of versions"),
        ("ref_model_mixup_alpha", "takes whole versions (algorithm.reference.update_interval); re"),
    ],
)
def test_names_of_other_systems_are_answered(name: str, answer: str) -> None:
    assert answer in explain_unknown(name, field_names(Config))


@pytest.mark.parametrize(
    "name", ["dpo.ref_update_interval", "sync_ref_model", "algorithm.ref_update_interval"]
)
def test_a_run_on_a_dataset_scores_its_pairs_once(name: str) -> None:
    assert explain_unknown(name, field_names(OfflineConfig)) == (
        f"{name} is unknown and not needed: the reference scores a dataset's pairs once, before"
        " training; remove it"
    )
