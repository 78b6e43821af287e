"""Online DPO in the config: what it refuses, and what follows from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from small_config import SMALL, small_config

from asyncrl.config import AlgorithmConfig, Config, explain, field_names, load_config
from asyncrl.config.preference_rules import KEPT, check_preference
from asyncrl.preflight.specs import learner_spec


def online(algorithm: dict[str, Any] | None = None, **sections: Any) -> Config:
    """A config whose preference has these settings of `algorithm.preference` and of `algorithm`."""
    config: Config = small_config(algorithm={"preference": {}, **(algorithm or {})}, **sections)
    return config


def refusal(algorithm: dict[str, Any] | None = None, **sections: Any) -> str:
    with pytest.raises(ValidationError) as refused:
        online(algorithm, **sections)
    return explain(refused.value)


@pytest.mark.parametrize("name", sorted(set(AlgorithmConfig.model_fields) - {*KEPT, "correction"}))
def test_settings_of_a_policy_gradient_are_refused(name: str) -> None:
    config = online()
    other = config.algorithm.model_copy(update={name: "another value"})
    with pytest.raises(ValueError) as refused:
        check_preference(config.model_copy(update={"algorithm": other}))
    assert str(refused.value) == (
        f"algorithm.{name} = 'another value' has no effect with algorithm.preference, which trains"
        " pairs and uses no advantages; leave it out"
    )


def test_a_correction_is_refused() -> None:
    assert refusal({"correction": {"mask_above": 2.0}}).startswith(
        "algorithm.correction.mask_above = 2.0 has no effect with algorithm.preference"
    )
    assert refusal({"loss": "gspo"}).startswith("algorithm.loss = 'gspo' has no effect with")


@pytest.mark.parametrize(
    ("algorithm", "sections", "message"),
    [
        (
            {"preference": {"max_pairs": 2}},
            {},
            "algorithm.preference.max_pairs = 2 only has an effect with algorithm.preference.pairs:"
            " margin; leave it out, or set that",
        ),
        (
            {"preference": {"weight_cap": None}},
            {"staleness": {"max_staleness": 2}},
            "algorithm.preference.weight_cap = null trains pairs without off-policy weights, and"
            " staleness.max_staleness = 2 is above 1; set weight_cap: 2, or"
            " algorithm.allow_uncorrected: true",
        ),
        (
            {"preference": {"missing_eos_penalty": 0.5}, "filter_zero_variance": True},
            {},
            "algorithm.filter_zero_variance compares rewards without missing_eos_penalty = 0.5, so"
            " it would filter groups that give a pair; leave one of them out",
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
            " the off-policy weight compares them with the learner's; leave it out, or set"
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
            " learner.max_tokens_per_gpu = 8, and the reference policy cannot split a row over"
            " ranks; raise that, or lower data.max_length",
        ),
        (
            {},
            {"warm_start": {"data": "w"}, "eval": {"data": "e"}},
            "algorithm.preference with warm_start would compare the policy with model.path, as it"
            " was before the warm start; name the reference policy in algorithm.ref_load, or train"
            " it with `asyncrl sft` and use it as model.path",
        ),
        (
            {"allow_uncorrected": True},
            {},
            "algorithm.allow_uncorrected = True only has an effect with an uncorrected loss; leave"
            " it out, or set that",
        ),
        (
            {"preference": {"loss": "hinge"}},
            {},
            "algorithm.preference.loss = 'hinge': input should be 'sigmoid' or 'ipo'",
        ),
        (
            {"preference": {"min_margin": 0}},
            {},
            "algorithm.preference.min_margin = 0: input should be greater than 0",
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
            "preference": {"loss": "ipo", "pairs": "margin", "max_pairs": 3, "weight_cap": None},
            "ref_load": "/reference",
            "ref_num_cpus": 0.5,
            "filter_zero_variance": True,
            "group_filter": "m:f",
            "allow_uncorrected": True,
        },
        rollout={"max_completion_length": 8, "top_p": 0.9},
    )
    assert config.algorithm.has_reference and config.models["algorithm.ref_load"] == "/reference"
    uncorrected = online({"preference": {"weight_cap": None}}, staleness={"max_staleness": 1})
    assert not uncorrected.algorithm.corrected and online().algorithm.corrected
    assert not small_config().algorithm.has_reference


def test_its_settings_have_names_and_reach_the_learner() -> None:
    assert "algorithm.preference.weight_cap" in field_names()
    config = online(
        {
            "preference": {
                "loss": "ipo",
                "beta": 0.3,
                "pairs": "margin",
                "min_margin": 0.2,
                "max_pairs": 3,
                "missing_eos_penalty": 0.4,
                "weight_cap": 1.5,
                "ce_coef": 0.6,
            }
        },
        staleness={"max_staleness": 4},
    )
    spec = learner_spec(config)
    assert spec.preference is not None and spec.pairs is not None
    loss, pairs = spec.preference, spec.pairs
    assert (loss.loss, loss.beta, loss.weight_cap, loss.ce_coef) == ("ipo", 0.3, 1.5, 0.6)
    assert (pairs.choice, pairs.min_margin, pairs.max_pairs) == ("margin", 0.2, 3)
    assert pairs.missing_eos_penalty == 0.4 and spec.max_staleness == 4
    plain = learner_spec(small_config())
    assert plain.preference is None and plain.pairs is None


@pytest.mark.parametrize(
    ("overrides", "beta", "weight_cap"),
    [
        (["--algorithm.preference.beta", "0.3"], 0.3, 2.0),
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
    assert (preference.beta, preference.weight_cap) == (beta, weight_cap)
    path.write_text(yaml.safe_dump({**SMALL, "algorithm": {"preference": {}}}))
    assert load_config(path, ["--algorithm.preference", "null"]).algorithm.preference is None
