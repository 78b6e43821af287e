"""Packed rows of any shape compared with transformers on one trajectory at a time, for two model
families: log-probs, losses, all gradients. Also: packed attention allocates no square matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llama_checkpoint import save_llama
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from asyncrl.algorithms.objective import policy_loss, supervised_loss
from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.config import PolicyGradient
from asyncrl.learning.packing.strategies import pack
from asyncrl.models import attention
from asyncrl.models.micro_batches import Example, micro_batch
from asyncrl.models.policy import Policy, load_policy
from asyncrl.models.segments import Segments

TEMPERATURE, VERSION = 0.8, 3
FAMILIES = ["qwen3", "llama", "llama with biases"]
LOSSES: dict[str, dict[str, Any] | None] = {
    "sft": None,
    "ppo": {"entropy_coef": 0.01},
    "decoupled ppo": {
        "loss": {"name": "ppo", "old_policy": "learner"},
        "correction": {
            "truncation": "token",
            "band": {"above": 1.3},
            "rejection": {"above": 0.01},
        },
    },
    "ppo, log-linear": {
        "loss": {"name": "ppo", "old_policy": "log_linear"},
        "correction": {"truncation": "sequence"},
    },
    "gspo": {
        "loss": {"name": "gspo", "eps_clip": 0.02, "eps_clip_high": 0.02},
        "reference": {"kl_loss_coef": 0.1},
    },
    "cispo": {"loss": "cispo"},
    "sapo": {"loss": "sapo"},
    "dppo": {"loss": "dppo"},
    "reinforce": {
        "loss": "reinforce",
        "correction": {"truncation": "sequence"},
    },
}


LOSSES_OF_FAMILIES = [
    pytest.param(
        family,
        loss,
        marks=[] if family == "qwen3" or loss in ("sft", "ppo") else [pytest.mark.slow],
    )
    for family in FAMILIES
    for loss in LOSSES
]
"""The arithmetic of a loss is the same for every family, so one family takes all losses."""

WIDE = {"initializer_range": 0.2}
"""Ten times the usual standard deviation of the weights. Attention is then selective, so a leak or
a wrong position has an effect far above rounding."""


@pytest.fixture(scope="module")
def checkpoints(
    tmp_path_factory: pytest.TempPathFactory, save_qwen3: Callable[..., Path]
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    biased = save_llama(folder / "biased", attention_bias=True, mlp_bias=True, **WIDE)
    return {
        "qwen3": save_qwen3(folder / "qwen3", tied=True, **WIDE),
        "llama": save_llama(folder / "llama", **WIDE),
        "llama with biases": biased,
    }


@cache
def rows(
    vocabulary: int = 64,
    lengths: tuple[int, ...] = (3, 4, 4, 9, 17, 17, 30, 90),
    longest: int = 0,
    common: bool = False,
) -> tuple[Example, ...]:
    """Trajectories of random tokens with gaps in their loss masks. With `common`, five more have a
    prefix or all of their tokens in common with others. `recorded` fills in the behavior
    log-probs."""
    draw = np.random.default_rng(1)
    made = [
        _row(draw, draw.integers(3, vocabulary, length))
        for length in (*lengths, *([longest] if longest else []))
    ]
    if not common:
        return tuple(made)
    long, short = made[7].tokens, made[6].tokens
    siblings = [
        np.concatenate([known, draw.integers(3, vocabulary, count)])
        for known, count in ((long[:60], 20), (long[:75], 5), (short[:12], 9), (short, 0))
    ]
    return (*made, *(_row(draw, tokens) for tokens in (*siblings, short[:20])))


def _row(draw: np.random.Generator, tokens: np.ndarray) -> Example:
    prompt = int(draw.integers(1, len(tokens) - 1))
    completion = len(tokens) - prompt
    mask = draw.random(completion) < 0.8
    mask[-1] = True
    versions = draw.integers(0, VERSION + 1, completion)
    return Example(
        tokens,
        prompt,
        mask,
        np.zeros(completion, np.float32),
        float(draw.normal()),
        versions.astype(np.int32),
        draw.normal(-4, 0.3, completion).astype(np.float32),
    )


def alone(model: PreTrainedModel, row: Example) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of a trajectory's loss tokens from transformers' own model, with only
    this trajectory in the batch."""
    tokens = torch.from_numpy(row.tokens)[None]
    logits = model(input_ids=tokens, use_cache=False).logits[0] / TEMPERATURE
    at = row.prompt_length + torch.from_numpy(np.flatnonzero(row.loss_mask))
    log_probs = logits.log_softmax(-1)[at - 1]
    return log_probs.gather(1, tokens[0, at][:, None])[:, 0], -(log_probs.exp() * log_probs).sum(1)


def behavior(model: PreTrainedModel, examples: Sequence[Example]) -> list[np.ndarray]:
    """Log-probs of each loss token under a nearby policy, so that some ratios are clipped and some
    are masked."""
    draw = np.random.default_rng(2)
    with torch.no_grad():
        return [
            alone(model, row)[0].numpy() + draw.normal(0, 0.15, row.loss_tokens).astype(np.float32)
            for row in examples
        ]


def recorded(model: PreTrainedModel, examples: Sequence[Example]) -> list[Example]:
    from dataclasses import replace

    def whole(row: Example, values: np.ndarray) -> np.ndarray:
        full = np.zeros(len(row.loss_mask), np.float32)
        full[row.loss_mask] = values
        return full

    return [
        replace(row, behavior_logprobs=whole(row, values))
        for row, values in zip(examples, behavior(model, examples), strict=True)
    ]


def one_by_one(
    model: PreTrainedModel,
    examples: Sequence[Example],
    weights: Sequence[float],
    algorithm: PolicyGradient | None,
) -> torch.Tensor:
    """The step's loss, computed one trajectory at a time. The gradients are in the model."""
    total = torch.zeros(())
    for row, weight in zip(examples, weights, strict=True):
        logprobs, entropy = alone(model, row)
        of_tokens = torch.full_like(logprobs, weight)
        if algorithm is None:
            loss = -(logprobs * of_tokens).sum()
        else:
            mask = row.loss_mask
            assert row.reference_logprobs is not None
            tokens = PolicyTokens(
                logprobs,
                torch.from_numpy(row.behavior_logprobs[mask]),
                torch.full_like(logprobs, row.advantage),
                of_tokens,
                torch.zeros(len(logprobs), dtype=torch.int64),
                1,
                torch.from_numpy(VERSION - row.versions[mask]).float(),
                torch.from_numpy(row.reference_logprobs[mask]) if algorithm.reference else None,
            )
            loss, _ = policy_loss(tokens, algorithm, entropy if algorithm.entropy_coef else None)
        loss.backward()
        total += loss.detach()
    return total


def packed(
    policy: Policy,
    examples: list[Example],
    weights: list[float],
    algorithm: PolicyGradient | None,
    plan: Any,
) -> torch.Tensor:
    """The step's loss, computed in the micro-batches of all ranks of a plan."""
    from dataclasses import replace

    total = torch.zeros(())
    for indices in (indices for rank in plan for indices in rank):
        batch = micro_batch(examples, indices, "cpu", weights, VERSION)
        if not (algorithm and algorithm.reference):
            batch = replace(batch, reference_logprobs=None)
        logprobs, entropy, _ = policy(batch)
        if algorithm is None:
            loss, _ = supervised_loss(logprobs, batch.weights)
        else:
            loss, _ = policy_loss(
                batch.policy_tokens(logprobs),
                algorithm,
                entropy if algorithm.entropy_coef else None,
            )
        loss.backward()
        total += loss.detach()
    return total


PLANS = {
    "all in one": lambda lengths: pack(lengths, 10_000).micro_batches,
    "one each": lambda lengths: [[[index] for index in range(len(lengths))]],
    "the tightest cap": lambda lengths: pack(lengths, max(lengths)).micro_batches,
    "three ranks": lambda lengths: pack(lengths, max(lengths) + 20, 3).micro_batches,
    "more ranks than trajectories": (
        lambda lengths: pack(lengths, 10_000, len(lengths) + 1).micro_batches
    ),
}


def off(found: torch.Tensor | None, wanted: torch.Tensor | None) -> float:
    """Largest difference of a parameter's gradient, relative to the largest element of the expected
    one."""
    assert found is not None and wanted is not None
    largest = float(wanted.abs().max())
    assert largest > 0, "the test needs a gradient that is not 0 everywhere"
    return float((found - wanted).abs().max()) / largest


@pytest.mark.parametrize(("family", "loss"), LOSSES_OF_FAMILIES)
def test_loss_and_gradient_equal_those_of_one_trajectory_at_a_time(
    checkpoints: dict[str, Path], family: str, loss: str
) -> None:
    algorithm = PolicyGradient.model_validate(LOSSES[loss]) if LOSSES[loss] is not None else None
    plain = AutoModelForCausalLM.from_pretrained(
        checkpoints[family], dtype=torch.float32, attn_implementation="sdpa"
    )
    policy = load_policy(
        str(checkpoints[family]),
        torch.float32,
        TEMPERATURE,
        entropy_gradient=algorithm is not None and algorithm.entropy_coef > 0,
    )
    examples = recorded(plain, rows(longest=600, common=True))
    draw = np.random.default_rng(3)
    weights = [
        float(draw.uniform(0.5, 1.5)) / sum(row.loss_tokens for row in examples) for row in examples
    ]
    expected = one_by_one(plain, examples, weights, algorithm)
    wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, plan in PLANS.items():
        policy.zero_grad(set_to_none=True)
        found = packed(
            policy, examples, weights, algorithm, plan([len(row.tokens) for row in examples])
        )
        torch.testing.assert_close(
            found,
            expected,
            atol=1e-5,
            rtol=1e-5,
            msg=lambda text, name=name: f"{name}: loss: {text}",
        )
        for parameter_name, parameter in policy.model.named_parameters():
            assert off(parameter.grad, wanted[parameter_name]) <= 1e-5, f"{name}: {parameter_name}"


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_equal_those_of_one_trajectory_at_a_time(
    checkpoints: dict[str, Path], family: str
) -> None:
    plain = AutoModelForCausalLM.from_pretrained(
        checkpoints[family], dtype=torch.float32, attn_implementation="sdpa"
    )
    policy = load_policy(str(checkpoints[family]), torch.float32, TEMPERATURE)
    examples = rows(longest=600, common=True)
    for name, plan in PLANS.items():
        for indices in (
            indices
            for rank in plan([len(row.tokens) for row in examples])
            for indices in rank
            if indices
        ):
            batch = micro_batch(examples, indices, "cpu")
            with torch.no_grad():
                expected = torch.cat([alone(plain, examples[index])[0] for index in batch.order])
                torch.testing.assert_close(
                    policy(batch)[0],
                    expected,
                    atol=1e-5,
                    rtol=0,
                    msg=lambda text, name=name: f"{name}: {text}",
                )


def mistral(implementation: str, window: int) -> PreTrainedModel:
    """A Llama with a sliding window in every layer, and no list of layer types in its config."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        sliding_window=window,
        initializer_range=0.2,
        attn_implementation=implementation,
    )
    return MistralForCausalLM(config)


@pytest.mark.parametrize("window", [1, 5, 90, 511, 530])
def test_a_sliding_window_matches_transformers(window: int) -> None:
    """Windows shorter and longer than the segments, and than the blocks of long segments."""
    plain, policy = (
        mistral("sdpa", window),
        Policy(mistral(attention.register_attention(), window), TEMPERATURE),
    )
    examples = rows(lengths=(3, 17, 17, 90), longest=1100)
    batch = micro_batch(examples, range(len(examples)), "cpu")
    logprobs, expected = (
        policy(batch)[0],
        torch.cat([alone(plain, examples[index])[0] for index in batch.order]),
    )
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
    direction = torch.linspace(-1, 1, len(expected)) / len(expected)
    for found in (logprobs, expected):
        (found * direction).sum().backward()
    for (name, one), (_, other) in zip(
        policy.model.named_parameters(), plain.named_parameters(), strict=True
    ):
        torch.testing.assert_close(
            one.grad,
            other.grad,
            atol=1e-5,
            rtol=1e-5,
            msg=lambda text, name=name: f"{name}: {text}",
        )


class Allocations(TorchDispatchMode):
    """Records every operation, including autograd's, and the shapes of its results."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.shapes += [
            (str(func), tuple(leaf.shape))
            for leaf in tree_leaves(result)
            if isinstance(leaf, torch.Tensor)
        ]
        return result

    def squares(self) -> list[tuple[str, tuple[int, ...]]]:
        """Results with two dimensions above 512. Only the number of tokens is that large, so these
        are tokens by tokens."""
        return [
            (name, shape) for name, shape in self.shapes if sum(size > 512 for size in shape) > 1
        ]


LONG = {"lengths": (149, 301, 301), "longest": 1301}
"""2,048 input tokens in total."""


def models(name: str, checkpoints: dict[str, Path]) -> PreTrainedModel:
    return (
        mistral(attention.register_attention(), 700)
        if name == "window"
        else load_policy(str(checkpoints[name]), torch.float32, TEMPERATURE).model
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3", "llama", "window"])
def test_no_mask_or_scores_of_tokens_by_tokens_exist(
    checkpoints: dict[str, Path], family: str, dtype: torch.dtype
) -> None:
    policy = Policy(models(family, checkpoints).to(dtype), TEMPERATURE)
    examples = rows(**LONG)
    batch = micro_batch(examples, range(len(examples)), "cpu")
    assert batch.input_ids.shape == (1, 2048)
    with Allocations() as allocations:
        policy(batch)[0].sum().backward()
    assert allocations.squares() == []
    names = {name for name, _ in allocations.shapes}
    assert {
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
    } <= names


def test_the_observer_detects_transformers_square_mask() -> None:
    examples = rows(**LONG)
    batch = micro_batch(examples, range(len(examples)), "cpu")
    with Allocations() as allocations:
        mistral("sdpa", 700)(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False
        )
    assert any(shape[-2:] == (2048, 2048) for _, shape in allocations.squares())


def test_heads_of_other_widths_for_keys_and_values_are_attended_in_blocks() -> None:
    """Multi-head latent attention has such heads, which torch's flash kernel does not support."""
    torch.manual_seed(0)
    length, heads = 1100, 2
    query, key, value = (
        torch.randn(1, heads, length, width, requires_grad=True) for width in (24, 24, 16)
    )
    module, segments = torch.nn.Module(), Segments.of([length], "cpu")
    with Allocations() as allocations:
        found, _ = attention.segment_attention(module, query, key, value, None, segments=segments)
        gradients = torch.autograd.grad(found.sum(), (query, key, value))
    assert allocations.squares() == []
    scores = (query @ key.transpose(2, 3) / 24**0.5).masked_fill(
        ~torch.ones(length, length, dtype=torch.bool).tril(), -torch.inf
    )
    expected = (scores.softmax(-1) @ value).transpose(1, 2)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    for one, other in zip(
        gradients, torch.autograd.grad(expected.sum(), (query, key, value)), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
