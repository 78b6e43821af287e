"""A loss, an advantage and a group filter of the user's own are tried on made-up numbers before anything is allocated."""

from __future__ import annotations

import numpy as np

from asyncrl.algorithms.own import is_own, own_advantages, own_verdict
from asyncrl.config import Config, ConfigError
from asyncrl.runtime.functions import FunctionError

__all__ = ["own_text", "try_own"]

REWARDS = ([1.0, 0.0, 0.5, 0.0], [1.0, 1.0], [0.0, 0.0, 0.0])
"""A group of four rewards, and two whose rewards are equal: a std of 0."""


def try_own(config: Config) -> list[str]:
    """What each function of the user's own gave for made-up numbers: a line each.

    Raises:
        ConfigError: one cannot be imported, raised or broke its contract. The message names its file and line.
    """
    algorithm, lines = config.algorithm, []
    try:
        if is_own(algorithm.loss):
            from asyncrl.algorithms.losses import own_metrics  # it imports torch

            metrics = own_metrics(algorithm)
            lines.append(f"algorithm.loss {algorithm.loss}: a loss and a gradient for each of 12 tokens; metrics: {', '.join(metrics) or 'none'}")
        if is_own(algorithm.advantage):
            given = [own_advantages(algorithm.advantage, np.array(rewards)).tolist() for rewards in REWARDS]
            lines.append(f"algorithm.advantage {algorithm.advantage}: {REWARDS[0]} gives {[round(value, 4) for value in given[0]]}")
        if algorithm.group_filter is not None:
            verdicts = [
                own_verdict(algorithm.group_filter, rewards, (np.array(rewards) - np.mean(rewards)).tolist(), [8] * len(rewards), [False] * len(rewards))
                for rewards in REWARDS
            ]
            said = "; ".join(f"{rewards} {'trained' if verdict else 'left out'}" for rewards, verdict in zip(REWARDS, verdicts, strict=True))
            lines.append(f"algorithm.group_filter {algorithm.group_filter}: {said}")
    except FunctionError as error:
        raise ConfigError(f"on made-up numbers: {error}") from None
    return lines


def own_text(lines: list[str]) -> str:
    """The lines under a heading; nothing without any."""
    return "\n".join(["# own functions, on made-up numbers", *(f"  {line}" for line in lines)]) if lines else ""
