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
    assert config.algorithm.has_reference and config.algorithm.loads_reference
    assert config.models["algorithm.distillation.teacher"] == "/teacher"
    assert reference_spec(config).path == "/teacher"
    assert reference_spec(config).temperature == config.rollout.temperature


def test_a_server_is_not_loaded() -> None:
    config = distilled({"teacher": URL})
    assert config.algorithm.has_reference and not config.algorithm.loads_reference
    assert list(config.models) == ["model.path"]
    assert config.reference_path == URL


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
        ({}, {"ref_load": "/other"}, {}, "algorithm.ref_load = '/other' has no effect"),
        ({}, {"kl_loss_coef": 0.1}, {}, "would add the teacher's divergence a second time"),
        ({"use": "ref_kl"}, {}, {}, "set algorithm.kl_loss_coef above 0"),
        ({"use": "ref_kl", "coef": 2.0}, {"kl_loss_coef": 1.0}, {}, "has no effect with use: ref"),
        ({}, {"loss": "gmpo"}, {}, "gives one advantage per token"),
        ({}, {"advantage": "rloo"}, {}, "algorithm.advantage has no effect with"),
        ({}, {"filter_zero_variance": True}, {}, "filter_zero_variance has no effect with"),
        ({}, {}, {"reward": {"shuffle": True}}, "reward.shuffle has no effect with"),
        ({"use": "top_k"}, {"kl_loss_coef": 0.1}, {}, "teacher's divergence a second time"),
        ({"use": "top_k"}, {"loss": "gspo"}, {}, "algorithm.loss has no effect with"),
        ({"use": "top_k"}, {"eps_clip": 0.1}, {}, "algorithm.eps_clip has no effect with"),
        ({"use": "top_k", "teacher": URL}, {}, {}, "a server only scores the sampled tokens"),
        ({"use": "top_k"}, {}, {"rollout": {"top_p": 0.9}}, "the metric distill/reverse_kl"),
        ({"top_k": 8}, {}, {}, "distillation.top_k = 8 has no effect with use: advantage"),
        ({"use": "top_k", "top_k": 129}, {}, {}, "less than or equal to 128"),
        ({"retries": 5}, {}, {}, "distillation.retries = 5 only has an effect with the URL"),
        ({}, {"preference": {}}, {}, "has no effect with algorithm.preference"),
        ({}, {}, {"rollout": {"top_p": 0.9}}, "the teacher's advantage compares"),
        ({"teacher": URL}, {}, {"rollout": {"temperature": 0.7}}, "are at temperature 1"),
        ({"teacher": URL}, {"ref_num_cpus": 1.0}, {}, "ref_num_cpus = 1 has no effect"),
        ({"teacher": "http://far:80/v1", "key_env": "K"}, {}, {}, "would send the key of K in"),
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
    config = distilled({"use": "top_k", "top_k": 8}, model={"path": str(tmp_path)})
    assert not config.algorithm.distillation.adds_advantage
    spec = reference_spec(config)
    assert (spec.top_k, spec.vocabulary) == (8, 77)
    assert reference_spec(distilled()).top_k == 0
    loss = {"loss": "gspo", "advantage": "rloo"}
    assert distilled({"use": "top_k", "reward_weight": 1.0}, loss).algorithm.loss == "gspo"


def test_a_checkpoint_is_scored_at_any_temperature() -> None:
    assert reference_spec(distilled(rollout={"temperature": 0.7})).temperature == 0.7
