"""Log-probs that transformers computes, as the reference."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Adapted = tuple[Any, dict[str, Any], dict[str, object]]
"""PEFT's model, the adapter's matrices by name, and its settings."""


@pytest.fixture(scope="session")
def reference() -> Callable[[Any, tuple[int, ...], tuple[int, ...]], Any]:
    """`reference(model, prompt_ids, completion_ids, temperature=1)`: log-probs [T] of the
    completion's tokens."""
    import torch

    def logprobs(
        model: Any, prompt: tuple[int, ...], completion: tuple[int, ...], temperature: float = 1.0
    ) -> Any:
        with torch.no_grad():
            logits = (
                model(torch.tensor([[*prompt, *completion]]), use_cache=False).logits[0].float()
            )
        chosen = torch.tensor(completion)[:, None]
        return torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, -1).gather(1, chosen)[
            :, 0
        ]

    return logprobs


@pytest.fixture
def load_reference() -> Callable[[Path], Any]:
    """A fresh transformers model of a checkpoint, fp32."""

    def load(path: Path) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    return load


@pytest.fixture(scope="session")
def adapted(tiny_model: Path) -> Callable[..., Adapted]:
    """`adapted(seed, r=4, use_rslora=False)`: a model with a random adapter, made by PEFT."""
    import torch
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    def make(seed: int, r: int = 4, use_rslora: bool = False) -> Adapted:
        base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        model = get_peft_model(
            base, LoraConfig(r=r, lora_alpha=8, target_modules="all-linear", use_rslora=use_rslora)
        ).eval()
        drawn = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, part in model.named_parameters():
                if "lora_" in name:
                    part.copy_(torch.randn(part.shape, generator=drawn) * 0.2)
        settings = model.peft_config["default"].to_dict()
        plain = json.loads(json.dumps(settings, default=sorted))  # as in adapter_config.json
        return model, get_peft_model_state_dict(model), plain

    return make
