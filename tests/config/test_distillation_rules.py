"""Distillation in the config: what it refuses, and what follows from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from small_config import SMALL, small_config

from asyncrl.config import Config, explain
from asyncrl.preflight.specs import reference_spec

URL = "http://127.0.0.1:8000/v1"


def distilled(
    distillation: dict[str, Any] | None = None,
    algorithm: dict[str, Any] | None = None,
    **sections: Any,
) -> Config:
    tree = {"distillation": {"teacher": "/teacher", **(distillation or {})}, **(algorithm or {})}
    changed = {name: {**SMALL.get(name, {}), **section} for name, section in sections.items()}
    config: Config = small_config(algorithm=tree, **changed)
    return config


def test_the_teacher_is_the_frozen_policy_of_the_run() -> None:
    config = distilled()
    assert config.algorithm.has_reference and config.algorithm.frozen is not None
    assert config.models["algorithm.distillation.teacher"] == "/teacher"
    assert reference_spec(config).reference_path == "/teacher"
    assert reference_spec(config).temperature == config.rollout.temperature


def test_a_server_is_not_loaded() -> None:
    config = distilled({"teacher": URL})
    assert config.algorithm.has_reference and config.algorithm.frozen is None
    assert list(config.models) == ["model.path"]
    assert config.algorithm.distillation.teacher_text == URL
    assert distilled({"teacher": {"url": URL, "retries": 3}}).algorithm.frozen is None


def test_a_relative_teacher_becomes_absolute(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert distilled({"teacher": "./here/hf"}).reference_path == str(tmp_path / "here/hf")
    monkeypatch.setenv("ASYNCRL_RUNS", str(tmp_path / "runs"))
    runs = distilled({"teacher": "{runs_root}/x/hf"})
    assert runs.reference_path == str(tmp_path / "runs/x/hf")


def test_one_completion_per_prompt_suffices_without_rewards() -> None:
    one = {"n_samples_per_prompt": 1}
    assert not distilled(rollout=one).algorithm.compares_siblings
    with pytest.raises(ValidationError, match="n_samples_per_prompt = 1 is too low"):
        distilled({"reward_weight": 1.0}, rollout=one)


@pytest.mark.parametrize(
    ("distillation", "algorithm", "sections", "message"),
    [
        (
            {},
            {"reference": {"kl_loss_coef": 0.1, "ref_load": "/other"}},
            {},
            "algorithm.reference has no effect with algorithm.distillation, whose teacher replaces"
            " the reference policy; leave it out, or write algorithm: {distillation: {use: {name:"
            " ref_kl, kl: {kl_loss_coef: …}}}}",
        ),
        ({}, {"kl_loss_coef": 0.1}, {}, "kl_loss_coef has moved; write algorithm: {reference: {kl"),
        ({"use": "ref_kl"}, {}, {}, "algorithm.distillation.use.kl is missing; set it"),
        (
            {"use": {"name": "ref_kl", "kl": {}}},
            {},
            {},
            "algorithm.distillation.use.kl: give one of kl_loss_coef, kl_coef",
        ),
        (
            {"use": {"name": "ref_kl", "kl": {"kl_loss_coef": 1.0}, "coef": 2.0}},
            {},
            {},
            "use.coef has no effect with use: ref_kl; leave it out, or use it with use: advantage",
        ),
        (
            {"use": {"name": "ref_kl", "kl": {"kl_coef": 0.1}}},
            {},
            {},
            "algorithm.distillation.use.kl.kl_coef = 0.1 has no effect with reward_weight = 0,"
            " which only measures rewards; use kl_loss_coef",
        ),
        (
            {"use": {"name": "ref_kl", "kl": {"kl_coef": 0.1}}, "reward_weight": 1.0},
            {},
            {},
            "algorithm.distillation.use.kl.kl_coef = 0.1 does not work with advantage: grpo",
        ),
        (
            {},
            {"loss": "gmpo"},
            {},
            "algorithm.distillation.use: advantage gives each token an advantage of its own, and"
            " loss: gmpo needs one per trajectory; leave one of them out",
        ),
        (
            {},
            {"correction": {"sequence_mask": {"above": 0.1}}},
            {},
            "algorithm.correction.sequence_mask needs one per trajectory",
        ),
        ({}, {"advantage": "rloo"}, {}, "algorithm.advantage has no effect with"),
        ({}, {"advantage": {"turns": {"coef": 1}}}, {}, "algorithm.advantage has no effect with"),
        ({}, {"filter_zero_variance": True}, {}, "filter_zero_variance has no effect with"),
        ({}, {}, {"reward": {"shuffle": True}}, "reward.shuffle has no effect with"),
        (
            {"use": "top_k"},
            {"reference": {"kl_loss_coef": 0.1}},
            {},
            "algorithm.reference has no effect with algorithm.distillation",
        ),
        ({"use": "top_k"}, {"loss": "gspo"}, {}, "algorithm.loss has no effect with"),
        (
            {"use": "top_k"},
            {"loss": {"eps_clip": 0.1}},
            {},
            "algorithm.loss has no effect with algorithm.distillation.use: top_k and",
        ),
        (
            {"use": "top_k"},
            {"correction": {"band": {"above": 2.0}}},
            {},
            "algorithm.correction has no effect with",
        ),
        (
            {"use": "top_k", "teacher": URL},
            {},
            {},
            f"algorithm.distillation.use: top_k does not work with the teacher at {URL}: a server"
            " only scores the sampled tokens",
        ),
        ({"use": "top_k"}, {}, {"rollout": {"top_p": 0.9}}, "the metric distill/reverse_kl"),
        ({"top_k": 8}, {}, {}, "top_k has moved; write algorithm: {distillation: {use: {name: top"),
        (
            {"use": {"top_k": 8}},
            {},
            {},
            "use.top_k has no effect with use: advantage; leave it out, or use it with use: top_k",
        ),
        ({"use": {"name": "top_k", "top_k": 129}}, {}, {}, "less than or equal to 128"),
        (
            {"retries": 5},
            {},
            {},
            "write algorithm: {distillation: {teacher: {url: …, retries: …}}}",
        ),
        *(
            (
                {"teacher": {"path": "/teacher", name: value}},
                {},
                {},
                f"algorithm.distillation.teacher.{name} has no effect with"
                " algorithm.distillation.teacher.path; leave one of them out",
            )
            for name, value in (
                ("model", "m"),
                ("key_env", "K"),
                ("timeout_s", 1),
                ("retries", 5),
                ("at_once", 1),
            )
        ),
        (
            {},
            {"preference": {}},
            {},
            "algorithm.distillation.teacher has no effect with algorithm.preference; leave one of"
            " them out",
        ),
        ({}, {}, {"rollout": {"top_p": 0.9}}, "the teacher's advantage compares"),
        ({"teacher": URL}, {}, {"rollout": {"temperature": 0.7}}, "are at temperature 1"),
        (
            {"teacher": {"url": URL, "num_cpus": 1.0}},
            {},
            {},
            "teacher.num_cpus has no effect with algorithm.distillation.teacher.url; leave one of",
        ),
        ({"teacher": {"url": URL, "path": "/t"}}, {}, {}, "teacher: give only one of url, path"),
        ({"teacher": {"retries": 1}}, {}, {}, "distillation.teacher: give one of url, path"),
        (
            {"teacher": {"url": "http://far:80/v1", "key_env": "K"}},
            {},
            {},
            "algorithm.distillation.teacher.url = 'http://far:80/v1' would send the key of K in the"
            " clear; use https",
        ),
    ],
)
def test_what_would_have_no_effect_or_a_wrong_one_is_refused(
    distillation: dict[str, Any],
    algorithm: dict[str, Any],
    sections: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(ValidationError) as refused:
        distilled(distillation, algorithm, **sections)
    assert message in explain(refused.value)


def test_the_teacher_of_top_k_returns_ids_of_the_learners_model(tmp_path: Path) -> None:
    tree = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 77}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    config = distilled({"use": {"name": "top_k", "top_k": 8}}, model={"path": str(tmp_path)})
    assert not config.algorithm.distillation.adds_advantage
    spec = reference_spec(config)
    assert (spec.top_k, spec.vocabulary) == (8, 77)
    assert reference_spec(distilled()).top_k == 0
    loss = {"loss": "gspo", "advantage": "rloo"}
    assert distilled({"use": "top_k", "reward_weight": 1.0}, loss).algorithm.loss.name == "gspo"


def test_a_kl_term_with_the_teacher_takes_its_settings() -> None:
    kl = {"kl_loss_coef": 0.1, "estimator": "k1"}
    found = distilled({"use": {"name": "ref_kl", "kl": kl}}).algorithm
    assert (found.kl.coef, found.kl.estimator, found.reference) == (0.1, "k1", None)
    in_reward = {"use": {"name": "ref_kl", "kl": {"kl_coef": 0.1}}, "reward_weight": 1.0}
    assert distilled(in_reward, {"advantage": "rloo"}).algorithm.kl_coef == 0.1


def test_a_checkpoint_is_scored_at_any_temperature() -> None:
    assert reference_spec(distilled(rollout={"temperature": 0.7})).temperature == 0.7
