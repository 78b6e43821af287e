"""Groups as Arrow tables, one row per group, and tables as Arrow IPC streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import pyarrow as pa

from asyncrl.contracts.columns import encode_column, row_values
from asyncrl.contracts.rows import (
    ADDED_COLUMNS,
    BASELINE_COLUMNS,
    BASELINE_PARTS_COLUMN,
    COLUMNS,
    REFERENCE_COLUMN,
    REFERENCE_LOGPROBS,
    REFERENCE_VERSION,
    REFERENCE_VERSION_COLUMN,
    SCORED_COLUMNS,
    TIME_COLUMNS,
    TOKEN_REWARDS,
    TOKEN_REWARDS_COLUMN,
    Baseline,
    Completion,
    Group,
    GroupRow,
    Prompt,
    SpanRow,
    Trajectory,
    VersionSpan,
)


def groups_to_table(groups: Sequence[Group]) -> pa.Table:
    """An Arrow table with one row per group. It has the scored columns if the groups are scored,
    and those of baselines if they have one; either all groups are and do, or none."""
    if not groups:
        raise ValueError("a table needs at least one group")
    scored = groups[0].scored_at is not None
    types = COLUMNS | TIME_COLUMNS
    columns: dict[str, list[object]] = {name: [] for name in types}
    for group in groups:
        for name, value in _row(group).items():
            columns[name].append(value)
    arrays = {name: pa.array(values, types[name]) for name, values in columns.items()}
    if scored:
        arrays |= _scored_arrays(groups)
    arrays |= _baseline_arrays([group.baseline for group in groups if group.baseline], scored)
    fields = [pa.field(name, array.type) for name, array in arrays.items()]
    schema = groups[0].prompt.schema
    for name in groups[0].prompt.columns:
        known = schema.field(name) if schema is not None else None
        arrays[name] = encode_column([group.prompt.columns[name] for group in groups], known)
        fields.append(known or pa.field(name, arrays[name].type))
    return pa.Table.from_arrays(list(arrays.values()), schema=pa.schema(fields))


def table_to_ipc(table: pa.Table) -> pa.Buffer:
    """The table as an Arrow IPC stream. Ray's own pickling takes milliseconds for columns nested
    this deeply, even for a few rows."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def table_from_ipc(stream: pa.Buffer) -> pa.Table:
    """The inverse of `table_to_ipc`, without a copy: the table uses the stream's memory."""
    return pa.ipc.open_stream(stream).read_all()


def groups_from_table(table: pa.Table) -> list[Group]:
    """The inverse of `groups_to_table`: exactly the same groups. Of sessions, they have the sampled
    tokens; `asyncrl.contracts.session_table` has the rest."""
    names = [name for name in table.column_names if name not in ADDED_COLUMNS]
    schema = table.select(names).schema
    return [
        _group(cast("GroupRow", row), {name: row[name] for name in names}, schema)
        for row in row_values(table)
    ]


def _row(group: Group) -> GroupRow:
    completions = [trajectory.completion for trajectory in group.trajectories]
    return {
        "attempt": group.attempt,
        "ordinal": group.ordinal,
        "epoch": group.prompt.epoch,
        "prompt_text": group.prompt.text,
        "prompt_ids": group.prompt.token_ids,
        "completion_text": [c.text for c in completions],
        "completion_ids": [c.token_ids for c in completions],
        "loss_mask": [t.loss_mask for t in group.trajectories],
        "logprobs": [c.logprobs for c in completions],
        "versions": [_span_rows(c) for c in completions],
        "finish_reason": [c.finish_reason for c in completions],
        "replica": group.replica,
        "started_at": group.started_at,
        "finished_at": group.finished_at,
        "admitted_at": group.admitted_at,
        "generated_from": [began for began, _ in group.generated] or None,
        "generated_to": [ended for _, ended in group.generated] or None,
    }


def _span_rows(completion: Completion) -> list[SpanRow]:
    return [
        {"version": span.version, "start": span.start, "end": span.end}
        for span in completion.versions
    ]


def _baseline_arrays(baselines: Sequence[Baseline], scored: bool) -> dict[str, pa.Array]:
    """The columns of the groups' baselines; none without baselines."""
    if not baselines:
        return {}
    completions = [baseline.completion for baseline in baselines]
    columns = {
        "baseline_text": [c.text for c in completions],
        "baseline_ids": [c.token_ids for c in completions],
        "baseline_logprobs": [c.logprobs for c in completions],
        "baseline_versions": [_span_rows(c) for c in completions],
        "baseline_finish_reason": [c.finish_reason for c in completions],
    }
    if scored:
        columns["baseline_reward"] = [baseline.reward for baseline in baselines]
    arrays = {name: pa.array(values, BASELINE_COLUMNS[name]) for name, values in columns.items()}
    if names := list(baselines[0].reward_parts):
        parts = [dict(baseline.reward_parts) for baseline in baselines]
        arrays[BASELINE_PARTS_COLUMN] = pa.array(parts, reward_parts_type(names).value_type)
    return arrays


def _scored_arrays(groups: Sequence[Group]) -> dict[str, pa.Array]:
    columns = {
        "reward": [[t.reward for t in group.trajectories] for group in groups],
        "advantage": [[t.advantage for t in group.trajectories] for group in groups],
        "status": [[t.status for t in group.trajectories] for group in groups],
        "failure": [group.failure for group in groups],
        "scored_at": [group.scored_at for group in groups],
    }
    arrays = {name: pa.array(values, SCORED_COLUMNS[name]) for name, values in columns.items()}
    names = list(groups[0].trajectories[0].reward_parts)
    parts = [[dict(t.reward_parts) for t in group.trajectories] for group in groups]
    if groups[0].trajectories[0].reference_logprobs is not None:
        arrays[REFERENCE_COLUMN] = pa.array(
            [[t.reference_logprobs for t in group.trajectories] for group in groups],
            REFERENCE_LOGPROBS,
        )
    if any(group.reference_version is not None for group in groups):
        arrays[REFERENCE_VERSION_COLUMN] = pa.array(
            [group.reference_version for group in groups], REFERENCE_VERSION
        )
    if any(t.token_rewards is not None for group in groups for t in group.trajectories):
        arrays[TOKEN_REWARDS_COLUMN] = pa.array(
            [[t.token_rewards for t in group.trajectories] for group in groups], TOKEN_REWARDS
        )
    if names:
        arrays["reward_parts"] = pa.array(parts, reward_parts_type(names))
    return arrays


def reward_parts_type(names: Sequence[str]) -> pa.DataType:
    """The Arrow type of `reward_parts` for these reward functions."""
    return pa.list_(pa.struct([(name, pa.float32()) for name in names]))


def _group(row: GroupRow, columns: Mapping[str, object], schema: pa.Schema) -> Group:
    prompt = Prompt(
        row["ordinal"], row["epoch"], row["prompt_text"], tuple(row["prompt_ids"]), columns, schema
    )
    return Group(
        attempt=row["attempt"],
        prompt=prompt,
        trajectories=tuple(_trajectory(row, index) for index in range(len(row["completion_ids"]))),
        replica=row["replica"],
        started_at=row["started_at"],
        finished_at=row["finished_at"],
        scored_at=row.get("scored_at"),
        failure=row.get("failure"),
        reference_version=row.get(REFERENCE_VERSION_COLUMN),
        baseline=_baseline(row),
        admitted_at=row.get("admitted_at"),
        generated=tuple(
            zip(row.get("generated_from") or (), row.get("generated_to") or (), strict=True)
        ),
    )


def _baseline(row: GroupRow) -> Baseline | None:
    if (text := row.get("baseline_text")) is None:
        return None
    completion = Completion(
        token_ids=tuple(row["baseline_ids"]),
        logprobs=tuple(row["baseline_logprobs"]),
        versions=tuple(VersionSpan(**span) for span in row["baseline_versions"]),
        finish_reason=row["baseline_finish_reason"],
        text=text,
    )
    parts = row.get("baseline_reward_parts") or {}
    return Baseline(completion, row.get("baseline_reward"), dict(parts))


def _trajectory(row: GroupRow, index: int) -> Trajectory:
    completion = Completion(
        token_ids=tuple(row["completion_ids"][index]),
        logprobs=tuple(row["logprobs"][index]),
        versions=tuple(VersionSpan(**span) for span in row["versions"][index]),
        finish_reason=row["finish_reason"][index],
        text=row["completion_text"][index],
        turns=tuple(
            tokens
            for trajectory, tokens in zip(
                row.get("turn_trajectory", ()), row.get("turn_tokens", ()), strict=True
            )
            if trajectory == index
        ),
    )
    parts, references, tokens = (
        row.get("reward_parts"),
        row.get(REFERENCE_COLUMN),
        row.get(TOKEN_REWARDS_COLUMN),
    )
    if "status" not in row:
        return Trajectory(completion, tuple(row["loss_mask"][index]))
    return Trajectory(
        completion,
        tuple(row["loss_mask"][index]),
        reward=row["reward"][index],
        reward_parts=dict(parts[index]) if parts else {},
        advantage=row["advantage"][index],
        status=row["status"][index],
        reference_logprobs=tuple(references[index]) if references else None,
        token_rewards=_tuple(tokens[index]) if tokens else None,
    )


def _tuple(values: Sequence[float] | None) -> tuple[float, ...] | None:
    return None if values is None else tuple(values)
