"""Measures the learner on a GPU: the packed log-probs, the log-prob kernel, training steps beside a
plain loop, memory beside the estimate of `asyncrl plan`, and a gathered version.

    python -m benchmarks.learner_gpu [--device cuda] [--model qwen3_0.6b] [--parts …]
    [--rows 128] [--length 1024] [--rows_per_pass 16]

- isolation: log-probs and gradients of packed rows and of transformers' own attention, one row at a
  time, in float32 and bfloat16. Both are compared with float32. The first row's tokens are then
  changed: no other row may change.
- attention: time and memory of a float32 layer's attention, forward and backward, in rows of 512
  and of 4,096 tokens.
- head: time and memory of the log-probs and their backward pass, in chunks and with whole logits.
- steps: trained tokens per second. A step has `rows` rows of `length` + 1 tokens and
  `rows_per_pass` rows per forward pass. All rows have one length, so that no variant pads.
  `plain` is transformers and torch alone, without float32 master weights, and with half the rows
  per pass if it runs out of memory. `packed` is asyncrl's policy in the same loop. `learner` is the
  learner's own rank with DeepSpeed ZeRO-3. With `/checkpointed`, each
  layer is computed again in the backward pass.
- memory: the learner's rank at two sizes and two caps, beside the estimate.

Each measurement has its own process. The model is a seeded random Qwen3. Model FLOP/s count 6 per
weight of a matrix and token, and causal attention, and nothing that is computed again.
"""

import argparse
import json
import subprocess
import sys
import tempfile

import torch
import transformers

from benchmarks.learner_gpu.isolation import isolation
from benchmarks.learner_gpu.layers import attention, head
from benchmarks.learner_gpu.memory import memory, plan
from benchmarks.learner_gpu.models import MODELS, save_model
from benchmarks.learner_gpu.steps import step

PEAK = 989e12
"""Dense bfloat16 FLOP/s of an H100 or H200 (SXM), from its data sheet."""
LEAST_OF_PLAIN = 0.9
VARIANTS = ("plain", "packed", "learner", "plain/checkpointed", "learner/checkpointed")
IN_COLUMNS = frozenset(
    ("tokens_per_s", "step_s", "loss", "peak", "flops_per_token", "rows_per_pass")
)
"""Figures of a step with a column. Others stand below it."""
PARTS = {
    "model": lambda options, name, folder: {"path": save_model(name, folder)},
    "isolation": isolation,
    "attention": attention,
    "head": head,
    "step": step,
    "memory": memory,
    "plan": plan,
}
"""Each runs in a process of its own, which prints what it returns."""


def main(arguments: list[str]) -> int:
    """Measure and print. The exit code is 0 if the learner trains at least 0.9 times the tokens
    per second of the plain loop, with and without checkpointing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learner_gpu")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--model", default="qwen3_0.6b", choices=MODELS)
    parser.add_argument("--larger", default="qwen3_1.7b", choices=MODELS)
    parser.add_argument("--parts", default="isolation,attention,head,steps,memory")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rows_per_pass", type=int, default=16)
    parser.add_argument("--only", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.only:
        part, *rest = options.only
        print(json.dumps(PARTS[part](options, *rest)))
        return 0
    card = torch.cuda.get_device_name() if options.device == "cuda" else "no GPU"
    print(f"{card}; torch {torch.__version__}, transformers {transformers.__version__}", flush=True)
    parts = options.parts.split(",")
    if options.device == "cpu" and "memory" in parts:
        parts.remove("memory")
    held = True
    with tempfile.TemporaryDirectory(prefix="asyncrl_bench_") as folder:
        for part in parts:
            print(f"\n# {part}", flush=True)
            if part == "steps":
                held = _compare_steps(options, arguments, folder)
            elif part == "memory":
                _compare_memory(options, arguments, folder)
            else:
                for name, value in _run(arguments, part).items():
                    print(f"{name:<44}{value:>14.6g}", flush=True)
    return 0 if held else 1


def _run(arguments: list[str], *only: str) -> dict:
    """One measurement in a separate process; {} if it failed, with its last lines printed."""
    command = [sys.executable, "-m", __spec__.name, *arguments, "--only", *only]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"{' '.join(only)} failed:\n{done.stderr[-3000:]}", flush=True)
        return {}
    return json.loads(done.stdout.splitlines()[-1])


def _compare_steps(options: argparse.Namespace, arguments: list[str], folder: str) -> bool:
    path = _run(arguments, "model", options.model, folder)["path"]
    print(
        f"{'':<22}{'tokens/s':>10}{'TFLOP/s':>9}{'MFU':>7}{'step s':>8}{'loss':>9}"
        f"{'peak GiB':>10}{'rows a pass':>13}"
    )
    found = {}
    for variant in options.variants.split(","):
        result = _run(arguments, "step", variant, path)
        if not result:
            continue
        found[variant] = result
        flops = result["flops_per_token"] * result["tokens_per_s"]
        print(
            f"{variant:<22}{result['tokens_per_s']:>10,.0f}{flops / 1e12:>9.1f}"
            f"{flops / PEAK:>7.1%}{result['step_s']:>8.3f}{result['loss']:>9.4f}"
            f"{result['peak'] / 2**30:>10.2f}{result['rows_per_pass']:>13.0f}",
            flush=True,
        )
        for name in sorted(result.keys() - IN_COLUMNS):
            print(f"    {name:<40}{result[name]:>14.6g}", flush=True)
    held = True
    for suffix in ("", "/checkpointed"):
        pair = [found.get(f"{variant}{suffix}") for variant in ("plain", "learner")]
        if all(pair):
            ratio = pair[1]["tokens_per_s"] / pair[0]["tokens_per_s"]
            held = held and ratio >= LEAST_OF_PLAIN
            print(f"learner{suffix}: {ratio:.3f} of plain (bar {LEAST_OF_PLAIN:g})")
    return held


def _compare_memory(options: argparse.Namespace, arguments: list[str], folder: str) -> None:
    print(
        "GiB. states: weights, gradients and optimizer between two steps. peak: of a step with"
        " checkpointing. The plan's total has a chunk of logits, and no activations"
    )
    print(
        f"{'model':<14}{'cap':>8}{'states':>10}{'plan':>9}{'plan/found':>12}{'peak':>9}"
        f"{'plan total':>12}{'plan/peak':>11}"
    )
    for model in dict.fromkeys((options.model, options.larger)):
        path = _run(arguments, "model", model, folder)["path"]
        for rows in (options.rows_per_pass // 2, options.rows_per_pass):
            sized = [*arguments, "--rows_per_pass", str(rows)]
            found, plan = _run(sized, "memory", path), _run(sized, "plan", path)
            if not found or not plan:
                continue
            states, peak = found["states"], found["peak"]
            planned, total = plan["plan_states"], plan["plan_total"]
            print(
                f"{model:<14}{rows * (options.length + 1):>8}{states / 2**30:>10.2f}"
                f"{planned / 2**30:>9.2f}{planned / states:>12.2f}{peak / 2**30:>9.2f}"
                f"{total / 2**30:>12.2f}{total / peak:>11.2f}",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
