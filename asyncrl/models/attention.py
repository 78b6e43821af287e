"""Attention for packed rows: each token attends within its own segment. It is registered with
transformers, for any causal LM that uses transformers' attention interface.

A dense [T, T] mask is never built. transformers builds none, because no mask function is registered
for this attention. Causal attention needs no mask. Windows, and long segments that continue others,
are computed block by block. All layers share the masks of a row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from asyncrl.models.segments import BLOCK, Run, Segments
from asyncrl.models.supported import WAY_OUT
from asyncrl.models.ulysses import SequenceRanks

ATTENTION = "asyncrl_segments"
"""The name of the attention function in transformers."""


def register_attention() -> str:
    """Register the function with transformers. Returns its name for `attn_implementation`."""
    if ATTENTION not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, shared_attention)
    return ATTENTION


def shared_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    segments: Segments | None = None,
    sequence_group: SequenceRanks | None = None,
    **settings: object,
) -> tuple[Tensor, None]:
    """Compute `segment_attention`, possibly in a sequence group.

    In a sequence group, the inputs and the output contain this rank's share of the row's tokens. In
    between, each rank attends over the whole row with its share of the heads."""
    if sequence_group is None or segments is None:
        return segment_attention(
            module, query, key, value, attention_mask, scaling, sliding_window, segments, **settings
        )
    query, key, value = sequence_group.to_heads(query, key, value, segments.tokens)
    attended, _ = segment_attention(
        module, query, key, value, attention_mask, scaling, sliding_window, segments, **settings
    )
    return sequence_group.to_tokens(attended), None


def segment_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    segments: Segments | None = None,
    **settings: object,
) -> tuple[Tensor, None]:
    """Compute causal attention within each segment of a packed row. Dropout is never applied,
    because the log-probs must be those of the policy.

    query is [1, heads, T, D]; key and value are [1, kv_heads, T, D]. Returns [1, T, heads, D].

    Raises:
        ValueError: the forward pass was called without `segments`, the input is not a single row of
            their length, or the model needs another kind of attention.
    """
    if segments is None:
        raise ValueError(
            f"attention {ATTENTION!r} needs segments=Segments.of(lengths, device) in the forward"
            " call"
        )
    if query.shape[0] != 1 or query.shape[2] != segments.tokens:
        raise ValueError(
            f"segments of {segments.tokens} tokens came with a row of shape"
            f" {tuple(query.shape)}; pack all of them in one row"
        )
    _refuse_other_kinds(module, attention_mask, sliding_window, settings)
    segments.attended.append(id(module))
    if (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] == value.shape[-1]
    ):
        return _varlen(query, key, value, scaling, sliding_window, segments), None
    sizes = [run.tokens for run in segments.runs]
    # `split`, because the backward pass of a slice fills a tensor of the whole row with zeros.
    queries, keys, values = (tensor[0].split(sizes, dim=1) for tensor in (query, key, value))
    outputs = list[Tensor]()
    for run, of_run in zip(segments.runs, queries, strict=True):
        index = len(outputs)
        out = _of_run(
            run,
            _batched(of_run, run.count),
            _with_past(keys, index, run),
            _with_past(values, index, run),
            scaling,
            sliding_window,
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[None], None


def _with_past(pieces: tuple[Tensor, ...], index: int, run: Run) -> Tensor:
    """The keys or values of a run's blocks, after those of the segments that they continue:
    [count, kv_heads, past + size, D].

    Args:
        pieces: [kv_heads, tokens, D] of each run.
    """
    own = _batched(pieces[index], run.count)
    if not run.path:
        return own
    past = [pieces[at].expand(run.count, -1, -1, -1) for at in run.path]
    return torch.cat([*past, own], dim=2)


def _refuse_other_kinds(
    module: torch.nn.Module, mask: Tensor | None, window: int | None, settings: Mapping[str, object]
) -> None:
    """Raise ValueError if the model needs more than causal attention with an optional window.
    Ignoring it would give wrong results silently."""
    wanted = _window_of(module)
    reasons = {
        "soft-caps its attention scores": settings.get("softcap") is not None,
        "has attention sinks": settings.get("s_aux") is not None,
        "passes its own attention mask": mask is not None,
        "attends in both directions": (
            settings.get("is_causal") is False or getattr(module, "is_causal", True) is False
        ),
        f"has a sliding window of {wanted} tokens in its config and asks for {window}": (
            wanted is not None and window != wanted
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(
                f"{type(module).__name__} {reason}, which packed attention does not compute;"
                f" {WAY_OUT}"
            )


def _window_of(module: torch.nn.Module) -> int | None:
    """The window, in tokens, that the model's config gives this layer. transformers' own attention
    reads it from the mask, which is not built here."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    window: int | None = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    slides = (
        types[layer] == "sliding_attention"
        if types and layer is not None
        else getattr(config, "use_sliding_window", True)
    )
    return window if slides else None


def _of_run(
    run: Run, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    """Compute the attention of a run's blocks: [count, heads, L, D].

    query is [count, heads, L, D], key [count, kv_heads, past + L, D], value the same with width W.

    On a CPU, torch's flash kernel needs D = W. It keeps one block of scores at a time in the
    forward and backward pass, also for grouped heads. On a GPU, this function gets the inputs that
    the flash kernels there do not support: float32, or D other than W. torch's memory-efficient
    kernel takes them, if keys have as many heads as queries.
    """
    length, longest = query.shape[2], key.shape[2]
    if query.is_cuda:
        key, value = _for_each_query_head(query, key, value)
    grouped = query.shape[1] != key.shape[1]
    windowed = window is not None and longest > window
    if run.shapes is None:
        flash = query.is_cuda or key.shape[-1] == value.shape[-1]
        if length > BLOCK and (windowed or run.past or not flash):
            return _by_blocks(run, query, key, value, scaling, window if windowed else None)
        if not run.past and not windowed:
            # Without this, torch could silently use its plain implementation, which stores all L²
            # scores.
            kernel = SDPBackend.EFFICIENT_ATTENTION if query.is_cuda else SDPBackend.FLASH_ATTENTION
            with sdpa_kernel(kernel) if length > BLOCK else contextlib.nullcontext():
                return scaled_dot_product_attention(
                    query, key, value, is_causal=length > 1, scale=scaling, enable_gqa=grouped
                )
    mask = run.mask(query, window if windowed else None)
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scaling, enable_gqa=grouped
    )


def _for_each_query_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat keys and values [count, kv_heads, L, D] for the query heads that share them."""
    times = query.shape[1] // key.shape[1]
    if times == 1:
        return key, value
    return key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)


def _by_blocks(
    run: Run, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    """Compute `_of_run` for BLOCK queries at a time, with the keys that their windows reach. The
    run's blocks are single segments."""
    length, grouped = query.shape[2], query.shape[1] != key.shape[1]
    outputs = []
    for start in range(0, length, BLOCK):
        end = min(start + BLOCK, length)
        first = 0 if window is None else max(0, run.past + start - window + 1)
        reached = slice(first, run.past + end)
        part = query[:, :, start:end], key[:, :, reached], value[:, :, reached]
        mask = run.part_of_mask(query, window, start, first)
        outputs.append(
            scaled_dot_product_attention(*part, attn_mask=mask, scale=scaling, enable_gqa=grouped)
        )
    return torch.cat(outputs, dim=2)


def _batched(tensor: Tensor, count: int) -> Tensor:
    """[heads, count * L, D] → [count, heads, L, D]."""
    heads, tokens, width = tensor.shape
    return tensor.reshape(heads, count, tokens // count, width).transpose(0, 1)


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    segments: Segments,
) -> Tensor:
    """Compute `segment_attention` by flash attention over variable lengths: [1, T, heads, D]."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    starts, longest = segments.cu_seqlens, max(segments.lengths)
    of_keys, longest_keys = starts, longest
    if segments.shared:
        # The kernel aligns the last query with the last key of each segment.
        positions, of_keys, longest_keys = segments.keys()
        k, v = k.index_select(0, positions), v.index_select(0, positions)
    out = varlen_attn(
        q,
        k,
        v,
        starts,
        of_keys,
        longest,
        longest_keys,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(out, Tensor)
    return out[None]
