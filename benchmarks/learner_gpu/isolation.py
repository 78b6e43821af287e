"""Log-probs and gradients of packed rows, beside those of transformers' own attention."""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from asyncrl.models import Example, Policy, load_policy, micro_batch, token_example
from benchmarks.learner import PROMPT, SEED
from benchmarks.learner_gpu.models import MODELS, random_row, save_model

ROWS = 12
LAYERS = 4
"""Most layers. Errors of more layers would hide a leak."""


@dataclass(frozen=True, slots=True)
class Passed:
    """What a forward and backward pass gave: the log-probs of trained tokens, and all gradients
    flat, in float32, on the CPU."""

    logprobs: torch.Tensor
    gradient: torch.Tensor


def isolation(options: argparse.Namespace) -> dict[str, float]:
    """Differences of packed rows from transformers' own attention, row by row."""
    generator = np.random.default_rng(SEED)
    vocabulary = MODELS[options.model][6]
    lengths = generator.integers(PROMPT + 1, options.length, ROWS)
    examples = [token_example(random_row(generator, length, vocabulary)) for length in lengths]
    changes = {
        "num_hidden_layers": min(LAYERS, MODELS[options.model][2]),
        "initializer_range": 0.06,
    }
    found: dict[str, float] = {}
    exact: Passed | None = None
    with tempfile.TemporaryDirectory(prefix="asyncrl_bench_") as folder:
        path = save_model(options.model, folder, **changes)
        for dtype in (torch.float32, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            alone = separate(path, dtype, examples, options.device)
            policy = load_policy(path, dtype, 1.0).to(options.device)
            together = packed(policy, examples, options.device)
            exact = exact or alone
            for kind, passed in (("packed", together), ("separate", alone)):
                found |= {
                    f"{name} {kind}: {what}": value for what, value in errors(passed, exact).items()
                }
            longest = max(len(example.tokens) for example in examples)
            other = token_example(random_row(generator, longest, vocabulary))
            leaked = leak(policy, examples, other, options.device)
            found[f"{name} packed: leak between rows, nats"] = leaked
            del policy
    return found


def order_of(examples: Sequence[Example]) -> Sequence[int]:
    """The order of the rows in a packed batch."""
    return micro_batch(examples, range(len(examples)), "cpu").order


def separate(path: str, dtype: torch.dtype, examples: Sequence[Example], device: str) -> Passed:
    """transformers alone, one row at a time, in the order of the packed batch."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device)
    kept = []
    for index in order_of(examples):
        tokens = torch.from_numpy(examples[index].tokens)[None].to(device)
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits[0]
        of_row = logits.float().log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
        trained = of_row[PROMPT - 1 :]
        trained.sum().backward()
        kept.append(trained.detach())
    return Passed(torch.cat(kept), gradients(model))


def packed(policy: Policy, examples: Sequence[Example], device: str) -> Passed:
    """asyncrl's policy on all rows at once."""
    logprobs = policy(micro_batch(examples, range(len(examples)), device))[0]
    logprobs.sum().backward()
    return Passed(logprobs.detach(), gradients(policy.model))


def leak(policy: Policy, examples: Sequence[Example], other: Example, device: str) -> float:
    """How much another first row changes the log-probs of the rows after it.

    Args:
        other: replaces the longest row, with which a packed batch begins. It has the same length.
    """
    rows = range(len(examples))
    batch = micro_batch(examples, rows, device)
    changed = list(examples)
    changed[batch.order[0]] = other
    with torch.no_grad():
        before = policy(batch)[0][batch.counts[0] :]
        after = policy(micro_batch(changed, rows, device))[0][batch.counts[0] :]
    return float((after - before).abs().max())


def errors(passed: Passed, exact: Passed) -> dict[str, float]:
    difference = (passed.logprobs - exact.logprobs).abs()
    gradient = (passed.gradient - exact.gradient).norm() / exact.gradient.norm()
    return {
        "largest error, nats": float(difference.max()),
        "mean error, nats": float(difference.mean()),
        "gradient error": float(gradient),
    }


def gradients(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten().float().cpu() for parameter in model.parameters()])
