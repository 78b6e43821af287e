"""One step of online DPO: chooses pairs from the completions of scored groups, and trains them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from asyncrl.algorithms.pairs import Candidates, choose_pairs, shuffled_rewards
from asyncrl.contracts.messages import StepResult
from asyncrl.contracts.offline_rows import (
    BEHAVIOR_COLUMNS,
    OLDEST_VERSION_COLUMN,
    PREFERENCE_SCHEMA,
    REFERENCE,
    REFERENCE_COLUMNS,
    SIDES,
)
from asyncrl.contracts.outcomes import NO_PAIR, NOT_FINITE
from asyncrl.contracts.rows import REFERENCE_COLUMN, TRUNCATED
from asyncrl.learning.engine.state import LearnerState
from asyncrl.learning.spec import LearnerSpec
from asyncrl.learning.steps.preference_step import train_preferences


def online_preference_step(state: LearnerState, tables: Sequence[pa.Table]) -> StepResult:
    """Take one step on the pairs of scored groups, one table each (a collective).

    The step is skipped on all ranks if no group gives a pair, or if any rank finds NaN or Inf.

    Raises:
        ValueError: the run has no algorithm.preference, or a column is missing.
        RuntimeError: a pair's staleness is not between 0 and the bound.
    """
    spec, version = state.spec.online, state.applied
    preference = spec.algorithm.preference
    if preference is None:
        raise ValueError("this run has no preference objective; set algorithm.preference")
    table, without = pairs_table(tables, state.spec, version)
    counts = {"pairs": float(table.num_rows), "pref/groups_without_pair": float(without)}
    if not table.num_rows:
        nothing = {"applied": 0.0, "trajectories": 0.0, "tokens": 0.0}
        return StepResult(False, nothing | counts, "", NO_PAIR)
    _check_ages(table, version, spec.staleness.max_staleness)
    moment = f"version_{version:06d}"
    metrics, note = train_preferences(
        state, table, preference, spec.rollout.temperature, moment, tables
    )
    applied = bool(metrics["applied"])
    return StepResult(applied, metrics | counts, note, "" if applied else NOT_FINITE)


def pairs_table(
    tables: Sequence[pa.Table], spec: LearnerSpec, version: int
) -> tuple[pa.Table, int]:
    """Choose the pairs of scored groups, one row per table, at the learner's policy version.

    Returns:
        The pairs, with PREFERENCE_SCHEMA, REFERENCE_COLUMNS, BEHAVIOR_COLUMNS and
        OLDEST_VERSION_COLUMN; and the number of groups that give none.

    Raises:
        ValueError: the run has no algorithm.preference, or a column is missing.
    """
    preference = spec.online.algorithm.preference
    if preference is None:
        raise ValueError("this run chooses no pairs; set algorithm.preference")
    groups = [_group(table) for table in tables]
    if spec.online.reward.shuffle:
        rewards = shuffled_rewards(
            [group.candidates.rewards for group in groups],
            [group.candidates.usable for group in groups],
            (spec.seed, version),
        )
        groups = [
            replace(group, candidates=replace(group.candidates, rewards=drawn))
            for group, drawn in zip(groups, rewards, strict=True)
        ]
    chosen = [choose_pairs(group.candidates, preference.pairs) for group in groups]
    pairs = [
        tuple(group.sides[index] for index in pair)
        for group, found in zip(groups, chosen, strict=True)
        for pair in found
    ]
    return _table_of(pairs), sum(not found for found in chosen)


@dataclass(frozen=True, slots=True)
class _Side:
    """One trajectory as a side of a pair."""

    ids: np.ndarray
    """[P + C] int32: prompt and completion."""
    mask: np.ndarray
    """[P + C] bool: the tokens with loss."""
    reference: np.ndarray
    """[tokens with loss] float32, nats, by the reference policy."""
    behavior: np.ndarray
    """[tokens with loss] float32, nats, by the behavior policy."""
    oldest_version: int


@dataclass(frozen=True, slots=True)
class _Group:
    candidates: Candidates
    sides: dict[int, _Side]
    """Index of a trajectory → the trajectory, for those with status ok."""


def _group(table: pa.Table) -> _Group:
    """The group of a one-row table.

    Raises:
        ValueError: a column is missing.
    """
    needed = ("status", "reward", REFERENCE_COLUMN)
    if missing := [name for name in needed if name not in table.column_names]:
        raise ValueError(
            f"columns {missing} are missing: online DPO trains scored groups with the reference"
            " policy's log-probs; score them with it first"
        )
    statuses, rewards, reasons = (
        table[name][0].as_py() for name in ("status", "reward", "finish_reason")
    )
    prompt = table["prompt_ids"][0].values.to_numpy(zero_copy_only=False)
    ids, masks, behavior, reference, spans = (
        table[name][0].values
        for name in ("completion_ids", "loss_mask", "logprobs", REFERENCE_COLUMN, "versions")
    )
    sides, completions = {}, []
    for index, status in enumerate(statuses):
        completion = _numbers(ids[index])
        completions.append(completion.tobytes())
        if status != "ok":
            continue
        mask = _numbers(masks[index]).astype(bool)
        sides[index] = _Side(
            np.concatenate([prompt, completion]),
            np.concatenate([np.zeros(len(prompt), dtype=bool), mask]),
            _numbers(reference[index])[mask],
            _numbers(behavior[index])[mask],
            int(_numbers(spans[index].values.field("version")).min()),
        )
    usable, truncated = (
        [status == "ok" for status in statuses],
        [reason in TRUNCATED for reason in reasons],
    )
    return _Group(Candidates(rewards, usable, truncated, completions), sides)


def _numbers(values: pa.Array | pa.ListScalar) -> np.ndarray:
    array = values.values if isinstance(values, pa.ListScalar) else values
    return np.asarray(array.to_numpy(zero_copy_only=False))


def _table_of(pairs: Sequence[tuple[_Side, ...]]) -> pa.Table:
    """The table of these pairs, chosen first."""
    columns: dict[str, pa.Array] = {}
    for number, side in enumerate(SIDES):
        members = [pair[number] for pair in pairs]
        for name, parts in (
            (f"{side}_ids", [member.ids for member in members]),
            (f"{side}_mask", [member.mask for member in members]),
            (REFERENCE_COLUMNS[number], [member.reference for member in members]),
            (BEHAVIOR_COLUMNS[number], [member.behavior for member in members]),
        ):
            found = PREFERENCE_SCHEMA.get_field_index(name)
            kind = PREFERENCE_SCHEMA.field(found).type if found >= 0 else REFERENCE
            columns[name] = _list_array(parts, kind)
    oldest = [min(side.oldest_version for side in pair) for pair in pairs]
    return pa.table({**columns, OLDEST_VERSION_COLUMN: pa.array(oldest, pa.int32())})


def _list_array(parts: Sequence[np.ndarray], kind: pa.ListType) -> pa.Array:
    """An array with one list for each part, without Python values."""
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts], dtype=np.int64)])
    values = np.concatenate(parts) if parts else np.zeros(0)
    return pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()), pa.array(values, kind.value_type)
    )


def _check_ages(table: pa.Table, version: int, bound: int) -> None:
    """Raise RuntimeError unless each pair's older side is at most `bound` versions old."""
    ages = version - table[OLDEST_VERSION_COLUMN].to_numpy()
    if ages.min() < 0 or ages.max() > bound:
        raise RuntimeError(
            f"a pair has a staleness of {ages.min()} to {ages.max()} at version {version}, outside"
            f" 0 to staleness.max_staleness = {bound}"
        )
