"""The head in float32 with a bfloat16 model, and chunks of logits limited by memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recorded import learner_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asyncrl.algorithms.logit_chunks import LIVE_CHUNKS
from asyncrl.config import LearnerConfig
from asyncrl.models.micro_batches import micro_batch, token_example
from asyncrl.models.policy import Policy, head_settings, load_policy
from benchmarks.families import VOCABULARY, family

BATCH = micro_batch(
    [token_example(([5], np.random.default_rng(0).integers(4, 260, 30).tolist()))], [0], "cpu"
)


def policy_of(path: Path, dtype: torch.dtype, **settings: Any) -> Policy:
    return load_policy(str(path), dtype, 1.0, head=head_settings(LearnerConfig(**settings)))


def exact(policy: Policy) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the batch, and the gradient of their sum for the head's weight, computed in
    float64 from the policy's hidden states."""
    taken: list[torch.Tensor] = []
    hook = policy.model.model.norm.register_forward_hook(
        lambda module, inputs, output: taken.append(output.detach())
    )
    policy(BATCH)
    hook.remove()
    weight = policy.model.lm_head.weight.detach().double().requires_grad_()
    logits = taken[0][0, BATCH.select].double() @ weight.T
    logprobs = logits.log_softmax(-1).gather(1, BATCH.targets[:, None])[:, 0]
    logprobs.sum().backward()
    assert weight.grad is not None
    return logprobs.detach(), weight.grad


def test_a_float32_head_avoids_the_rounding_of_a_bfloat16_head(tmp_path: Path) -> None:
    path = family("llama").save(tmp_path)
    off = {}
    for fp32 in (False, True):
        policy = policy_of(path, torch.bfloat16, bf16=True, cast_lm_head_to_fp32=fp32)
        logprobs, gradient = exact(policy)
        found = policy(BATCH)[0]
        found.sum().backward()
        weight = policy.model.lm_head.weight
        assert weight.dtype == weight.grad.dtype == torch.bfloat16
        torch.testing.assert_close(
            weight.grad.double(), gradient, atol=0.05 * float(gradient.abs().max()), rtol=0.05
        )
        off[fp32] = float((found - logprobs).detach().abs().max())
    assert off[True] < 1e-5 < 1e-3 < off[False]


def test_the_setting_is_refused_without_effect(model_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=(r"learner\.cast_lm_head_to_fp32 = True only has an effect with learner\.bf16: true"),
    ):
        learner_config(model_path, cast_lm_head_to_fp32=True)


class LogitRows(TorchDispatchMode):
    """Records the number of rows of every tensor of logits that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.row_counts: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        # The transposed head has the same columns, but more rows.
        self.row_counts += [
            leaf.shape[0]
            for leaf in made
            if leaf.ndim == 2
            and leaf.shape[1] == VOCABULARY
            and leaf.shape[0] <= len(BATCH.targets)
        ]
        return result


@pytest.mark.parametrize(
    ("memory", "rows"),
    [
        (LIVE_CHUNKS * 4 * VOCABULARY * 4, 4),
        (LIVE_CHUNKS * 4 * VOCABULARY * 4 - 1, 3),
        (1, 1),
        (1 << 30, 30),
    ],
)
def test_chunks_are_as_large_as_their_memory_allows(tmp_path: Path, memory: int, rows: int) -> None:
    path = family("llama").save(tmp_path, hidden_size=32, num_attention_heads=1)
    policy, whole = (
        policy_of(path, torch.float32, logprob_memory_bytes=memory),
        policy_of(path, torch.float32),
    )
    with LogitRows() as made:
        logprobs = policy(BATCH)[0]
        greedy = policy(BATCH, greedy=True)[0]
        logprobs.sum().backward()
    assert max(made.row_counts) == rows
    torch.testing.assert_close(logprobs, whole(BATCH)[0], atol=1e-6, rtol=0)
    assert torch.equal(greedy, whole(BATCH, greedy=True)[0])
