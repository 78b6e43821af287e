"""A loss, an advantage and a group filter of the user's own, called and checked.
docs/own_algorithms.md has the contracts; pure, as the built-in ones are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncrl.runtime.functions import FunctionError, call_function, short

if TYPE_CHECKING:  # scoring workers need no torch
    from torch import Tensor

__all__ = ["CLIPPED", "is_own", "own_advantages", "own_loss", "own_verdict"]

CLIPPED = "clipped"
"""The metric of a loss that counts as `clip_fraction`."""


def is_own(name: str) -> bool:
    """Whether this names a function, and no built-in method."""
    return ":" in name


def own_loss(
    function: str, told: Mapping[str, Tensor | int]
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The loss [N] of each token, which tokens it clips [N], and the sum of each of its other
    metrics over the tokens.

    Args:
        told: its arguments. `logprobs` [N] has the gradient.

    Raises:
        FunctionError: it raised, or gave what the contract does not allow.
    """
    import torch

    logprobs = told["logprobs"]
    assert isinstance(logprobs, torch.Tensor)
    copies = {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in told.items()
    }  # it may change them
    given, name = call_function("algorithm.loss", function, copies)
    loss, metrics = given if isinstance(given, tuple) and len(given) == 2 else (given, {})
    _check_tensor(name, "loss", loss, logprobs)
    if logprobs.requires_grad and not loss.requires_grad:
        raise FunctionError(
            f"{name} returned a loss without a gradient; compute it from logprobs, and not under"
            " torch.no_grad or detached"
        )
    if not isinstance(metrics, Mapping) or not all(
        isinstance(key, str) and key and "/" not in key for key in metrics
    ):
        found = short(repr(list(metrics) if isinstance(metrics, Mapping) else metrics))
        raise FunctionError(
            f"{name} returned the metrics {found}; return (loss, dict) with short names without '/'"
        )
    for key, values in metrics.items():
        _check_tensor(name, f"metric {key}", values, logprobs)
    known_finite = all(
        bool(torch.isfinite(value).all())
        for value in told.values()
        if isinstance(value, torch.Tensor)
    )
    for key, values in {
        "loss": loss,
        **{f"metric {key}": values for key, values in metrics.items()},
    }.items():
        if known_finite and not bool(torch.isfinite(values).all()):
            at = int((~torch.isfinite(values)).nonzero()[0])
            raise FunctionError(
                f"{name} returned {float(values[at].detach())} as {key} of token {at} from finite"
                " arguments; clamp the log-ratio before exp"
            )
    clipped = metrics.get(CLIPPED, torch.zeros_like(logprobs, dtype=torch.bool)).detach()
    return (
        loss,
        clipped,
        {key: values.detach().sum() for key, values in metrics.items() if key != CLIPPED},
    )


def _check_tensor(name: str, what: str, values: Any, like: Tensor) -> None:
    import torch

    if not isinstance(values, torch.Tensor):
        raise FunctionError(
            f"{name} returned {what} as {type(values).__name__}; return a tensor with one value for"
            " each token"
        )
    if values.shape != like.shape:
        raise FunctionError(
            f"{name} returned {what} of shape {list(values.shape)}; return shape"
            f" {list(like.shape)}, one value for each token"
        )
    if values.device != like.device:
        raise FunctionError(
            f"{name} returned {what} on {values.device}; return it on {like.device}, where its"
            " arguments are"
        )
    if what == "loss" and not values.is_floating_point():
        raise FunctionError(f"{name} returned {what} of {values.dtype}; return {like.dtype}")


def own_advantages(function: str, rewards: np.ndarray) -> np.ndarray:
    """The advantages [n] for the rewards [n] of a group's usable trajectories.

    Raises:
        FunctionError: it raised, or gave what the contract does not allow.
    """
    given, name = call_function("algorithm.advantage", function, {"rewards": rewards.copy()})
    try:
        read = np.asarray(given)
    except (
        Exception
    ):  # whatever an object of its own raises while it is read, such as a tensor with a gradient
        raise FunctionError(
            f"{name} returned {type(given).__name__}; return {len(rewards)} floats, one for each"
            " reward"
        ) from None
    if read.dtype.kind not in "biuf":
        raise FunctionError(
            f"{name} returned {type(given).__name__} of {read.dtype}; return {len(rewards)} floats,"
            " one for each reward"
        )
    values = read.astype(np.float64)
    if values.shape != rewards.shape:
        raise FunctionError(
            f"{name} returned shape {list(values.shape)}; return shape {list(rewards.shape)}, one"
            " advantage for each reward"
        )
    if not np.isfinite(values).all():
        raise FunctionError(
            f"{name} returned {values.tolist()} for the rewards {rewards.tolist()}; return finite"
            " numbers, such as 0 where a std is 0"
        )
    return values


def own_verdict(
    function: str,
    rewards: Sequence[float],
    advantages: Sequence[float],
    lengths: Sequence[int],
    truncated: Sequence[bool],
) -> bool:
    """Whether the group of these usable trajectories is trained.

    Raises:
        FunctionError: it raised, or gave no bool.
    """
    told = {
        "rewards": np.array(rewards, dtype=np.float64),
        "advantages": np.array(advantages, dtype=np.float64),
        "lengths": np.array(lengths, dtype=np.int64),
        "truncated": np.array(truncated, dtype=bool),
    }
    given, name = call_function("algorithm.group_filter", function, told)
    if not isinstance(given, bool | np.bool_):
        raise FunctionError(
            f"{name} returned {type(given).__name__}; return True to train the group, False to"
            " leave it out"
        )
    return bool(given)
