"""Log-probs that transformers computes, as the reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


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
