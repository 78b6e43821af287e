"""Converts Arrow rows of scored groups to training examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from asyncrl.algorithms.advantages.group_advantage import (
    GroupAdvantage,
    GroupInputs,
    group_advantages,
)
from asyncrl.algorithms.pairs import shuffled_rewards
from asyncrl.algorithms.values import gae
from asyncrl.contracts.rows import (
    REFERENCE_COLUMN,
    TEACHER_IDS_COLUMN,
    TEACHER_LOGPROBS_COLUMN,
    TOKEN_REWARDS_COLUMN,
    TRUNCATED,
)
from asyncrl.learning.examples.session_examples import has_sessions, session_examples
from asyncrl.models.micro_batches import Example


def examples_of(table: pa.Table) -> list[Example]:
    """The trainable trajectories of a table of scored groups: those with status ok and at least
    one loss token. A session gives an example for each of its rows.

    Raises:
        ValueError: a trajectory with status ok has no advantage, or the table was not scored.
    """
    missing = [name for name in ("status", "advantage") if name not in table.column_names]
    if missing:
        raise ValueError(
            f"columns {missing} are missing: the learner trains only scored groups; score them"
            " first"
        )
    of_row = session_examples if has_sessions(table) else _row_examples
    return [example for row in range(table.num_rows) for example in of_row(table, row)]


def shuffle_rewards(
    tables: Sequence[pa.Table],
    advantage: GroupAdvantage,
    seed: tuple[int, ...],
) -> list[pa.Table]:
    """The scored groups with the rewards of all usable trajectories permuted, and with new
    advantages. Lengths stay with their trajectories, and baselines with their groups."""
    rewards = [table["reward"][row].as_py() for table in tables for row in range(table.num_rows)]
    usable = [
        [status == "ok" for status in table["status"][row].as_py()]
        for table in tables
        for row in range(table.num_rows)
    ]
    rewards = shuffled_rewards(rewards, usable, seed)
    lengths = [
        [sum(mask) for mask in table["loss_mask"][row].as_py()]
        for table in tables
        for row in range(table.num_rows)
    ]
    baselines: list[float | None] = [
        table["baseline_reward"][row].as_py() if "baseline_reward" in table.column_names else None
        for table in tables
        for row in range(table.num_rows)
    ]
    advantages = [
        group_advantages(group, flags, advantage, GroupInputs(length, baseline=baseline))
        for group, flags, length, baseline in zip(rewards, usable, lengths, baselines, strict=True)
    ]
    shuffled, start = [], 0
    for table in tables:
        for name, values in (("reward", rewards), ("advantage", advantages)):
            column = pa.array(values[start : start + table.num_rows], table.schema.field(name).type)
            table = table.set_column(table.schema.get_field_index(name), name, column)
        shuffled.append(table)
        start += table.num_rows
    return shuffled


def _of_teacher(
    table: pa.Table, row: int, index: int, length: int
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The teacher's token ids and their log-probs [length, K] of a trajectory, if it gave any."""
    if TEACHER_IDS_COLUMN not in table.column_names:
        return None, None
    ids, logprobs = (
        table[name][row].values[index].values.to_numpy(zero_copy_only=False).reshape(length, -1)
        for name in (TEACHER_IDS_COLUMN, TEACHER_LOGPROBS_COLUMN)
    )
    return ids, logprobs


def _row_examples(table: pa.Table, row: int) -> list[Example]:
    prompt = table["prompt_ids"][row].values.to_numpy(zero_copy_only=False)
    statuses, advantages = table["status"][row].as_py(), table["advantage"][row].as_py()
    nested = [table[name][row].values for name in ("completion_ids", "loss_mask", "logprobs")]
    spans = table["versions"][row].values
    reference = (
        table[REFERENCE_COLUMN][row].values if REFERENCE_COLUMN in table.column_names else None
    )
    per_token = (
        table[TOKEN_REWARDS_COLUMN][row].as_py()
        if TOKEN_REWARDS_COLUMN in table.column_names
        else None
    )
    ordinal, reasons = table["ordinal"][row].as_py(), table["finish_reason"][row].as_py()
    examples = []
    for index, status in enumerate(statuses):
        if status != "ok":
            continue
        if advantages[index] is None:
            raise ValueError(
                f"group {ordinal}: trajectory {index} has status ok but no advantage; score it"
                " again"
            )
        ids, mask, logprobs = (
            values[index].values.to_numpy(zero_copy_only=False) for values in nested
        )
        tokens = np.concatenate([prompt, ids]).astype(np.int64)
        versions = _token_versions(spans[index].values)
        referred = (
            reference[index].values.to_numpy(zero_copy_only=False)
            if reference is not None
            else None
        )
        teacher_ids, teacher_logprobs = _of_teacher(table, row, index, len(ids))
        token_rewards = (
            np.asarray(per_token[index], dtype=np.float32) if per_token is not None else None
        )
        examples.append(
            Example(
                tokens=tokens,
                prompt_length=len(prompt),
                loss_mask=mask.astype(bool),
                behavior_logprobs=logprobs.astype(np.float32),
                advantage=float(advantages[index]),
                versions=versions,
                reference_logprobs=referred,
                teacher_ids=teacher_ids,
                teacher_logprobs=teacher_logprobs,
                token_rewards=token_rewards,
                truncated=reasons[index] in TRUNCATED,
                group=ordinal,
                trajectory=index,
            )
        )
    return [example for example in examples if example.loss_tokens]


def _token_versions(spans: pa.StructArray) -> np.ndarray:
    version, start, end = (
        spans.field(name).to_numpy(zero_copy_only=False) for name in ("version", "start", "end")
    )
    return np.repeat(version, end - start)


def with_next_token(example: Example) -> Example:
    """The example with one more loss token, whose value is that of the state after its last token.
    Which token it is has no effect on that value."""

    def longer(values: np.ndarray) -> np.ndarray:
        return np.append(values, values[-1:])

    return replace(
        example,
        tokens=longer(example.tokens),
        loss_mask=np.append(example.loss_mask, True),
        behavior_logprobs=longer(example.behavior_logprobs),
        versions=longer(example.versions),
        reference_logprobs=(
            None if example.reference_logprobs is None else longer(example.reference_logprobs)
        ),
        teacher_ids=None,
        teacher_logprobs=None,
    )


def with_values(
    example: Example, values: np.ndarray, gamma: float, lam: float, after: float = 0.0
) -> Example:
    """The example with an advantage and a return for each token, by generalized advantage
    estimation. `example.advantage` is its reward. The returns are the targets of the values.

    Args:
        values: values of the example's loss tokens.
        after: value of the state after its last token.
    """
    positions = np.flatnonzero(example.loss_mask)
    advantages, returns = np.zeros(len(example.loss_mask)), np.zeros(len(example.loss_mask))
    token_rewards = example.token_rewards[positions] if example.token_rewards is not None else None
    advantages[positions] = gae(float(example.advantage), values, gamma, lam, token_rewards, after)
    returns[positions] = advantages[positions] + values
    return replace(example, advantage=advantages, returns=returns)
