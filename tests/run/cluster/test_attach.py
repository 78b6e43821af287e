"""What a run requires of standing generators before it leases them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config, GeneratorConfig, LoraConfig
from asyncrl.contracts.messages import ReplicaStatus
from asyncrl.generation.settings import GeneratorApp
from asyncrl.run.cluster.attach import AttachError, check_fits
from asyncrl.run.cluster.placement import needed
from asyncrl.testing.generators import fake_status
from asyncrl.text.stops import load_stops
from asyncrl.text.tokenizer import load_tokenizer, tokenizer_hash
from asyncrl.weights.manifest import expected_tensors, layout_hash
from asyncrl.weights.stored import weights_hash


def config(model: Path, **rollout: Any) -> Config:
    return Config.model_validate(
        {
            "name": "second",
            "max_steps": 3,
            "model": {"path": str(model)},
            "data": {"train": "train.parquet", "max_prompt_length": 20},
            "rollout": {"max_completion_length": 8, **rollout},
            "reward": {"functions": {"exact": {"function": "package.module:function"}}},
            "generator": {"attach": "standing"},
        }
    )


def status(model: Path, dtype: str = "float32") -> ReplicaStatus:
    tokenizer = load_tokenizer(str(model))
    stops = load_stops(model, tokenizer)
    return replace(
        fake_status("a"),
        parameters=layout_hash(expected_tensors(model, dtype)),
        max_model_len=100,
        stop_token_ids=tuple(sorted(stops.tokens)),
        stop_strings=tuple(sorted(stops.strings)),
        tokenizer=tokenizer_hash(tokenizer),
        base_weights=weights_hash(model),
    )


def with_adapter(run: Config, max_staleness: int = 1) -> Config:
    staleness = run.staleness.model_copy(update={"max_staleness": max_staleness})
    return run.model_copy(update={"lora": LoraConfig(r=16), "staleness": staleness})


def test_generators_of_the_same_model_fit(tiny_model: Path) -> None:
    check_fits(
        config(tiny_model),
        "standing",
        GeneratorApp(model="elsewhere", http=True),
        status(tiny_model),
        85,
    )


def test_generators_of_adapters_fit_with_enough_rank_and_places(tiny_model: Path) -> None:
    app = GeneratorApp(model="elsewhere", http=True, max_lora_rank=16, max_loras=3)
    check_fits(with_adapter(config(tiny_model)), "standing", app, status(tiny_model), 85)
    with pytest.raises(
        AttachError,
        match=r"has max_loras = 3, but a run with staleness\.max_staleness = 2 uses 4 adapters",
    ):
        check_fits(with_adapter(config(tiny_model), 2), "standing", app, status(tiny_model), 85)


def test_adapters_need_the_same_weights_under_them(tiny_model: Path, tmp_path: Path) -> None:
    """Whole weights are replaced by the run's first version."""
    other = shutil.copytree(tiny_model, tmp_path / "other")
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    app = GeneratorApp(model="elsewhere", http=True)
    adapters = app.model_copy(update={"max_lora_rank": 16})
    trained_before = status(other)
    check_fits(config(tiny_model), "standing", app, replace(trained_before, base_weights=""), 85)
    check_fits(with_adapter(config(other)), "standing", adapters, trained_before, 85)
    with pytest.raises(
        AttachError, match=r"has other weights under its adapters \('elsewhere'\) than model.path ="
    ) as refused:
        check_fits(with_adapter(config(tiny_model)), "standing", adapters, trained_before, 85)
    assert "\n" not in str(refused.value)


def test_a_mismatch_is_named(tiny_model: Path, untied_model: Path) -> None:
    app = GeneratorApp(model="elsewhere", http=True)
    for run, held, standing, tokens, text in (
        (
            config(tiny_model),
            app.model_copy(update={"dtype": "bfloat16"}),
            status(tiny_model),
            85,
            "uses bfloat16, but the run publishes model.dtype = 'float32'",
        ),
        (
            config(tiny_model),
            app,
            status(untied_model),
            85,
            "has different parameters from model.path = ",
        ),
        (
            config(tiny_model),
            app,
            status(tiny_model),
            101,
            "accepts 100 tokens, but the run's longest request has 101",
        ),
        (
            config(tiny_model, rollout_stop_token_ids=[7]),
            app,
            status(tiny_model),
            85,
            r"ends completions at tokens \[2\] and strings \[\], but the run at \[2, 7\]",
        ),
        (
            config(tiny_model, rollout_stop=["12"]),
            app,
            status(tiny_model),
            85,
            r"ends completions .* the run at \[2\] and \['12'\]",
        ),
        (
            config(tiny_model),
            app,
            replace(status(tiny_model), tokenizer="another"),
            85,
            "has a different tokenizer from model.path",
        ),
        (
            config(tiny_model),
            app.model_copy(update={"max_lora_rank": 8}),
            status(tiny_model),
            85,
            "has max_lora_rank = 8, but the run has lora.r = None",
        ),
        (
            config(tiny_model).model_copy(update={"lora": LoraConfig(r=16)}),
            app.model_copy(update={"max_lora_rank": 8}),
            status(tiny_model),
            85,
            "has max_lora_rank = 8, but the run has lora.r = 16",
        ),
        (
            config(tiny_model).model_copy(update={"lora": LoraConfig(r=16)}),
            app,
            status(tiny_model),
            85,
            "has max_lora_rank = None, but the run has lora.r = 16",
        ),
    ):
        with pytest.raises(AttachError, match=f"generator.attach = 'standing' {text}"):
            check_fits(run, "standing", held, standing, tokens)


def test_an_attached_run_requests_no_resources_for_generators(tiny_model: Path) -> None:
    attached = config(tiny_model)
    own = attached.model_copy(update={"generator": GeneratorConfig()})
    assert needed(own)["CPU"] == pytest.approx(needed(attached)["CPU"] + 0.4)
