"""The optimizer of a policy: which parameters have weight decay, and which have their own learning
rate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import nn

from asyncrl.config import LearnerConfig

if TYPE_CHECKING:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

VALUE_HEAD = "value_head."
"""Prefix of the parameter names of a policy's value head."""


class ParameterGroup(TypedDict):
    """A parameter group of a torch optimizer."""

    params: list[nn.Parameter]
    weight_decay: float
    decayed: bool
    """Whether weight decay acts on the group."""
    value_head: bool
    """Whether the group belongs to the value head, with its own learning rate."""


def make_optimizer(policy: nn.Module, config: LearnerConfig) -> torch.optim.Optimizer:
    """The optimizer over groups of the policy's parameters. The learning rate is 0 until a step
    sets it."""
    groups = parameter_groups(policy.named_parameters(), config.weight_decay)
    return config.optimizer.of([dict(group) for group in groups])


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]], weight_decay: float
) -> list[ParameterGroup]:
    """The parameters in groups for an optimizer, in a fixed order. Empty groups are left out."""
    groups: dict[tuple[bool, bool], ParameterGroup] = {
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
    """Whether weight decay acts on a parameter.

    It acts on matrices and embeddings. It does not act on norms, on biases, or on parameters that
    the model marks (such as a state's decay rates). The biases of experts form a matrix, so their
    name decides.
    """
    # ZeRO-3 replaces a parameter by an empty tensor, and keeps its shape in `ds_shape`.
    dimensions = len(getattr(parameter, "ds_shape", parameter.shape))
    return (
        dimensions > 1
        and not name.endswith("bias")
        and not getattr(parameter, "_no_weight_decay", False)
    )


def set_learning_rates(
    optimizer: torch.optim.Optimizer | DeepSpeedZeroOptimizer_Stage3,
    learning_rate: float,
    value_learning_rate: float,
) -> None:
    """Set the learning rates of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = value_learning_rate if group["value_head"] else learning_rate
