"""A short run with a Llama-shaped model: sharded, untied, with a BPE tokenizer and a chat
template. Further runs have other models and custom functions."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llama_checkpoint import BOS, END, EOS, SPECIAL
from run_variables import PYTHON_PATH, ROOT

import asyncrl


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_another_family_trains_from_chat_prompts_to_a_plain_checkpoint(
    start_run: Callable[..., Any], llama_model: Path, tmp_path: Path
) -> None:
    changes = {
        "model.path": str(llama_model),
        "max_steps": 3,
        "data.apply_chat_template": True,
        "data.max_prompt_length": 24,
        "weights.check_every_versions": 1,
        "checkpoint.every_steps": 3,
    }
    run = start_run(changes)
    assert run.wait(800) == 0, run.output
    assert run.gone() == []

    directory = tmp_path / "runs" / "run"
    finished = asyncrl.open_run(directory)
    checks = [record["check/logprob_max_diff"] for record in finished.records("logprob_check")]
    assert len(checks) >= 3 and max(checks) <= 1e-4, checks
    assert len(finished.records("step")) == 3 and len(list(llama_model.glob("*.safetensors"))) > 3

    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(directory / "hf")
    groups = finished.groups().to_pylist()
    assert groups
    for group in groups:
        text = group["prompt_text"]
        assert text.startswith(f"{BOS}<|user|>") and text.endswith(f"{END}<|assistant|>")
        assert (
            group["prompt_ids"] == tokenizer(text, add_special_tokens=False)["input_ids"]
            and group["prompt_ids"].count(SPECIAL.index(BOS)) == 1
        )

    before, after = (
        AutoModelForCausalLM.from_pretrained(path) for path in (llama_model, directory / "hf")
    )
    assert type(after) is type(before) and not after.config.tie_word_embeddings
    weights = after.state_dict()
    assert all(
        (parameter != weights[name]).any() for name, parameter in before.state_dict().items()
    ), "every parameter has been trained"
    assert (weights["lm_head.weight"] != weights["model.embed_tokens.weight"]).any()
    ends = {SPECIAL.index(EOS), SPECIAL.index(END)}
    assert set(GenerationConfig.from_pretrained(directory / "hf").eos_token_id) == ends
    question = [{"role": "user", "content": "3+4="}]
    assert (
        tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
        == f"{BOS}<|user|>3+4={END}<|assistant|>"
    )

    evaluated = subprocess.run(
        [sys.executable, "-m", "jobs.evaluate", directory],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": PYTHON_PATH},
    )
    assert evaluated.returncode == 0, evaluated.stdout + evaluated.stderr
    assert "held-out greedy accuracy on " in evaluated.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_mixture_trains_with_own_functions_and_exports_under_its_names(
    start_run: Callable[..., Any], tmp_path: Path
) -> None:
    """The experts are one parameter in the learner, three tensors each in the checkpoint, and one
    parameter in vLLM. Each of two ranks has half of it, and so has each of the engine's two
    workers. The loss, the advantage and the group filter are a user's."""
    import torch
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    from benchmarks.families import family

    model = family("qwen3_moe").save(tmp_path / "model", max_shard_size="60KB")
    changes = {
        "model.path": str(model),
        "max_steps": 2,
        "learner.world_size": 2,
        "generator.tensor_parallel_size": 2,
        "data.max_prompt_length": 40,
        "weights.bucket_bytes": 65536,
        "weights.check_every_versions": 1,
        "checkpoint.every_steps": 2,
        "algorithm": {
            name: f"algorithms_for_runs:{own}"
            for name, own in (
                ("loss", "weighed"),
                ("advantage", "doubled"),
                ("group_filter", "unequal"),
            )
        },
    }
    run = start_run(changes)
    assert run.wait(800) == 0, run.output
    assert run.gone() == []
    directory = tmp_path / "runs" / "run"
    finished = asyncrl.open_run(directory)
    checks = [record["check/logprob_max_diff"] for record in finished.records("logprob_check")]
    assert len(checks) >= 3 and max(checks) <= 1e-4, checks
    assert [record["loss/halved"] for record in finished.records("step")] == [0.5, 0.5]
    outcomes = {ended["ordinal"]: ended["outcome"] for ended in finished.outcomes().to_pylist()}
    for group in finished.groups().to_pylist():
        rewards, outcome = group["reward"], outcomes.get(group["ordinal"], "waiting")
        assert group["advantage"] == pytest.approx(
            [2 * (reward - sum(rewards) / len(rewards)) for reward in rewards]
        )
        assert outcome != ("filtered" if len(set(rewards)) > 1 else "trained")

    def names(path: Path) -> dict[str, list[int]]:
        found = {}
        for file in path.glob("model-*.safetensors"):
            with safe_open(file, "np") as tensors:
                # safetensors' file is not a mapping.
                found |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
        return found

    assert names(directory / "hf") == names(
        model
    ) and "model.layers.1.mlp.experts.3.up_proj.weight" in names(model)
    before, after = (
        dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
        for path in (model, directory / "hf")
    )
    assert all((parameter != after[name]).any() for name, parameter in before.items()), (
        "every parameter has been trained"
    )
    exported = subprocess.run(
        [sys.executable, "-m", "asyncrl.cli", "export", directory],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert exported.returncode == 0, exported.stderr
    saved = dict(
        AutoModelForCausalLM.from_pretrained(
            directory / "export" / "step_000002"
        ).named_parameters()
    )
    assert names(directory / "export" / "step_000002") == names(model)
    assert all(torch.equal(parameter, saved[name]) for name, parameter in after.items())


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_rewards_for_each_token_code_in_the_sandbox_and_stop_strings_in_one_run(
    start_run: Callable[..., Any], llama_model: Path, tmp_path: Path
) -> None:
    functions = {
        "digits": {"function": "rewards_for_runs:digit_tokens", "per_token": True},
        "code": {"function": "rewards_for_runs:runs_code", "weight": 0.0},
    }
    changes = {
        "model.path": str(llama_model),
        "max_steps": 2,
        "data.apply_chat_template": True,
        "data.system_prompt": "Add.",
        "data.max_prompt_length": 32,
        "rollout.rollout_stop": ["7"],
        "reward.functions": functions,
        "reward.sandbox": {"level": "landlock"},
        "algorithm.advantage": "gae",
        "weights.check_every_versions": 1,
        "checkpoint.every_steps": 2,
    }
    run = start_run(changes)
    assert run.wait(800) == 0, run.output
    assert run.gone() == []
    directory = tmp_path / "runs" / "run"
    finished = asyncrl.open_run(directory)
    assert (
        max(record["check/logprob_max_diff"] for record in finished.records("logprob_check"))
        <= 1e-4
    )
    groups = finished.groups().to_pylist()
    texts = [text for group in groups for text in group["completion_text"]]
    assert all("7" not in text[:-1] for text in texts), "a stop string ends a completion"
    for group in groups:
        assert group["prompt_text"].startswith(f"{BOS}<|system|>Add.{END}<|user|>")
        assert [part["code"] for part in group["reward_parts"]] == [1.0] * len(
            group["completion_ids"]
        )
        for reward, tokens, ids in zip(
            group["reward"], group["token_rewards"], group["completion_ids"], strict=True
        ):
            assert len(tokens) == len(ids) and sum(tokens) == pytest.approx(reward)
    audited = subprocess.run(
        [sys.executable, "-m", "asyncrl.cli", "audit", directory],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert audited.returncode == 0, audited.stdout


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_a_hybrid_with_recurrent_layers_trains_one_trajectory_at_a_time_with_vllm(
    start_run: Callable[..., Any], tmp_path: Path
) -> None:
    from benchmarks.families import family

    model = family("falcon_h1").save(tmp_path / "model")
    changes = {
        "model.path": str(model),
        "max_steps": 2,
        "data.max_prompt_length": 40,
        "weights.check_every_versions": 1,
        "checkpoint.every_steps": 2,
    }
    run = start_run(changes)
    assert run.wait(800) == 0, run.output
    assert run.gone() == []
    finished = asyncrl.open_run(tmp_path / "runs" / "run")
    checks = [record["check/logprob_max_diff"] for record in finished.records("logprob_check")]
    assert len(checks) >= 3 and max(checks) <= 1e-4, checks
    assert len(finished.records("step")) == 2
