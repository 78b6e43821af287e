"""A packed row with common prefixes gives the log-probs and gradients of separate rows, for many
model families and kinds of attention."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from token_masks import whole_mask
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.models import segments as planning
from asyncrl.models.attention import register_attention, segment_attention
from asyncrl.models.forest import ROOT
from asyncrl.models.micro_batches import Example, micro_batch, token_example
from asyncrl.models.policy import Policy
from asyncrl.models.segments import BLOCK, Segments, runs_of
from benchmarks.families import family

FAMILIES = """
    llama qwen2 qwen3 mistral ministral phi3 phimoe gemma gemma3_text olmo2 olmo3 granite granitemoe
    cohere starcoder2 glm4 gpt_neox gpt2 opt mixtral qwen3_moe deepseek_v3 smollm3 exaone4
"""
"""Windows, latent attention, experts, learned positions, and heads in groups are among them."""


def siblings(vocabulary: int = 200, seed: int = 0) -> list[Example]:
    """Two groups, of which one has a branch in an answer, one answer that begins another, and two
    equal ones. Then a row alone."""
    draw = np.random.default_rng(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(draw.integers(3, vocabulary, count).tolist())

    long, short, turn = ids(9), ids(4), ids(5)
    answers = [ids(7), turn, turn + ids(3), turn + ids(6), ids(1)]
    rows = [(long, answer) for answer in answers] + [(long, answers[0]), (ids(5), ids(8))]
    return [token_example(row) for row in (*rows, *((short, ids(count)) for count in (6, 6, 2)))]


def packed_model(name: str) -> PreTrainedModel:
    model = family(name).build()
    model.set_attn_implementation(register_attention())
    return model


def outcome(policy: Policy, rows: Sequence[Example], shared: bool) -> tuple[list[Tensor], Tensor]:
    """The log-probs of each row, and all gradients of a loss in which each token has another
    weight."""
    policy.zero_grad()
    batch = micro_batch(rows, range(len(rows)), "cpu", shared=shared)
    found = policy(batch)[0].split(list(batch.counts))
    by_row = [found[batch.order.index(index)] for index in range(len(rows))]
    loss = sum(
        (torch.linspace(-1, 1, len(values)) * (1 + index) * values).sum()
        for index, values in enumerate(by_row)
    )
    assert isinstance(loss, Tensor)
    loss.backward()
    gradient = torch.cat(
        [
            torch.zeros(parameter.numel()) if parameter.grad is None else parameter.grad.flatten()
            for parameter in policy.parameters()
        ]
    )
    return [values.detach() for values in by_row], gradient


@pytest.mark.parametrize("name", FAMILIES.split())
def test_every_family_computes_the_same(name: str) -> None:
    policy = Policy(packed_model(name), 0.9)
    rows = siblings()
    wanted, gradient = outcome(policy, rows, shared=False)
    found, of_shared = outcome(policy, rows, shared=True)
    for actual, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
    assert float((of_shared - gradient).norm() / gradient.norm()) < 1e-4
    assert float(gradient.norm()) > 0.1


def test_a_sibling_has_no_effect_at_all() -> None:
    policy = Policy(packed_model("qwen3"), 1.0)
    rows = siblings()
    changed = list(rows)
    changed[0] = token_example((rows[0].tokens[:9], (rows[0].tokens[9:] + 1) % 200))
    with torch.no_grad():
        before, after = (
            dict(zip(batch.order, policy(batch)[0].split(list(batch.counts)), strict=True))
            for batch in (micro_batch(some, [0, 1, 2, 3], "cpu") for some in (rows, changed))
        )
    assert not torch.equal(before[0], after[0])
    assert all(torch.equal(before[index], after[index]) for index in (1, 2, 3))


FORESTS = {
    "equal answers": ([4, 3, 3, 3, 4, 3, 3, 3], [-1, 0, 0, 0, -1, 4, 4, 4]),
    "a branch in an answer": ([6, 5, 2, 2, 4, 9], [-1, 0, 1, 1, 0, -1]),
    "a long context": ([700, 3, 3, 2, 600], [-1, 0, 0, 0, -1]),
    "a long answer": ([5, 600, 600, 4], [-1, 0, 0, 0]),
    "a chain": ([3, 4, 2, 300, 5], [-1, 0, 1, 2, 3]),
    "nothing in common": ([9, 9, 9, 4, 1], [-1, -1, -1, -1, -1]),
}


@pytest.mark.parametrize("call", [0, planning.CALL, 10**9])
@pytest.mark.parametrize("width", [8, 4])
@pytest.mark.parametrize("window", [None, 1, 6, BLOCK + 20])
@pytest.mark.parametrize("name", FORESTS)
def test_attention_equals_that_of_a_whole_mask(
    name: str, window: int | None, width: int, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With each choice of blocks: segments alone, as planned, and whole trees."""
    monkeypatch.setattr(planning, "CALL", call)
    lengths, parents = FORESTS[name]
    torch.manual_seed(0)
    total = sum(lengths)
    query, key, value = (
        torch.randn(1, heads, total, size, requires_grad=True)
        for heads, size in ((4, 8), (2, 8), (2, width))
    )
    module = torch.nn.Module()
    module.config = type("Config", (), {"sliding_window": window})()
    found, _ = segment_attention(
        module,
        query,
        key,
        value,
        None,
        sliding_window=window,
        segments=Segments.of(lengths, "cpu", parents),
    )
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=whole_mask(lengths, parents, window), enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    upstream = torch.randn_like(wanted)
    for actual, expected in zip(
        torch.autograd.grad(found, (query, key, value), upstream),
        torch.autograd.grad(wanted, (query, key, value), upstream),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def test_short_groups_share_one_attention_call_and_long_ones_do_not() -> None:
    short = runs_of([6, 5, 5, 6, 5, 5], [ROOT, 0, 0, ROOT, 3, 3])
    assert [(run.size, run.count) for run in short] == [(16, 2)]
    long = runs_of([500, 40, 40, 30], [ROOT, 0, 0, 0])
    assert [(run.size, run.count, run.path, run.past) for run in long] == [
        (500, 1, (), 0),
        (40, 2, (0,), 500),
        (30, 1, (0,), 500),
    ]
    # A word of answer does not make the mask of a long prompt worth its scores.
    assert all(run.shapes is None for run in runs_of([2000, 1, 1], [ROOT, 0, 0]))
    assert all(run.shapes is None for run in runs_of([BLOCK, 1], [ROOT, 0]))
    assert runs_of([100, 1, 2], [ROOT, 0, 0])[0].shapes is not None
    alone = runs_of([9, 9, 4], [ROOT, ROOT, ROOT])
    assert [(run.size, run.count) for run in alone] == [(9, 2), (4, 1)]


def test_all_layers_share_the_masks() -> None:
    segments = Segments.of([5, 600, 600, 4], "cpu", [ROOT, 0, 0, 0])
    module = torch.nn.Module()
    kept = list[int]()
    for _ in range(2):
        tensors = [torch.randn(1, 2, segments.tokens, 8, requires_grad=True) for _ in range(3)]
        segment_attention(module, *tensors, None, segments=segments)
        kept.append(sum(mask.numel() for run in segments.runs for mask in run.masks.values()))
    assert kept[0] == kept[1] > 0
    assert all(mask.dtype == torch.float32 for run in segments.runs for mask in run.masks.values())


def test_keys_of_segments_are_their_paths() -> None:
    segments = Segments.of([3, 2, 1, 4], "cpu", [ROOT, 0, 1, ROOT])
    positions, ends, longest = segments.keys()
    assert segments.longest == 6 and segments.shared and segments.tokens == 10
    assert ends.tolist() == [0, 3, 8, 14, 18] and longest == 6
    assert positions[8:14].tolist() == [0, 1, 2, 3, 4, 5] and positions[14:].tolist() == [
        6,
        7,
        8,
        9,
    ]
