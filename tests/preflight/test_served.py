"""Models for which vLLM and transformers differ are refused before anything starts."""

import re

import pytest
from small_config import small_config

from asyncrl.generation.served import NOT_SERVED_ON_CPU, unusable
from asyncrl.preflight.resources.model_limits import refusal
from benchmarks.families import FAMILIES

BF16 = {"model": {"path": "m", "dtype": "bfloat16"}}
CUDA = {"generator": {"device": "cuda"}, "learner": {"device": "cuda"}}


@pytest.mark.parametrize("kind", NOT_SERVED_ON_CPU)
def test_models_that_differ_only_on_cpu_are_refused_only_there(kind):
    assert "vLLM on CPU" in refusal({"model_type": kind}, small_config())
    assert "generator.device: cuda" in refusal(
        {"model_type": "outer", "text_config": {"model_type": kind}}, small_config()
    )
    assert refusal({"model_type": kind}, small_config(**CUDA)) is None


def test_apertus_and_qwen3_next_need_bfloat16():
    for kind in ("apertus", "qwen3_next"):
        assert "set model.dtype: bfloat16" in refusal({"model_type": kind}, small_config())
        assert refusal({"model_type": kind}, small_config(**BF16)) is None


def test_cohere2_is_served_within_its_window():
    longest = small_config().longest_trajectory
    assert refusal({"model_type": "cohere2", "sliding_window": longest}, small_config()) is None
    assert refusal({"model_type": "cohere2"}, small_config()) is None
    assert f"set data.max_length: {longest - 1} or less" in refusal(
        {"model_type": "cohere2", "sliding_window": longest - 1}, small_config()
    )


def test_phimoe_is_served_only_without_a_head_bias():
    for config in (small_config(), small_config(**CUDA)):
        assert "ignores the bias of its head (lm_head_bias)" in refusal(
            {"model_type": "phimoe", "lm_head_bias": True}, config
        )
        assert refusal({"model_type": "phimoe", "lm_head_bias": False}, config) is None


@pytest.mark.parametrize(
    "layers",
    [{"layers_block_type": ["linear_attention", "moe"]}, {"hybrid_override_pattern": "ME*E"}, {}],
)
def test_nemotron_h_with_experts_is_not_served_on_cpu(layers):
    tree = {"model_type": "nemotron_h", **layers}
    assert "vLLM on CPU does not support experts without a gate" in refusal(tree, small_config())
    assert refusal(tree, small_config(**CUDA)) is None


@pytest.mark.parametrize(
    "layers",
    [{"layers_block_type": ["linear_attention", "mlp"]}, {"hybrid_override_pattern": "M-*-"}],
)
def test_nemotron_h_without_experts_is_served(layers):
    assert refusal({"model_type": "nemotron_h", **layers}, small_config()) is None


def test_mamba_2_is_trained_in_float32_on_cpu():
    assert "set learner.bf16: false" in refusal(
        {"model_type": "mamba2"}, small_config(learner={"bf16": True})
    )
    assert refusal({"model_type": "mamba2"}, small_config()) is None
    assert (
        refusal(
            {"model_type": "mamba2"},
            small_config(generator={"device": "cuda"}, learner={"device": "cuda", "bf16": True}),
        )
        is None
    )


GOOD = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64}


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        ([1], "contains list, not an object"),
        ({"architectures": ["LlamaForCausalLM"]}, "has no model_type"),
        (
            {**GOOD, "num_attention_heads": "two"},
            "has num_attention_heads = 'two', not a whole number",
        ),
        ({**GOOD, "hidden_size": 0}, "has hidden_size = 0"),
        ({**GOOD, "vocab_size": 1.5}, "has vocab_size = 1.5"),
        ({**GOOD, "num_key_value_heads": [2, "x"]}, r"has num_key_value_heads = \[2, 'x'\]"),
        ({**GOOD, "text_config": {"num_hidden_layers": True}}, "has num_hidden_layers = True"),
        ({"model_type": "llama"}, "has no architectures"),
        ({**GOOD, "architectures": "LlamaForCausalLM"}, "has no architectures"),
        (
            {**GOOD, "architectures": ["LlamaForSequenceClassification"]},
            "does not predict the next token",
        ),
        ({**GOOD, "architectures": ["Qwen2ForRewardModel"]}, "does not predict the next token"),
    ],
)
def test_an_unusable_config_json_is_explained(tree, reason):
    assert re.search(reason, unusable(tree))


def test_a_config_json_of_each_family_can_be_used():
    assert unusable(GOOD) is None and unusable({**GOOD, "num_key_value_heads": [1, 2]}) is None
    for made in FAMILIES.values():
        tree = {"architectures": ["SomeForCausalLM"], **made.config().to_dict()}
        assert unusable({**tree, "architectures": ["SomeForCausalLM"]}) is None, made.name


@pytest.mark.parametrize(
    ("tree", "size"),
    [
        ({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}, 16),
        ({"model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 2, "head_dim": 48}, 48),
        (
            {
                "model_type": "gemma3",
                "text_config": {"hidden_size": 96, "num_attention_heads": 8, "head_dim": 12},
            },
            12,
        ),
        ({"model_type": "gpt2", "n_embd": 48, "n_head": 3}, 16),
        ({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 2}, None),
        ({"model_type": "mamba", "hidden_size": 20}, None),
    ],
)
def test_unsupported_head_sizes_on_cpu_are_refused(tree, size):
    reason = refusal(tree, small_config())
    assert (
        reason is None
        if size is None
        else reason.endswith(
            f"and this model's have {size}; use generator.device: cuda, or another model"
        )
    )


def test_other_models_are_served():
    for kind in ("llama", "gpt_oss", "qwen3_moe", "gemma3_text", "falcon_h1", "granitemoehybrid"):
        assert refusal({"model_type": kind}, small_config()) is None
