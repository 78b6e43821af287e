"""Draws the seeds of sampled tokens in blocks.

On the CPU, vLLM's sampler draws one number from the generator of each seeded request for each
token. That takes three calls of torch for each sequence in each step of the engine. Here each
generator gives many numbers at once. They are the same numbers, so the same seed gives the same
completion as in vLLM.
"""

from __future__ import annotations

import functools
from weakref import WeakKeyDictionary

import torch
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

__all__ = ["draw_in_blocks"]

BLOCK = 64
"""Numbers that a generator gives at once."""
END = 2**31
"""vLLM's seeds are below this."""

_drawn: WeakKeyDictionary[torch.Generator, list[int]] = WeakKeyDictionary()
"""Generator → the numbers that it has given and nobody has used, the next one last."""


def next_seed(generator: torch.Generator) -> int:
    """The number that `torch.randint(0, END, (1,), generator=generator)` would give next."""
    numbers = _drawn.get(generator)
    if not numbers:
        numbers = torch.randint(0, END, (BLOCK,), generator=generator).tolist()
        numbers.reverse()
        _drawn[generator] = numbers
    return numbers.pop()


def draw_in_blocks() -> None:
    """Make vLLM's sampler on the CPU draw in blocks. A second call has no effect."""
    original = TopKTopPSampler.forward_cpu
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def forward_cpu(
        self: TopKTopPSampler,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.use_fp64_gumbel:
            return original(self, logits, generators, k, p)
        logits = topk_topp_sampler.apply_top_k_top_p(logits, k, p)
        shown = None
        if self.logprobs_mode == "processed_logits":
            shown = logits
        elif self.logprobs_mode == "processed_logprobs":
            shown = logits.log_softmax(dim=-1, dtype=torch.float32)
        count = logits.shape[0]
        if len(generators) == count:
            seeds = torch.tensor([next_seed(generators[row]) for row in range(count)])
        else:
            seeds = torch.randint(0, END, (count,))
            for row, generator in generators.items():
                seeds[row] = next_seed(generator)
        return torch.ops._C.fused_gumbel_argmax(logits.float(), seeds), shown

    TopKTopPSampler.forward_cpu = forward_cpu  # type: ignore[method-assign]
