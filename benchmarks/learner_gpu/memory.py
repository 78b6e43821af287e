"""The memory of the learner's rank, beside the estimate of `asyncrl plan`."""

import argparse

from asyncrl.preflight import estimate
from benchmarks.learner import token_table
from benchmarks.learner_gpu.device import allocated, peak, reset_peak, wait
from benchmarks.learner_gpu.models import config, learner_rank, seeded_rows


def memory(options: argparse.Namespace, path: str) -> dict[str, float]:
    """What a rank with checkpointing allocates, in bytes."""
    rows = seeded_rows(options)[: 2 * options.rows_per_pass]
    rank = learner_rank(options, path, True)
    rank.supervised_step(token_table(rows))
    wait(options.device)
    reset_peak(options.device)
    rank.supervised_step(token_table(rows))
    wait(options.device)
    return {
        "states": float(allocated(options.device)),
        "peak": float(peak(options.device)),
    }


def plan(options: argparse.Namespace, path: str) -> dict[str, float]:
    """The estimate of `asyncrl plan` for that rank, in bytes. It makes DeepSpeed choose the CPU, so
    it needs a process of its own."""
    needs = estimate(config(options, path, True))
    return {
        "plan_states": float(needs.on_device),
        "plan_total": float(needs.on_device + needs.logits),
    }
