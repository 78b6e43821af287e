"""Calls the user's loss, advantage and group filter, and checks their results.
docs/how_to/own_algorithm.md describes their contracts. They must be pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from asyncrl.runtime.functions import FunctionError, call_function, short

if TYPE_CHECKING:  # scoring workers need no torch
    from torch import Tensor

CLIPPED = "clipped"
"""The metric of a custom loss that is reported as `clip_fraction`."""


def own_loss(
    function: str, given: Mapping[str, Tensor | int], arguments: Mapping[str, object]
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Call the user's loss and check its result.

    Args:
        given: what the function may take. `logprobs` [N] has the gradient.
        arguments: those of the user. The function must take each of them.

    Returns:
        The loss [N], the clip mask [N], and the sum of each other metric over the tokens.

    Raises:
        FunctionError: the function raised or broke its contract.
    """
    import torch

    logprobs = given["logprobs"]
    assert isinstance(logprobs, torch.Tensor)
    tensors = {key: value for key, value in given.items() if isinstance(value, torch.Tensor)}
    # The function may change its arguments themselves.
    copies = {key: value.clone() for key, value in tensors.items()}
    returned, name = call_function("algorithm.loss", function, {**given, **copies}, arguments)
    pair = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    loss = _checked_loss(name, pair[0], logprobs)
    metrics = _checked_metrics(name, pair[1], logprobs)
    if all(bool(torch.isfinite(value).all()) for value in tensors.values()):
        _check_finite(name, {"loss": loss, **{f"metric {key}": metrics[key] for key in metrics}})
    clipped = metrics.pop(CLIPPED, torch.zeros_like(logprobs, dtype=torch.bool)).detach()
    return loss, clipped, {key: values.detach().sum() for key, values in metrics.items()}


def _checked_loss(name: str, loss: object, logprobs: Tensor) -> Tensor:
    checked = _per_token(name, "loss", loss, logprobs)
    if not checked.is_floating_point():
        raise FunctionError(f"{name} returned loss of {checked.dtype}; return {logprobs.dtype}")
    if logprobs.requires_grad and not checked.requires_grad:
        raise FunctionError(
            f"{name} returned a loss without a gradient; compute it from logprobs, and not under"
            " torch.no_grad or detached"
        )
    return checked


def _checked_metrics(name: str, metrics: object, logprobs: Tensor) -> dict[str, Tensor]:
    if not isinstance(metrics, Mapping) or not all(
        isinstance(key, str) and key and "/" not in key for key in metrics
    ):
        found = short(repr(list(metrics) if isinstance(metrics, Mapping) else metrics))
        raise FunctionError(
            f"{name} returned the metrics {found}; return (loss, dict) with short names without '/'"
        )
    return {
        key: _per_token(name, f"metric {key}", values, logprobs) for key, values in metrics.items()
    }


def _per_token(name: str, what: str, values: object, like: Tensor) -> Tensor:
    """Return `values` if it is a tensor with the shape and device of `like`."""
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
    return values


def _check_finite(name: str, results: Mapping[str, Tensor]) -> None:
    """Refuse a NaN or infinite value. Call this only if all arguments of the function are
    finite."""
    import torch

    for what, values in results.items():
        finite = torch.isfinite(values)
        if not bool(finite.all()):
            at = int((~finite).nonzero()[0])
            raise FunctionError(
                f"{name} returned {float(values[at].detach())} as {what} of token {at} from finite"
                " arguments; clamp the log-ratio before exp"
            )


def own_advantages(
    function: str, rewards: np.ndarray, arguments: Mapping[str, object]
) -> np.ndarray:
    """Return the user's advantages [n] for the rewards [n] of a group's usable trajectories.

    Raises:
        FunctionError: the function raised or broke its contract.
    """
    returned, name = call_function(
        "algorithm.advantage", function, {"rewards": rewards.copy()}, arguments
    )
    try:
        read = np.asarray(returned)
    except Exception:  # The object may raise anything, such as a tensor that has a gradient.
        raise FunctionError(
            f"{name} returned {type(returned).__name__}; return {len(rewards)} floats, one for each"
            " reward"
        ) from None
    if read.dtype.kind not in "biuf":
        raise FunctionError(
            f"{name} returned {type(returned).__name__} of {read.dtype}; return {len(rewards)}"
            " floats, one for each reward"
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
    arguments: Mapping[str, object],
    rewards: Sequence[float],
    advantages: Sequence[float],
    lengths: Sequence[int],
    truncated: Sequence[bool],
) -> bool:
    """Return whether the user's filter keeps the group of these usable trajectories.

    Raises:
        FunctionError: the function raised, or did not return a bool.
    """
    given = {
        "rewards": np.array(rewards, dtype=np.float64),
        "advantages": np.array(advantages, dtype=np.float64),
        "lengths": np.array(lengths, dtype=np.int64),
        "truncated": np.array(truncated, dtype=bool),
    }
    returned, name = call_function("algorithm.group_filter", function, given, arguments)
    if not isinstance(returned, bool | np.bool_):
        raise FunctionError(
            f"{name} returned {type(returned).__name__}; return True to train the group, False to"
            " leave it out"
        )
    return bool(returned)
