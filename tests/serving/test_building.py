"""A standing application that cannot be built says why in one line, without a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.exceptions import RayServeException
from reward_checkpoint import save_reward_model

from asyncrl.serving.reward_model import build_reward_app
from asyncrl.serving.standing import build_standing_app

CONFIGS = Path(__file__).parents[2] / "serve_configs"

pytestmark = pytest.mark.usefixtures("own_serve")


def shipped(name: str, **changes: Any) -> dict[str, Any]:
    """The arguments of a shipped file, with changes."""
    (application,) = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())["applications"]
    return {**application["args"], **changes}


def test_the_shipped_file_serves_the_model_as_it_is(tiny_model: Path) -> None:
    app = build_standing_app(shipped("generator_cpu", model=str(tiny_model)))
    (arguments,) = app._bound_deployment.init_args
    assert arguments["generator"]["kv_cache_memory_bytes"] >= 256 << 20


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"generator": {"kv_cache_memory_bytes": 1}}, "generator.kv_cache_memory_bytes = 1 has"),
        (
            {"generator": {"kv_cache_memory_byte": 1 << 30}},
            "args: generator.kv_cache_memory_byte is unknown; did you mean"
            " generator.kv_cache_memory_bytes?",
        ),
        ({"generator": {"num_replicas": 0}, "sead": 1}, "args: generator.num_replicas = 0: "),
        ({"max_model_len": 10**7}, "max_model_len = 10000000 is above the context"),
        ({"generator": {"tensor_parallel_size": 3}}, "generator.tensor_parallel_size = 3 does"),
        (
            {"generator": {"attach": "generator"}},
            "args: generator.attach = 'generator' is a training job's setting",
        ),
    ],
)
def test_a_generator_that_cannot_be_served_is_refused_in_one_line(
    tiny_model: Path, changes: dict[str, Any], line: str
) -> None:
    with pytest.raises(RayServeException) as refused:
        build_standing_app(shipped("generator_cpu", **{"model": str(tiny_model), **changes}))
    assert str(refused.value).startswith(line) and "\n" not in str(refused.value)


def test_a_missing_setting_is_named() -> None:
    with pytest.raises(RayServeException, match="args: model is missing; set it"):
        build_standing_app({"http": True})


def broken_reward_model(path: Path, tiny_model: Path, **changes: Any) -> str:
    save_reward_model(path, tiny_model)
    tree = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**tree, **changes}))
    return str(path)


@pytest.mark.parametrize(
    ("changes", "settings", "line"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, {}, "its config.json has architectures"),
        ({"id2label": {"0": "bad", "1": "good"}}, {}, "and 2 labels"),
        ({"quantization_config": {"bits": 4}}, {}, "has a quantization_config"),
        ({"max_position_embeddings": 64}, {"max_tokens": 65}, "max_tokens = 65 is above"),
        ({}, {"max_batch": 3}, "max_batch is unknown; did you mean max_batch_size?"),
    ],
)
def test_a_reward_model_that_cannot_be_served_is_refused_in_one_line(
    tiny_model: Path, tmp_path: Path, changes: Any, settings: Any, line: str
) -> None:
    model = broken_reward_model(tmp_path / "model", tiny_model, **changes)
    with pytest.raises(RayServeException) as refused:
        build_reward_app(shipped("reward_model", model=model, device="cpu", **settings))
    assert line in str(refused.value) and "\n" not in str(refused.value)


def test_a_reward_model_without_weights_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    model = Path(broken_reward_model(tmp_path / "model", tiny_model))
    build_reward_app(shipped("reward_model", model=str(model), device="cpu"))
    (model / "model.safetensors").unlink()
    with pytest.raises(RayServeException, match=r"has no model.safetensors"):
        build_reward_app(shipped("reward_model", model=str(model), device="cpu"))
