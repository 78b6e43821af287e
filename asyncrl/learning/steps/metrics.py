"""Metrics of a step: sums over micro-batches and ranks, then means over the step's tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.algorithms.loss_metrics import LossSums
from asyncrl.learning.packing.strategies import Packing
from asyncrl.models.micro_batches import Example, trajectories_of
from asyncrl.runtime.functions import FunctionError
from asyncrl.runtime.processes.resident import resident_bytes

SUMS = tuple(
    field.name
    for field in fields(LossSums)
    if field.name not in ("ratio_max", "nonfinite", "own", "parts", "tokens")
)
LARGEST = ("ratio_max", "memory/learner_bytes", "memory/learner_gpu_bytes")
NAMES = (*SUMS, "entropy", "nonfinite_loss", "nonfinite_gradient")


class StepSums:
    """Sums of one step on one rank, kept on the device until `over_ranks`."""

    def __init__(
        self, device: torch.device, own: Sequence[str] = (), parts: Sequence[str] = ()
    ) -> None:
        """`own` are the names of the metrics of the user's loss, and `parts` those of the loss's
        components. Both are equal on every rank."""
        self.own, self.parts = tuple(own), tuple(parts)
        self.sums = torch.zeros(
            len(NAMES) + len(self.own) + len(self.parts), dtype=torch.float64, device=device
        )
        self.largest = torch.zeros(3, dtype=torch.float64, device=device)
        """Largest ratio; and when the sums are taken over ranks, resident bytes, and the most
        bytes that PyTorch has allocated on the GPU."""

    def add(self, sums: LossSums, entropy: Tensor) -> None:
        """Add one micro-batch. `entropy` is [N].

        Raises:
            FunctionError: the user's loss returned other metrics than on made-up numbers.
        """
        if sums.own and set(sums.own) != set(self.own):
            raise FunctionError(
                f"algorithm.loss returned the metrics {sorted(sums.own)}; in the trial it returned"
                f" {sorted(self.own)}; return the same names in every call"
            )
        values = [getattr(sums, name) for name in SUMS] + [entropy.sum()]
        bad = sums.nonfinite + ~torch.isfinite(sums.loss)
        zero = torch.zeros_like(bad)
        self.sums += torch.stack(
            [
                torch.as_tensor(value, device=bad.device).double()
                for value in (
                    *values,
                    bad,
                    zero,
                    *(sums.own.get(name, 0.0) for name in self.own),
                    *(sums.parts.get(name, 0.0) for name in self.parts),
                )
            ]
        )
        self.largest[0] = torch.maximum(self.largest[0], sums.ratio_max.double())

    def nonfinite_gradient(self, found: bool) -> None:
        """Record whether this rank's gradient shards contain NaN or Inf."""
        self.sums[len(NAMES) - 1] += found

    def over_ranks(self) -> dict[str, float]:
        """Sums over all ranks (a collective). `nonfinite_loss` counts tokens and micro-batches.
        `nonfinite_gradient` counts ranks."""
        self.largest[1] = resident_bytes()
        if self.largest.is_cuda:
            self.largest[2] = torch.cuda.max_memory_allocated()
        dist.all_reduce(self.sums)
        dist.all_reduce(self.largest, op=dist.ReduceOp.MAX)
        names = (*NAMES, *(f"loss/{name}" for name in self.own), *self.parts)
        found = dict(zip(names, self.sums.tolist(), strict=True))
        return found | dict(zip(LARGEST, self.largest.tolist(), strict=True))


def step_metrics(
    totals: dict[str, float],
    tokens: int,
    examples: Sequence[Example],
    plan: Packing,
    grad_norm: float,
    learning_rate: float,
    applied: bool,
    seconds: float,
    parts: Sequence[str] = (),
    policy: bool = False,
) -> dict[str, float]:
    """Metrics of one step. Means are over its `tokens` loss tokens. `input_tokens` also counts
    prompts. `computed_tokens` counts a common prefix of trajectories once in a micro-batch.
    `grad_norm` is the norm before clipping.

    Args:
        parts: names of the components' metrics.
        policy: whether the step has a policy objective, and so a behavior policy.
    """
    input_tokens = sum(len(example.tokens) for example in examples)
    return {
        "applied": float(applied),
        "loss": totals["loss"],
        "grad_norm": grad_norm,
        "learning_rate": learning_rate,
        "tokens": float(tokens),
        "input_tokens": float(input_tokens),
        "computed_tokens": float(plan.tokens),
        "trajectories": float(len(set(trajectories_of(examples)))),
        "micro_batches": float(sum(len(micro_batches) for micro_batches in plan.micro_batches)),
        "fill": plan.fill,
        "imbalance": plan.imbalance,
        **(_policy_metrics(totals, tokens) if policy else {}),
        **{name: totals[name] for name in parts},
        "entropy": totals["entropy"] / tokens,
        "nonfinite_loss": totals["nonfinite_loss"],
        "nonfinite_gradient": totals["nonfinite_gradient"],
        **{name: totals[name] for name in LARGEST[1:] if totals.get(name)},
        "step_s": seconds,
        "tokens_per_s": input_tokens / seconds,
    }


def _policy_metrics(totals: Mapping[str, float], tokens: int) -> dict[str, float]:
    """Metrics of a policy objective, in addition to those of every step."""
    return {
        **_off_policy_metrics(totals, tokens),
        "value_loss": totals["value_loss"],
        "in_flight_drift": (
            totals["drift"] / totals["drift_tokens"] if totals["drift_tokens"] else float("nan")
        ),
        "in_flight_drift_tokens": totals["drift_tokens"],
        **{name: total / tokens for name, total in totals.items() if name.startswith("loss/")},
    }


def _off_policy_metrics(totals: Mapping[str, float], tokens: int) -> dict[str, float]:
    """Differences between learner and behavior or reference policy, and the effect of the
    correction. r = π_learner / π_behavior of a token.

    `ess` is the effective sample size as a share of the tokens, (Σr)² / (N·Σr²). `chi2` is the
    chi-squared divergence, mean (r - 1)²; its expected value is the variance of r.
    """
    return {
        "ratio_mean": totals["ratio"] / tokens,
        "ratio_max": totals["ratio_max"],
        "ess": (
            min(1.0, totals["ratio"] ** 2 / (tokens * totals["ratio_squared"]))
            if totals["ratio_squared"]
            else float("nan")
        ),
        "chi2": (totals["ratio_squared"] - 2 * totals["ratio"]) / tokens + 1,
        "clip_fraction": totals["clipped"] / tokens,
        "mask_fraction": totals["masked"] / tokens,
        **{
            f"mask_fraction/{reason}": totals[f"masked_{reason}"] / tokens
            for reason in ("band", "rejected", "sequence")
        },
        "capped_fraction": totals["capped"] / tokens,
        "weight_mean": totals["weight"] / tokens,
        "kl_k1": totals["kl_k1"] / tokens,
        "kl_k3": totals["kl_k3"] / tokens,
        "kl_reference": totals["kl_reference"] / tokens,
    }
