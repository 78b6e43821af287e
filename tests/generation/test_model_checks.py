"""What `asyncrl plan` refuses of a run's generators is refused of a standing application too."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import ConfigError
from asyncrl.generation.model_checks import (
    LARGEST_CACHE,
    check_app,
    check_tokens_and_tensors,
    kv_width,
)
from asyncrl.generation.settings import GeneratorApp

CONTEXT = 8192
SHAPE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "head_dim": 64,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "max_position_embeddings": CONTEXT,
    "vocab_size": 49152,
}
"""An ordinary small model: 46,080 bytes of cache for a token."""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """`checkpoint(**changes)`: a folder whose config.json has this shape; its weights are empty."""

    def save(**changes: Any) -> Path:
        (tmp_path / "config.json").write_text(json.dumps({**SHAPE, **changes}))
        (tmp_path / "model.safetensors").touch()
        return tmp_path

    return save


def app(path: Path, generator: dict[str, Any] | None = None, **settings: Any) -> GeneratorApp:
    return GeneratorApp.model_validate(
        {"model": str(path), "generator": generator or {}, **settings}
    )


def test_an_ordinary_small_model_gets_a_cache_for_its_context(
    checkpoint: Callable[..., Path],
) -> None:
    path = checkpoint()
    assert kv_width(SHAPE, "float32", 1) == 46_080
    sized = check_app(app(path)).generator.kv_cache_memory_bytes
    assert sized == (CONTEXT + 128) * 46_080
    check_app(app(path, {"kv_cache_memory_bytes": sized}))
    with pytest.raises(ConfigError, match=f"raise it to {sized} or more") as refused:
        check_app(app(path, {"kv_cache_memory_bytes": sized - 1}))
    assert f"kv_cache_memory_bytes = {sized - 1}" in str(refused.value)


def test_a_short_request_keeps_the_usual_cache(checkpoint: Callable[..., Path]) -> None:
    path = checkpoint()
    assert check_app(app(path, max_model_len=512)).generator.kv_cache_memory_bytes == 256 << 20
    assert check_app(app(path, {"device": "cuda"})).generator.device == "cuda"


def test_the_cache_is_never_huge_without_being_told(checkpoint: Callable[..., Path]) -> None:
    path = checkpoint(max_position_embeddings=1 << 20)
    with pytest.raises(ConfigError, match=f"= {LARGEST_CACHE} has room for .* has {1 << 20}"):
        check_app(app(path))
    check_app(app(path, max_model_len=4096))


def test_a_model_of_other_layers_gets_the_most_that_they_may_need(
    checkpoint: Callable[..., Path],
) -> None:
    layers = ["sliding_attention"] * 29 + ["full_attention"]
    path = checkpoint(layer_types=layers, sliding_window=512)
    assert check_app(app(path)).generator.kv_cache_memory_bytes == (CONTEXT + 128) * 46_080


@pytest.mark.parametrize(
    ("changes", "settings", "line"),
    [
        ({}, {"max_model_len": 9000}, "max_model_len = 9000 is above the context of 8192 tokens"),
        ({}, {"generator": {"tensor_parallel_size": 2}}, "tensor_parallel_size = 2 does not fit"),
        (
            {},
            {"generator": {"pipeline_parallel_size": 31}},
            "pipeline_parallel_size = 31 is above the 30 layers",
        ),
        ({"head_dim": 48}, {}, "vLLM on CPU supports attention heads of"),
        ({"model_type": "lfm2"}, {}, "vLLM on CPU rotates its queries"),
        ({"model_type": "apertus"}, {}, "set dtype: bfloat16"),
        (
            {"model_type": "cohere2", "sliding_window": 4096},
            {},
            "a trajectory may have 8192; set max_model_len: 4096 or less",
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, {}, "does not predict the next"),
        ({"hidden_size": "wide"}, {}, "has hidden_size = 'wide'"),
    ],
)
def test_a_setting_that_the_engine_cannot_serve_is_one_line(
    checkpoint: Callable[..., Path], changes: Any, settings: Any, line: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check_app(app(checkpoint(**changes), **settings))
    assert line in str(refused.value) and "\n" not in str(refused.value)


def test_missing_files_are_named(tmp_path: Path, checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"No such file or directory \(config.json\)"):
        check_app(app(tmp_path / "nowhere"))
    (checkpoint() / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no model.safetensors"):
        check_app(app(tmp_path))


def test_quantized_weights_a_broken_tokenizer_and_unknown_stops_are_named(
    tiny_model: Path, tmp_path: Path
) -> None:
    check_tokens_and_tensors(app(tiny_model))
    path = shutil.copytree(tiny_model, tmp_path / "model")
    with pytest.raises(ConfigError, match="rollout_stop_token_ids"):
        check_tokens_and_tensors(app(path, rollout_stop_token_ids=[10**6]))
    tree = json.loads((path / "config.json").read_text())
    quantized = {**tree, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (path / "config.json").write_text(json.dumps(quantized))
    with pytest.raises(ConfigError, match="has a quantization_config"):
        check_tokens_and_tensors(app(path))
    broken = shutil.copytree(tiny_model, tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="tokenizer"):
        check_tokens_and_tensors(app(broken))
