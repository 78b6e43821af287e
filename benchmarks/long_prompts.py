"""Compares ways to train groups whose answers share a long prompt.

    python -m benchmarks.learner --prompts 32,128,512 [--models tiny,medium]

- padded: a plain loop as in TRL, of transformers and torch, with logits of the answers only. Rows
  have equal lengths, so nothing is padding. Micro-batches of 16 or 64 rows: the faster one counts.
- separate: asyncrl's policy on packed rows, each trajectory for itself.
- shared: the same, where a group's prompt is computed once.

A group has 8 answers of 64 tokens. A step is one forward and backward pass over all groups, on one
thread, at the same weights. The three take turns, and each ratio is the median of the turns' ratios
of CPU time. Log-probs must agree to 1e-4.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.learner import CAP, MODELS, save_model

if TYPE_CHECKING:
    from torch import Tensor

ANSWERS, ANSWER = 8, 64
GROUPS = {"tiny": 8, "medium": 2}
TURNS = 5
SLOWER = 1.15
"""Bar: the time of `shared`, as a multiple of its part of the computed tokens."""
FASTER_THAN_PADDED = 2.5
"""Bar at prompts of 128 tokens."""
PADDED_ROWS = (16, 64)
CLOSE = 1e-4
"""Nats between the log-probs of the ways."""

Step = Callable[[], "Tensor"]
"""One forward and backward pass → the log-probs of all answers, [rows, ANSWER]."""


def compare_prompts(models: Sequence[str], prompts: Sequence[int]) -> bool:
    """Print a table for each model, and return whether all bars are met."""
    met = True
    with tempfile.TemporaryDirectory(prefix="asyncrl_bench_") as folder:
        for model in models:
            path = save_model(model, Path(folder) / model)
            print(f"\n{model}: {GROUPS[model]} groups of {ANSWERS} answers of {ANSWER} tokens")
            print("prompt  computed tokens  time of separate  bar   of padded: separate  shared")
            for prompt in prompts:
                met = _row(path, model, prompt) and met
    return met


def _row(path: str, model: str, prompt: int) -> bool:
    import torch

    torch.set_num_threads(1)
    rows = group_rows(prompt, GROUPS[model], int(str(MODELS[model]["vocab_size"])))
    separate, tokens = packed_step(path, rows, shared=False)
    shared, computed = packed_step(path, rows, shared=True)
    steps = {"separate": separate, "shared": shared}
    steps |= {f"padded {size}": padded_step(path, rows, size) for size in PADDED_ROWS}
    logprobs = {name: step() for name, step in steps.items()}
    apart = max(float((found - logprobs["separate"]).abs().max()) for found in logprobs.values())
    turns = [{name: _cpu_seconds(step) for name, step in steps.items()} for _ in range(TURNS)]
    part = computed / tokens
    ratio = _ratio(turns, "shared", ["separate"])
    padded = [f"padded {size}" for size in PADDED_ROWS]
    of_padded = [1 / _ratio(turns, name, padded) for name in ("separate", "shared")]
    print(
        f"{prompt:>6}{part:>17.2f}{ratio:>18.2f}{SLOWER * part:>6.2f}"
        f"{of_padded[0]:>20.2f}x{of_padded[1]:>7.2f}x"
        + (f"  log-probs differ by {apart:.1e}" if apart > CLOSE else "")
    )
    fast = prompt != 128 or of_padded[1] >= FASTER_THAN_PADDED
    return apart <= CLOSE and ratio <= SLOWER * part and fast


def _ratio(turns: Sequence[dict[str, float]], name: str, others: Sequence[str]) -> float:
    """The time of a way, relative to the fastest of others."""
    return statistics.median(turn[name] / min(turn[other] for other in others) for turn in turns)


def _cpu_seconds(step: Step) -> float:
    began = time.process_time()
    step()
    return time.process_time() - began


def group_rows(prompt: int, groups: int, vocabulary: int) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, answer ids) of each trajectory, seeded."""
    draw = np.random.default_rng(prompt)
    rows = []
    for _ in range(groups):
        shared = draw.integers(0, vocabulary, prompt).tolist()
        rows += [(shared, draw.integers(0, vocabulary, ANSWER).tolist()) for _ in range(ANSWERS)]
    return rows


def packed_step(path: str, rows: Sequence, shared: bool) -> tuple[Step, int]:
    """The step on packed rows, and its tokens."""
    import torch

    from asyncrl.learning import pack, pack_shared
    from asyncrl.models import load_policy, micro_batch, token_example

    policy = load_policy(path, torch.float32, 1.0)
    examples = [token_example(row) for row in rows]
    tokens = [example.tokens for example in examples]
    plan = pack_shared(tokens, CAP) if shared else pack(list(map(len, tokens)), CAP)

    def step() -> Tensor:
        policy.zero_grad()
        found = torch.zeros(len(rows), ANSWER)
        for indices in plan.micro_batches[0]:
            batch = micro_batch(examples, indices, "cpu", shared=shared)
            logprobs = policy(batch)[0]
            (-logprobs.sum()).backward()
            found[list(batch.order)] = logprobs.detach().view(-1, ANSWER)
        return found

    return step, plan.tokens


def padded_step(path: str, rows: Sequence, size: int) -> Step:
    """The step of a plain loop on `size` rows at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = torch.tensor([[*prompt, *answer] for prompt, answer in rows])

    def step() -> Tensor:
        model.zero_grad()
        found = []
        for chosen in ids.split(size):
            logits = model(
                input_ids=chosen,
                attention_mask=torch.ones_like(chosen),
                use_cache=False,
                logits_to_keep=ANSWER + 1,
            ).logits[:, :-1]
            targets = chosen[:, -ANSWER:, None]
            logprobs = logits.gather(-1, targets)[..., 0] - logits.logsumexp(-1)
            with torch.no_grad():  # TRL reports the entropy of each token, as asyncrl does
                logits.log_softmax(-1).exp().mul(logits.log_softmax(-1)).sum(-1)
            (-logprobs.sum()).backward()
            found.append(logprobs.detach())
        return torch.cat(found)

    return step
