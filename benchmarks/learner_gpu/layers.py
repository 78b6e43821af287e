"""Parts of a model: one layer's attention, and the log-probs of its head."""

import argparse

import torch

from asyncrl.algorithms import chunk_elements, token_logprobs
from asyncrl.models import Segments, segment_attention
from benchmarks.learner import SEED
from benchmarks.learner_gpu.device import timed
from benchmarks.learner_gpu.models import MODELS

WHOLE = "whole logits"
CHUNKS = {"chunks of 224 MiB": 224 << 20, "chunks of 1 GiB": 1 << 30, "chunks of 4 GiB": 4 << 30}
"""Name → bytes of a chunk of logits."""


def attention(options: argparse.Namespace) -> dict[str, float]:
    """One float32 layer's attention over 16 × `length` tokens: milliseconds and peak GiB."""
    _, _, _, heads, kv_heads, width, _ = MODELS[options.model]
    tokens, found = 16 * options.length, {}
    for length in (min(512, tokens), min(4096, tokens)):
        segments = Segments.of([length] * (tokens // length), options.device)
        inputs = [
            torch.randn(1, count, tokens, width, device=options.device, requires_grad=True)
            for count in (heads, kv_heads, kv_heads)
        ]

        def once(inputs: list = inputs, segments: Segments = segments) -> None:
            out, _ = segment_attention(torch.nn.Identity(), *inputs, None, segments=segments)
            out.backward(torch.ones_like(out))

        seconds, peak = timed(once, options.device)
        found[f"float32, rows of {length}: ms"] = 1e3 * seconds
        found[f"float32, rows of {length}: peak GiB"] = peak / 2**30
    return found


def head(options: argparse.Namespace) -> dict[str, float]:
    """The log-probs of a pass's tokens in bfloat16: milliseconds and peak GiB."""
    width, vocabulary = MODELS[options.model][0], MODELS[options.model][6]
    tokens = options.rows_per_pass * options.length
    torch.manual_seed(SEED)
    made = {"device": options.device, "dtype": torch.bfloat16, "requires_grad": True}
    hidden = torch.randn(tokens, width, **made)
    weight = torch.randn(vocabulary, width, **made)
    with torch.no_grad():
        weight *= width**-0.5
    targets = torch.randint(0, vocabulary, (tokens,), device=options.device)
    found: dict[str, float] = {}
    gradients: dict[str, torch.Tensor] = {}
    sizes = {name: chunk_elements(size) for name, size in CHUNKS.items()}
    for name, chunk in (sizes | {WHOLE: tokens * vocabulary}).items():

        def forward(chunk: int = chunk) -> None:
            with torch.no_grad():
                token_logprobs(hidden, weight, targets, 1.0, chunk_elements=chunk)

        def once(chunk: int = chunk) -> None:
            hidden.grad = weight.grad = None
            logprobs, _ = token_logprobs(hidden, weight, targets, 1.0, chunk_elements=chunk)
            logprobs.mean().backward()

        try:
            found[f"{name}: forward ms"] = 1e3 * timed(forward, options.device)[0]
            seconds, peak = timed(once, options.device)
        except torch.OutOfMemoryError:
            continue
        found[f"{name}: forward and backward ms"] = 1e3 * seconds
        found[f"{name}: peak GiB"] = peak / 2**30
        assert hidden.grad is not None and weight.grad is not None
        gradients[name] = torch.cat([hidden.grad.flatten(), weight.grad.flatten()]).float().cpu()
    return found | differences(gradients)


def differences(gradients: dict[str, torch.Tensor]) -> dict[str, float]:
    """How far the gradients are from those of whole logits, if these fitted into memory."""
    whole = gradients.get(WHOLE)
    if whole is None:
        return {}
    return {
        f"{name}: gradient from whole": float((gradient - whole).norm() / whole.norm())
        for name, gradient in gradients.items()
    }
