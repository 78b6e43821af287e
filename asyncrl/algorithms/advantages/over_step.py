"""Statistics of the advantages of a whole step. Importing this needs neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncrl.algorithms.advantages.group_advantage import STD_FLOOR

if TYPE_CHECKING:
    import numpy as np


def over_std(advantages: Sequence[float], rewards: Sequence[float]) -> list[float]:
    """Return A / (std + 1e-6), with the population std of the rewards."""
    import numpy as np

    return [advantage / (float(np.std(rewards)) + STD_FLOOR) for advantage in advantages]


def normalized(advantages: Sequence[float], shares: Sequence[float]) -> list[float]:
    """Return (A - mean) / (std + 1e-6), where advantage i counts shares[i] times."""
    import numpy as np

    values, counts = np.asarray(advantages, dtype=np.float64), np.asarray(shares, dtype=np.float64)
    mean = np.average(values, weights=counts)
    std = np.sqrt(np.average((values - mean) ** 2, weights=counts))
    return list(((values - mean) / (std + STD_FLOOR)).tolist())


def standardized(values: np.ndarray, every: np.ndarray) -> np.ndarray:
    """Return (A - mean) / (std + 1e-6), with the mean and population std of all token advantages of
    the step, float64.

    This is PPO's advantage normalization (Andrychowicz et al. 2020, arXiv:2006.05990, choice
    C67)."""
    found: np.ndarray = (values - every.mean()) / (every.std() + STD_FLOOR)
    return found
