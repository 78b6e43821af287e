"""Statistics of the advantages of a whole step. Importing this needs neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def moments_over_ranks(
    values: np.ndarray, summed: Callable[[np.ndarray], np.ndarray]
) -> tuple[float, float]:
    """Return the mean and population std of all ranks' values.

    This takes two passes, because E[v²] - E[v]² would lose the std of values far from 0.

    Args:
        values: this rank's values, any number of them.
        summed: sums a float64 array over all ranks. Every rank calls it twice.
    """
    import numpy as np

    values = np.asarray(values, dtype=np.float64)
    total, count = summed(np.array([values.sum(), len(values)]))
    mean = total / count
    (squares,) = summed(np.array([((values - mean) ** 2).sum()]))
    return float(mean), float(np.sqrt(squares / count))


def standardized(values: np.ndarray, mean: float, std: float) -> np.ndarray:
    """Return (A - mean) / (std + 1e-6), with the mean and std of all token advantages of the step.

    This is PPO's advantage normalization (Andrychowicz et al. 2020, arXiv:2006.05990, choice
    C67)."""
    found: np.ndarray = (values - mean) / (std + STD_FLOOR)
    return found
