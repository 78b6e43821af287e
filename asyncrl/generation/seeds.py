"""vLLM plugin for engines on the CPU: draws the seeds of sampled tokens in blocks.

vLLM's sampler on the CPU draws one number from the random generator of each seeded request for each
token. That takes three calls of torch for each sequence in each step of the engine. Here each
random generator gives many numbers at once. They are the same numbers, so the same seed gives the
same completion as in vLLM.
"""

from __future__ import annotations

import functools
from weakref import WeakKeyDictionary

import torch
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

BLOCK = 64
"""Numbers that a random generator gives at once."""
END = 2**31
"""vLLM's seeds are below this."""

_drawn: WeakKeyDictionary[torch.Generator, list[int]] = WeakKeyDictionary()
"""Random generator → the numbers that it has given and nobody has used, the next one last."""


def next_seed(generator: torch.Generator) -> int:
    """The number that `torch.randint(0, END, (1,), generator=generator)` would give next."""
    numbers = _drawn.get(generator)
    if not numbers:
        numbers = torch.randint(0, END, (BLOCK,), generator=generator).tolist()
        numbers.reverse()
        _drawn[generator] = numbers
    return numbers.pop()


def draw_in_blocks() -> None:
    """Make vLLM's sampler on the CPU draw in blocks. A second call has no effect.

    Nothing else may draw from the random generator of a request. Speculative decoding does, and
    asyncrl does not use it.
    """
    original = TopKTopPSampler.forward_cpu
    if getattr(original, "draws_in_blocks", False):
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
        # Requests without a seed use these numbers, as in vLLM.
        seeds = torch.randint(0, END, (logits.shape[0],))
        if generators:
            numbers = [next_seed(generator) for generator in generators.values()]
            seeds[list(generators)] = torch.tensor(numbers)
        return torch.ops._C.fused_gumbel_argmax(logits.float(), seeds), shown

    forward_cpu.draws_in_blocks = True  # type: ignore[attr-defined]
    TopKTopPSampler.forward_cpu = forward_cpu  # type: ignore[method-assign]
