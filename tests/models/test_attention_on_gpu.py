"""Packed attention on a GPU: each kernel computes what float64 does, and none stores all scores.

The GPU's own tests are skipped on a machine without one.
"""

from __future__ import annotations

import pytest
import torch
from token_masks import whole_mask
from torch import Tensor

from asyncrl.models.attention import _for_each_query_head, segment_attention
from asyncrl.models.forest import ROOT
from asyncrl.models.segments import Segments

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LENGTHS = (700, 700, 33, 1)
PARENTS = {"separate": (ROOT,) * 4, "continued": (ROOT, 0, 0, 2)}


def exact(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """Attention to the tokens that are seen by its formula, in float64: [1, T, heads, W]."""
    times = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(times, 1).double() for tensor in (key, value))
    scores = query.double() @ key.mT * query.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2)


def inputs(dtype: torch.dtype, width: int, value_width: int, device: str) -> list[Tensor]:
    """Query with 4 heads, key and value with 2."""
    made = torch.Generator().manual_seed(0)
    shapes = ((4, width), (2, width), (2, value_width))
    return [
        torch.randn(1, heads, sum(LENGTHS), size, generator=made).to(device, dtype).requires_grad_()
        for heads, size in shapes
    ]


def of_layer(window: int | None) -> torch.nn.Module:
    """A layer whose config has this window."""
    layer = torch.nn.Identity()
    layer.config = type("Config", (), {"sliding_window": window})()  # type: ignore[assignment]
    return layer


@gpu
@pytest.mark.parametrize("parents", PARENTS)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(
    ("dtype", "width", "value_width", "tolerance"),
    [
        (torch.float32, 64, 64, 1e-5),
        (torch.float32, 48, 32, 1e-5),
        (torch.bfloat16, 64, 64, 1e-2),
        (torch.bfloat16, 48, 32, 1e-2),
        (torch.float16, 128, 128, 2e-3),
    ],
)
def test_every_kernel_computes_the_formula(
    dtype: torch.dtype,
    width: int,
    value_width: int,
    tolerance: float,
    window: int | None,
    parents: str,
) -> None:
    tensors = inputs(dtype, width, value_width, "cuda")
    copies = [tensor.detach().double().requires_grad_() for tensor in tensors]
    segments = Segments.of(LENGTHS, "cuda", PARENTS[parents])
    found, _ = segment_attention(
        of_layer(window), *tensors, None, sliding_window=window, segments=segments
    )
    wanted = exact(*copies, whole_mask(LENGTHS, PARENTS[parents], window).cuda())
    outer = torch.randn(wanted.shape, device="cuda", dtype=torch.float64)
    found.backward(outer.to(dtype))
    wanted.backward(outer.to(dtype).double())
    pairs = [(found, wanted), *((t.grad, c.grad) for t, c in zip(tensors, copies, strict=True))]
    for actual, expected in pairs:
        assert actual is not None and expected is not None
        error = (actual.double() - expected).norm() / expected.norm()
        assert error < tolerance


@gpu
@pytest.mark.parametrize(
    ("dtype", "value_width"),
    [(torch.float32, 64), (torch.bfloat16, 64), (torch.float32, 32), (torch.bfloat16, 32)],
)
def test_long_segments_need_memory_for_their_tokens_and_not_their_scores(
    dtype: torch.dtype, value_width: int
) -> None:
    tokens, heads = 8192, 8
    tensors = [
        torch.randn(1, heads, tokens, 64, device="cuda", dtype=dtype, requires_grad=True),
        torch.randn(1, 2, tokens, 64, device="cuda", dtype=dtype, requires_grad=True),
        torch.randn(1, 2, tokens, value_width, device="cuda", dtype=dtype, requires_grad=True),
    ]
    segments = Segments.of([tokens], "cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out, _ = segment_attention(of_layer(None), *tensors, None, segments=segments)
    out.sum().backward()
    of_scores = heads * tokens**2 * dtype.itemsize
    assert torch.cuda.max_memory_allocated() - before < of_scores / 4


def test_repeated_heads_are_those_of_grouped_attention() -> None:
    query, key, value = inputs(torch.float64, 16, 8, "cpu")
    repeated = _for_each_query_head(query, key, value)
    assert [tensor.shape[1] for tensor in repeated] == [4, 4]
    attend = torch.nn.functional.scaled_dot_product_attention
    torch.testing.assert_close(
        attend(query, *repeated, is_causal=True),
        attend(query, key, value, is_causal=True, enable_gqa=True),
    )
    assert _for_each_query_head(key, key, value) == (key, value)
