"""The optimizer of a policy: which parameters decay, and which have a learning rate of their
own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from asyncrl.config import LearnerConfig

__all__ = ["make_optimizer", "set_learning_rates"]

VALUE_HEAD = "value_head."
"""Beginning of the names of a policy's value head."""


def make_optimizer(policy: nn.Module, config: LearnerConfig) -> torch.optim.Optimizer:
    """AdamW or SGD over groups of the policy's parameters, with a learning rate of 0 until a step
    sets it.

    A group holds `decayed` (whether weight_decay acts) and `value_head`. torch's fused AdamW goes
    over the memory once in each step; the plain one does so for each of its operations.
    """
    groups = parameter_groups(policy.named_parameters(), config.weight_decay)
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=0.0)
    return torch.optim.AdamW(
        groups, lr=0.0, betas=config.adam_betas, eps=config.adam_eps, fused=True
    )


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]], weight_decay: float
) -> list[dict[str, Any]]:
    """The parameters as groups for an optimizer, in a fixed order; groups without any are left
    out."""
    groups: dict[tuple[bool, bool], dict[str, Any]] = {
        (decayed, value): {
            "params": [],
            "weight_decay": weight_decay if decayed else 0.0,
            "decayed": decayed,
            "value_head": value,
        }
        for value in (False, True)
        for decayed in (True, False)
    }
    for name, parameter in named:
        if parameter.requires_grad:
            groups[decays(name, parameter), name.startswith(VALUE_HEAD)]["params"].append(parameter)
    return [group for group in groups.values() if group["params"]]


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay acts on a parameter: on matrices and embeddings, and not on norms,
    biases, or what the model itself marks (a state's decay rates). An expert's biases are a matrix,
    and are told by their name.
    """
    dimensions = len(
        getattr(parameter, "ds_shape", parameter.shape)
    )  # ZeRO-3 leaves an empty tensor in its place
    return (
        dimensions > 1
        and not name.endswith("bias")
        and not getattr(parameter, "_no_weight_decay", False)
    )


def set_learning_rates(optimizer: Any, learning_rate: float, value_learning_rate: float) -> None:
    """Learning rates of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = value_learning_rate if group["value_head"] else learning_rate
