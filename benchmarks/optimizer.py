"""Compares the CPU time of AdamW's step in torch's three implementations; the learner uses fused.

    python -m benchmarks.optimizer [--parameters 50000000] [--steps 5] [--threads 1]

The parameters are one flat float32 tensor, as ZeRO-3 passes them to the optimizer. Prints CPU
seconds per step, and their ratio to fused. Exits with 1 if fused is not the fastest.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

KINDS = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "single": {"foreach": False, "fused": False},
}


def cpu_seconds(parameters: int, steps: int, kind: str) -> float:
    """CPU seconds of one step over all threads. The first step, which allocates the moments, is
    left out."""
    flat = torch.nn.Parameter(torch.zeros(parameters))
    flat.grad = torch.randn(parameters, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW([flat], lr=1e-4, weight_decay=0.01, **KINDS[kind])
    optimizer.step()
    began = time.process_time()
    for _ in range(steps):
        optimizer.step()
    return (time.process_time() - began) / steps


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.optimizer", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--parameters", type=int, default=50_000_000)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    found = {kind: cpu_seconds(options.parameters, options.steps, kind) for kind in KINDS}
    for kind, seconds in found.items():
        print(f"{kind:8} {seconds:8.4f} CPU s a step, {seconds / found['fused']:.1f} times fused")
    return int(min(found, key=found.__getitem__) != "fused")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
