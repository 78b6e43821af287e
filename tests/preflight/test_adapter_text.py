"""What the plan says of an adapter."""

from __future__ import annotations

import pytest

from asyncrl.config import ConfigError, LoraConfig, load_config
from asyncrl.preflight.resources.adapter import adapter_text, published_bytes, trained_elements
from asyncrl.preflight.resources.disk import checkpoint_bytes
from asyncrl.preflight.resources.memory_estimate import estimate
from asyncrl.weights.outline import outline


def test_an_adapters_size_is_that_of_the_matrices(tiny_model):
    """PEFT counts the elements."""
    from transformers import AutoModelForCausalLM

    from asyncrl.models.adapters import add_adapter

    for lora in (
        LoraConfig(r=3),
        LoraConfig(r=8, target_modules=["self_attn.q_proj", "down_proj"]),
        LoraConfig(r=2, use_dora=True),
    ):
        model = AutoModelForCausalLM.from_pretrained(tiny_model)
        add_adapter(model, lora, seed=0)
        trained = sum(part.numel() for part in model.parameters() if part.requires_grad)
        assert trained_elements(outline(tiny_model, lora=lora)) == trained


def test_the_plan_names_the_adapter_and_its_memory(write):
    whole, config = load_config(write({})), load_config(write({"lora": {"r": 4, "alpha": 8}}))
    version = outline(config.model.path, lora=config.lora)
    assert adapter_text(whole, version) == ""
    text = adapter_text(config, version)
    assert "rank 4, scale 2, on all-linear" in text and "at most 4 adapters in one batch" in text
    assert "generator.in_flight has no meaning" in text
    assert estimate(config).on_device < 0.6 * estimate(whole).on_device
    assert config.lora is not None
    size, trained = version.nbytes("float32"), trained_elements(version)
    assert published_bytes(whole, size) == size and published_bytes(config, size) == 4 * trained
    assert checkpoint_bytes(whole, size) == 3 * size
    assert checkpoint_bytes(config, size) == 12 * trained
    wrong = load_config(write({"lora": {"target_modules": ["q_prj"]}}))
    with pytest.raises(ConfigError, match=r"'q_prj' is not a linear layer of Qwen3ForCausalLM"):
        adapter_text(wrong, outline(wrong.model.path, lora=wrong.lora))
