"""Attention for packed rows: each token attends within its own segment. Registered with transformers under one name, for any causal LM that uses its
attention interface.

transformers builds no mask for an attention function that has no mask function of its own, so the dense [T, T] mask never exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

__all__ = ["ATTENTION", "Segments", "register_attention", "segment_attention"]

ATTENTION = "asyncrl_segments"
"""Name under which transformers knows the attention function."""


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments of one packed row of T tokens, in order. Neighbours of equal length are attended in one call: sort by length."""

    lengths: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]
    """(length, count) of neighbours of equal length."""
    cu_seqlens: Tensor
    """[segments + 1] int32, starts and T, on the device of the row."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str) -> Segments:
        """Segments of these lengths, in tokens."""
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        runs = tuple((length, len(list(same))) for length, same in groupby(lengths))
        return cls(tuple(lengths), runs, ends.to(device))


def register_attention() -> str:
    """Make the function known to transformers; return its name for `attn_implementation`."""
    if ATTENTION not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, segment_attention)
    return ATTENTION


def segment_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    segments: Segments | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each segment of a packed row. Dropout is not applied: the log-probs must be those of the policy.

    query is [1, heads, T, D]; key and value [1, kv_heads, T, D]. Returns [1, T, heads, D].

    Raises:
        ValueError: the forward was called without `segments`, or the row is not one row of their length.
    """
    if segments is None:
        raise ValueError(f"attention {ATTENTION!r} needs segments=Segments.of(lengths, device) in the forward call")
    if query.shape[0] != 1 or query.shape[2] != sum(segments.lengths):
        raise ValueError(f"segments of {sum(segments.lengths)} tokens came with a row of shape {tuple(query.shape)}; pack all of them in one row")
    if unused.get("softcap") is not None or unused.get("s_aux") is not None:
        raise ValueError(f"{type(module).__name__} uses attention soft-capping or sinks, which packed attention does not compute; use another model")
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _varlen(query, key, value, scaling, sliding_window, segments), None
    outputs = []
    start = 0
    for length, count in segments.runs:
        end = start + length * count
        q, k, v = (_batched(tensor[0, :, start:end], count) for tensor in (query, key, value))
        mask = _window_mask(length, sliding_window, query.device)
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and length > 1, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])
        outputs.append(out.transpose(1, 2).reshape(end - start, query.shape[1], query.shape[3]))
        start = end
    return torch.cat(outputs)[None], None


def _batched(tensor: Tensor, count: int) -> Tensor:
    """[heads, count * L, D] → [count, heads, L, D]."""
    heads, tokens, width = tensor.shape
    return tensor.reshape(heads, count, tokens // count, width).transpose(0, 1)


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """[L, L] bool, True = may attend; None where plain causal attention is the same."""
    if window is None or length <= window:
        return None
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None, :]
    return (distance >= 0) & (distance < window)


def _varlen(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None, segments: Segments) -> Tensor:
    """The same by flash attention over variable lengths. [1, T, heads, D]."""
    from torch.nn.attention.varlen import varlen_attn

    longest = max(segments.lengths)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    left = -1 if window is None else window - 1
    cu_seqlens = segments.cu_seqlens
    out = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, scale=scaling, window_size=(left, 0), enable_gqa=q.shape[1] != k.shape[1])
    assert isinstance(out, Tensor)
    return out[None]
