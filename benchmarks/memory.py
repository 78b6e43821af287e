"""Measures the private memory of the learner's two largest terms, with and without the techniques
that keep them small. Processes run one after the other, on CPU, in float32.

    python -m benchmarks.memory [--tokens 2048] [--vocabulary 150000] [--hidden 256] [--layers 12]

- head: log-probs and entropies of `tokens` loss tokens and their backward pass, with chunks and
  with whole logits. Both are also compared with float64, to tell rounding from errors.
- layers: forward and backward pass of a Qwen3 with `layers` layers over `tokens` tokens in segments
  of 256, with and without gradient_checkpointing.

A peak is the kernel's high-water mark of resident memory during the pass, less the resident memory
before it. It is exact, not sampled. The model, the hidden states and the model's gradients are
allocated before, so the peak is what the pass itself needs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SEGMENT = 256
EXACT = 1e-6
CASES = {"head": ("chunked", "whole"), "layers": ("checkpointed", "kept")}
# Freed blocks return to the system at once, so that resident memory is live memory.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_MMAP_MAX_": "1000000",
    "DS_ACCELERATOR": "cpu",
}


def main(arguments: list[str]) -> int:
    """Measure each variant in a separate process, and print the comparisons."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory")
    for name, default in (
        ("tokens", 2048),
        ("vocabulary", 150_000),
        ("hidden", 256),
        ("layers", 12),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--only", nargs=3, metavar=("CASE", "VARIANT", "FILE"), help=argparse.SUPPRESS
    )
    sizes = parser.parse_args(arguments)
    if sizes.only:
        _measure(*sizes.only, sizes)
        return 0
    held = [_compare(case, variants, arguments, sizes) for case, variants in CASES.items()]
    return int(not all(held))


def _compare(
    case: str, variants: tuple[str, str], arguments: list[str], sizes: argparse.Namespace
) -> bool:
    """Whether the small variant needs less memory and computes the same: to EXACT, or as close to
    float64 as the large variant."""
    import torch

    with tempfile.TemporaryDirectory(prefix="asyncrl_bench_") as folder:
        peaks, outputs = {}, []
        for variant in variants:
            file = Path(folder) / f"{variant}.pt"
            command = [
                sys.executable,
                "-m",
                __spec__.name,
                *arguments,
                "--only",
                case,
                variant,
                str(file),
            ]
            result = json.loads(
                subprocess.run(
                    command, check=True, env=os.environ | ENVIRONMENT, stdout=subprocess.PIPE
                ).stdout
            )
            peaks[variant] = result["peak"]
            outputs.append(torch.load(file, mmap=True, weights_only=True))
            print(
                f"{case:<7}{variant:<13}peak {result['peak'] / 2**20:8.1f} MiB,"
                f" {result['seconds']:6.1f} s",
                flush=True,
            )
        compared = {f"{variants[0]} from {variants[1]}": _differences(outputs[0], outputs[1])}
        if case == "head":
            exact = _exact_head(sizes)
            compared |= {
                f"{variant} from float64": _differences(found, exact)
                for variant, found in zip(variants, outputs, strict=True)
            }
    small, large = (peaks[variant] for variant in variants)
    width = f"vocabulary {sizes.vocabulary}" if case == "head" else f"{sizes.layers} layers"
    shape = f"{sizes.tokens} tokens, hidden {sizes.hidden}, {width}"
    print(f"{case:<7}{shape}: {variants[1]} / {variants[0]} = {large / small:.1f}")
    if case == "head":
        print(f"{case:<7}{_chunks_text(small, sizes.tokens, sizes.vocabulary, sizes.hidden)}")
    for title, differences in compared.items():
        print(
            f"{case:<7}{title}: largest difference, of the largest element: "
            + ", ".join(f"{name} {value:.1e}" for name, value in differences.items())
        )
    between, *from_exact = compared.values()
    same = [
        value <= EXACT or (from_exact and from_exact[0][name] <= EXACT + from_exact[1][name])
        for name, value in between.items()
    ]
    print(
        f"{case:<7}{'met' if small < large and all(same) else 'MISSED'}: less memory, and equal to"
        f" {EXACT:g} or as close to float64"
    )
    return small < large and all(same)


def _differences(found: dict, other: dict) -> dict[str, float]:
    """Largest difference by name, relative to the largest element, because single elements may
    cancel to zero."""
    return {
        name: float((found[name] - value).abs().max() / value.abs().max())
        for name, value in other.items()
    }


def _chunks_text(peak: int, tokens: int, vocabulary: int, hidden: int) -> str:
    """The peak of the chunked variant in the terms of `asyncrl plan`'s estimate."""
    from asyncrl.algorithms import CHUNK_ELEMENTS, LIVE_CHUNKS
    from asyncrl.preflight import HEAD_GRADIENTS

    head = 4 * vocabulary * hidden
    chunk = 4 * vocabulary * min(tokens, max(1, CHUNK_ELEMENTS // vocabulary))
    implied = (peak - HEAD_GRADIENTS * head) / chunk
    return (
        f"chunked: {implied:.1f} chunks of logits plus {HEAD_GRADIENTS} gradients of the head's"
        f" weight; the estimate of `asyncrl plan` counts {LIVE_CHUNKS}"
    )


def _measure(case: str, variant: str, file: str, sizes: argparse.Namespace) -> None:
    """Run one pass in this process. Prints the peak as JSON, and writes the results to `file`."""
    import torch

    torch.manual_seed(0)
    run = (_head if case == "head" else _layers)(variant, sizes)
    run(8)  # loads libraries and allocates gradients
    before = _high_water(reset=True)
    began = time.monotonic()
    found = run(sizes.tokens)
    seconds = time.monotonic() - began
    peak = _high_water() - before
    torch.save(found, file)
    print(json.dumps({"peak": peak, "seconds": seconds}))


def _head_inputs(sizes: argparse.Namespace):
    import torch

    torch.manual_seed(0)
    return (
        torch.randn(sizes.tokens, sizes.hidden),
        torch.randn(sizes.vocabulary, sizes.hidden) * 0.05,
        torch.randint(0, sizes.vocabulary, (sizes.tokens,)),
    )


def _exact_head(sizes: argparse.Namespace) -> dict:
    """What `_head` computes, in float64 and without asyncrl's code."""
    import torch

    hidden, weight, targets = _head_inputs(sizes)
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    log_probs = torch.log_softmax(hidden @ weight.T, dim=-1)
    chosen = log_probs.gather(-1, targets[:, None])[:, 0]
    chosen.mean().backward()
    with torch.no_grad():
        entropy = -(log_probs.exp() * log_probs).sum(-1)
    return {
        "log-probs": chosen.detach(),
        "entropies": entropy,
        "gradient of the hidden states": hidden.grad,
        "of the head's weight": weight.grad,
    }


def _head(variant: str, sizes: argparse.Namespace):
    from asyncrl.algorithms import CHUNK_ELEMENTS, token_logprobs

    every, weight, targets = _head_inputs(sizes)
    weight.requires_grad_()
    chunk = CHUNK_ELEMENTS if variant == "chunked" else sizes.tokens * sizes.vocabulary

    def run(tokens: int) -> dict:
        hidden = every[:tokens].clone().requires_grad_()
        if weight.grad is not None:
            weight.grad.zero_()
        logprobs, entropy = token_logprobs(
            hidden, weight, targets[:tokens], 1.0, chunk_elements=chunk
        )
        logprobs.mean().backward()
        return {
            "log-probs": logprobs.detach(),
            "entropies": entropy,
            "gradient of the hidden states": hidden.grad,
            "of the head's weight": weight.grad,
        }

    return run


def _layers(variant: str, sizes: argparse.Namespace):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from asyncrl.models import Policy, Segments, checkpoint_activations, register_attention

    shape = Qwen3Config(
        vocab_size=1000,
        hidden_size=sizes.hidden,
        intermediate_size=3 * sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.hidden // 64,
        num_key_value_heads=sizes.hidden // 64,
        head_dim=64,
        max_position_embeddings=SEGMENT,
        attn_implementation=register_attention(),
    )
    policy = Policy(Qwen3ForCausalLM(shape), 1.0)
    if variant == "checkpointed":
        checkpoint_activations(policy)
    ids = torch.randint(0, 1000, (1, sizes.tokens))

    def run(tokens: int) -> dict:
        from asyncrl.models import MicroBatch

        lengths = [SEGMENT] * (tokens // SEGMENT) + ([tokens % SEGMENT] if tokens % SEGMENT else [])
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        row, zeros = torch.arange(tokens), torch.zeros(tokens)
        batch = MicroBatch(
            ids[:, :tokens],
            positions,
            Segments.of(lengths, "cpu"),
            row,
            ids[0, :tokens],
            zeros,
            zeros,
            (),
            (),
            zeros,
            torch.zeros_like(row),
            zeros,
        )
        policy.zero_grad(set_to_none=False)
        logprobs, *_ = policy(batch)
        logprobs.mean().backward()
        return {
            "log-probs": logprobs.detach(),
            "gradients": torch.cat([parameter.grad.flatten() for parameter in policy.parameters()]),
        }

    return run


def _high_water(reset: bool = False) -> int:
    """The largest resident memory of this process since the last reset, in bytes. With `reset`, the
    mark is reset first, and the result is the resident memory now."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
