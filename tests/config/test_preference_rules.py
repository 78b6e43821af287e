"""Online DPO in the config: what it refuses, and what follows from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from small_config import SMALL, small_config

from asyncrl.algorithms.losses.gspo import Gspo
from asyncrl.config import Config, PolicyGradient, explain, field_names, load_config
from asyncrl.config.algorithm import OnlinePreferenceConfig, PreferenceTraining
from asyncrl.preflight.specs import learner_spec


def online(algorithm: dict[str, Any] | None = None, **sections: Any) -> Config:
    """A config whose preference has these settings of `algorithm.preference` and of `algorithm`."""
    config: Config = small_config(algorithm={"preference": {}, **(algorithm or {})}, **sections)
    return config


def refusal(algorithm: dict[str, Any] | None = None, **sections: Any) -> str:
    with pytest.raises(ValidationError) as refused:
        online(algorithm, **sections)
    return explain(refused.value)


OF_A_GRADIENT = {
    "advantage": "rloo",
    "loss": "gspo",
    "loss_aggregation": "fixed",
    "entropy_coef": 0.1,
    "ce": 0.1,
    "correction": {"band": {"above": 2.0}},
    "distillation": {"teacher": "/teacher"},
}
"""A value of each setting that only a policy gradient has."""


def test_settings_of_a_policy_gradient_are_refused() -> None:
    only = PolicyGradient.model_fields.keys() - PreferenceTraining.model_fields.keys()
    assert only == OF_A_GRADIENT.keys()
    for name, value in OF_A_GRADIENT.items():
        message = refusal({name: value})
        assert message.startswith(f"algorithm.{name}")
        assert message.endswith("has no effect with algorithm.preference; leave one of them out")
    message = refusal({"reference": {"kl_loss_coef": 0.1}})
    assert message == (
        "algorithm.reference.kl_loss_coef has no effect with algorithm.preference; leave one of"
        " them out"
    )


@pytest.mark.parametrize(
    ("algorithm", "sections", "message"),
    [
        (
            {"preference": {"pairs": {"max_pairs": 2}}},
            {},
            "algorithm.preference.pairs.max_pairs has no effect with pairs: best_worst; leave it"
            " out, or use it with pairs: margin",
        ),
        (
            {"preference": {"max_pairs": 2}},
            {},
            "algorithm.preference.max_pairs has moved; write algorithm: {preference: {pairs: {name:"
            " margin, max_pairs: …}}}",
        ),
        (
            {"preference": {"weight_cap": None}},
            {"staleness": {"max_staleness": 2}},
            "algorithm.preference.weight_cap = null trains pairs without off-policy weights, and"
            " staleness.max_staleness = 2 is above 1; set weight_cap: 2, or"
            " algorithm.allow_uncorrected: true",
        ),
        (
            {
                "preference": {"pairs": {"missing_eos_penalty": 0.5}},
                "filter_zero_variance": True,
            },
            {},
            "algorithm.filter_zero_variance compares rewards without"
            " preference.pairs.missing_eos_penalty = 0.5, so it would filter groups that give a"
            " pair; leave one of them out",
        ),
        (
            {},
            {"rollout": {"max_completion_length": 8, "n_samples_per_prompt": 1}},
            "rollout.n_samples_per_prompt = 1 is too low for algorithm.preference, which compares"
            " the completions of a prompt; set 2 or more",
        ),
        (
            {},
            {"rollout": {"max_completion_length": 8, "top_k": 20}},
            "rollout.top_k = 20 renormalizes the generator's log-probs over the kept tokens, and"
            " preference.weight_cap compares them with the learner's. Leave it out, or set"
            " algorithm.preference.weight_cap: null",
        ),
        (
            {},
            {
                "learner": {
                    "max_tokens_per_gpu": 8,
                    "sequence_parallel_size": 2,
                    "world_size": 2,
                }
            },
            "data.max_prompt_length 8 + rollout.max_completion_length 8 = 16 is above"
            " learner.max_tokens_per_gpu = 8, and the reference policy or teacher cannot split a"
            " row over ranks; raise that, or lower data.max_length",
        ),
        (
            {},
            {"warm_start": {"data": "w"}, "eval": {"data": "e"}},
            "the reference policy would be model.path, as it was before the warm start; name it in"
            " algorithm.reference.ref_load",
        ),
        (
            {},
            {"lora": {"load": "/adapter"}},
            "the reference policy would be model.path, as it was without the adapter of lora.load;"
            " name it in algorithm.reference.ref_load",
        ),
        (
            {"allow_uncorrected": True},
            {},
            "algorithm.allow_uncorrected: true only has an effect with an uncorrected loss; leave"
            " it out, or set preference.weight_cap: null",
        ),
        (
            {"preference": {"loss": "hinge"}},
            {},
            "algorithm.preference.loss = 'hinge': use one of sigmoid, ipo",
        ),
        (
            {"preference": {"pairs": {"min_margin": 0}}},
            {},
            "algorithm.preference.pairs.min_margin = 0: input should be greater than 0",
        ),
        (
            {"preference": 1},
            {},
            "algorithm.preference = 1: write its settings below it, each as `name: value`, or leave"
            " it out",
        ),
    ],
)
def test_what_cannot_work_is_refused(
    algorithm: dict[str, Any], sections: dict[str, Any], message: str
) -> None:
    assert refusal(algorithm, **sections) == message


def test_what_an_online_run_may_set() -> None:
    config = online(
        {
            "preference": {
                "loss": "ipo",
                "pairs": {"name": "margin", "max_pairs": 3},
                "weight_cap": None,
            },
            "reference": {"ref_load": "/reference", "num_cpus": 0.5},
            "filter_zero_variance": True,
            "group_filter": "m:f",
            "allow_uncorrected": True,
        },
        rollout={"max_completion_length": 8, "top_p": 0.9},
    )
    assert config.algorithm.has_reference
    assert config.models["algorithm.reference.ref_load"] == "/reference"
    uncorrected = online({"preference": {"weight_cap": None}}, staleness={"max_staleness": 1})
    assert not uncorrected.algorithm.corrected and online().algorithm.corrected
    assert not small_config().algorithm.has_reference


def test_its_settings_have_names_and_reach_the_learner() -> None:
    assert "algorithm.preference.weight_cap" in field_names(Config)
    config = online(
        {
            "preference": {
                "loss": {"name": "ipo", "beta": 0.3},
                "pairs": {
                    "name": "margin",
                    "min_margin": 0.2,
                    "max_pairs": 3,
                    "missing_eos_penalty": 0.4,
                },
                "weight_cap": 1.5,
                "ce_coef": 0.6,
            }
        },
        staleness={"max_staleness": 4},
    )
    spec = learner_spec(config).online
    found = spec.algorithm.preference
    assert found is not None and spec.staleness.max_staleness == 4
    assert (found.loss.name, found.loss.beta, found.weight_cap) == ("ipo", 0.3, 1.5)
    assert (found.pairs.name, found.pairs.min_margin, found.pairs.max_pairs) == ("margin", 0.2, 3)
    assert (found.ce_coef, found.pairs.missing_eos_penalty) == (0.6, 0.4)
    assert learner_spec(small_config()).online.algorithm.preference is None


@pytest.mark.parametrize(
    ("overrides", "beta", "weight_cap"),
    [
        (["--algorithm.preference.loss.beta", "0.3"], 0.3, 2.0),
        (["--algorithm.preference.weight_cap", "null", "--staleness.max_staleness=1"], 0.1, None),
    ],
)
def test_the_command_line_turns_it_on(
    tmp_path: Path, overrides: list[str], beta: float, weight_cap: float | None
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    preference = load_config(path, overrides).algorithm.preference
    assert preference is not None
    assert (preference.loss.beta, preference.weight_cap) == (beta, weight_cap)
    path.write_text(yaml.safe_dump({**SMALL, "algorithm": {"preference": {}}}))
    plain = load_config(path, ["--algorithm.preference", "null", "--algorithm.loss", "gspo"])
    assert plain.algorithm.preference is None and plain.algorithm.loss == Gspo()
    assert load_config(path).algorithm.preference == OnlinePreferenceConfig()
