"""Packed and unpacked rows give equal log-probs and gradients, and unsupported models are
refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from asyncrl.models.attention import register_attention
from asyncrl.models.micro_batches import Example, micro_batch
from asyncrl.models.policy import Policy
from asyncrl.models.segments import Segments

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def model_of(family: str, implementation: str, **more: object) -> PreTrainedModel:
    torch.manual_seed(0)
    config, kind = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[family]
    extra = {"head_dim": 8} if family == "qwen3" else {}
    return kind(
        config(**SIZES, **extra, **more, initializer_range=0.2, attn_implementation=implementation)
    )


def examples(count: int = 9) -> list[Example]:
    generator = np.random.default_rng(0)
    made = []
    for index in range(count):
        prompt, completion = 2 + index % 3, int(generator.integers(1, 12))
        tokens = generator.integers(0, 50, prompt + completion)
        made.append(
            Example(
                tokens,
                prompt,
                np.ones(completion, bool),
                np.zeros(completion, np.float32),
                1.0,
                np.zeros(completion, np.int32),
            )
        )
    return made


def one_by_one(model: PreTrainedModel, rows: list[Example]) -> list[torch.Tensor]:
    """Return the log-probs of transformers' own attention, one trajectory at a time."""
    found = []
    for row in rows:
        tokens = torch.from_numpy(row.tokens)[None]
        log_probs = model(input_ids=tokens, use_cache=False).logits[0].log_softmax(-1)
        at = torch.arange(row.prompt_length - 1, tokens.shape[1] - 1)
        found.append(log_probs[at, tokens[0, at + 1]])
    return found


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_packed_equals_unpacked(family: str, tied: bool) -> None:
    rows = examples()
    packed, plain = (
        model_of(family, register_attention(), tie_word_embeddings=tied),
        model_of(family, "eager", tie_word_embeddings=tied),
    )
    plain.load_state_dict(packed.state_dict())
    batch = micro_batch(rows, range(len(rows)), "cpu")
    logprobs, *_ = Policy(packed, 1.0)(batch)
    expected = torch.cat(one_by_one(plain, [rows[index] for index in batch.order]))
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
    weights = torch.linspace(-1, 1, len(expected))
    (logprobs * weights).sum().backward()
    (expected * weights).sum().backward()
    for (name, actual), (_, wanted) in zip(
        packed.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert actual.grad is not None and wanted.grad is not None, name
        # Relative to the largest element. The loss is a sum over the tokens, so gradients are in
        # the tens, with a rounding error of about 1e-6 of that.
        torch.testing.assert_close(
            actual.grad,
            wanted.grad,
            atol=1e-5 * float(wanted.grad.abs().max()),
            rtol=0,
            msg=name,
        )


def test_sliding_window() -> None:
    window = {
        "use_sliding_window": True,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    rows = examples()
    packed, plain = (
        model_of("qwen3", register_attention(), **window),
        model_of("qwen3", "eager", **window),
    )
    plain.load_state_dict(packed.state_dict())
    batch = micro_batch(rows, range(len(rows)), "cpu")
    expected = torch.cat(one_by_one(plain, [rows[index] for index in batch.order]))
    torch.testing.assert_close(Policy(packed, 1.0)(batch)[0], expected, atol=1e-5, rtol=0)


def test_no_dense_mask_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import masking_utils

    def refuse(*arguments: object, **keywords: object) -> None:
        raise AssertionError("a dense mask was built")

    monkeypatch.setattr(masking_utils, "sdpa_mask", refuse)
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", refuse)
    rows = examples()
    Policy(model_of("qwen3", register_attention()), 1.0)(micro_batch(rows, range(len(rows)), "cpu"))


@pytest.mark.parametrize("values", [False, True])
def test_the_empty_micro_batch_reaches_every_parameter(values: bool) -> None:
    policy = Policy(
        model_of("qwen3", register_attention(), tie_word_embeddings=True), 1.0, values=values
    )
    logprobs, *_ = policy(micro_batch(examples(), [], "cpu"))
    logprobs.sum().backward()
    assert all(
        parameter.grad is not None and not parameter.grad.any() for parameter in policy.parameters()
    )


def test_misuse_is_refused() -> None:
    model = model_of("qwen3", register_attention())
    with pytest.raises(ValueError, match="needs segments"):
        model(input_ids=torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="pack all of them in one row"):
        model(input_ids=torch.zeros(1, 4, dtype=torch.int64), segments=Segments.of([3], "cpu"))
