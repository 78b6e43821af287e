"""Faults of the baselines in groups/*.parquet, for an audit.

Both checks are entries of `rows.FAULTS`: they take a table of groups and the completion tokens of
each of its trajectories, and return whether each trajectory has the fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypedDict

import numpy as np
import pyarrow as pa

from asyncrl.contracts.rows import BASELINE_COLUMNS, Completion, SpanRow, VersionSpan

ROUNDING = 1e-5
"""Tolerance of an advantage, relative to the rewards that it is from: all are float32."""


class _BaselineRow(TypedDict):
    """The columns of a group that the checks need."""

    baseline_text: str | None
    baseline_ids: list[int] | None
    baseline_logprobs: list[float] | None
    baseline_versions: list[SpanRow] | None
    baseline_finish_reason: str | None
    baseline_reward: float | None
    reward: list[float | None]
    advantage: list[float | None]


def impossible_baselines(table: pa.Table, lengths: np.ndarray) -> np.ndarray:
    """Baselines that lack a value, whose log-probs or version spans do not fit their tokens, whose
    finish reason is unknown, or whose reward is no number."""
    return _found(table, lengths, _is_impossible)


def odd_advantages(table: pa.Table, lengths: np.ndarray) -> np.ndarray:
    """Advantages that are not the reward less the reward of the group's baseline."""
    return _found(table, lengths, _is_odd)


def _found(
    table: pa.Table, lengths: np.ndarray, check: Callable[[_BaselineRow], bool]
) -> np.ndarray:
    """Whether the group of each trajectory has the fault. A run without baselines has none.

    Raises:
        ValueError: the table has only some of the columns of baselines.
    """
    if not set(BASELINE_COLUMNS) & set(table.column_names):
        return np.zeros(len(lengths), bool)
    if missing := sorted(set(BASELINE_COLUMNS) - set(table.column_names)):
        raise ValueError(f"the table has baselines, but no column {missing[0]}")
    rows: list[_BaselineRow] = table.select([*BASELINE_COLUMNS, "reward", "advantage"]).to_pylist()
    faulty = [[check(row)] * len(row["reward"]) for row in rows]
    return np.array([fault for group in faulty for fault in group], bool)


def _is_impossible(row: _BaselineRow) -> bool:
    ids, text, logprobs = row["baseline_ids"], row["baseline_text"], row["baseline_logprobs"]
    spans, reason = row["baseline_versions"], row["baseline_finish_reason"]
    if ids is None or text is None or logprobs is None or spans is None or reason is None:
        return True
    try:
        versions = tuple(VersionSpan(**span) for span in spans)
        Completion(tuple(ids), tuple(logprobs), versions, reason)
    except ValueError:
        return True
    return min(ids, default=0) < 0 or not math.isfinite(row["baseline_reward"] or 0.0)


def _is_odd(row: _BaselineRow) -> bool:
    baseline = row["baseline_reward"]
    return any(
        reward is None
        or baseline is None
        or not math.isclose(
            advantage, reward - baseline, abs_tol=ROUNDING * (1 + abs(reward) + abs(baseline))
        )
        for reward, advantage in zip(row["reward"], row["advantage"], strict=True)
        if advantage is not None
    )
