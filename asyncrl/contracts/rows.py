"""The rows that travel between stations, and their Arrow form: one row = one group.

Who makes what: `Prompt` by `data.prompts`, `Completion` by `generation`, `Group` by `rollout`, its
rewards, advantages and statuses by `rewards`. The learner reads the same row. Dataset columns
travel as top-level Arrow columns beside ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from asyncrl.contracts.columns import encode_column, row_values

__all__ = [
    "ANSWER_COLUMNS",
    "COLUMNS",
    "REFERENCE_COLUMN",
    "REFERENCE_LOGPROBS",
    "SCORED_COLUMNS",
    "STATUSES",
    "TOKEN_REWARDS",
    "TOKEN_REWARDS_COLUMN",
    "TRAJECTORY_COLUMNS",
    "TRUNCATED",
    "Completion",
    "Group",
    "Prompt",
    "Trajectory",
    "VersionSpan",
    "groups_from_table",
    "groups_to_table",
    "table_from_ipc",
    "table_to_ipc",
]

SPAN = pa.struct([("version", pa.int32()), ("start", pa.int32()), ("end", pa.int32())])

COLUMNS: dict[str, pa.DataType] = {
    "attempt": pa.int32(),
    "ordinal": pa.int64(),
    "epoch": pa.int32(),
    "prompt_text": pa.string(),
    "prompt_ids": pa.list_(pa.int32()),
    "completion_text": pa.list_(pa.string()),
    "completion_ids": pa.list_(pa.list_(pa.int32())),
    "loss_mask": pa.list_(pa.list_(pa.int8())),
    "logprobs": pa.list_(pa.list_(pa.float32())),
    "versions": pa.list_(pa.list_(SPAN)),
    "finish_reason": pa.list_(pa.string()),
    "replica": pa.string(),
    "started_at": pa.float64(),
    "finished_at": pa.float64(),
}
"""Columns of a group as the rollout worker leaves it. Lists have one item per trajectory; times are
Unix seconds, of the replica's steady clock here: when it took the request and when it was done."""

ANSWER_COLUMNS: dict[str, pa.DataType] = {
    "set": pa.string(),
    "attempt": pa.int32(),
    "version": pa.int32(),
    "ordinal": pa.int64(),
    "index": pa.int32(),
    "status": pa.string(),
    "reason": pa.string(),
    "accuracy": pa.float32(),
    "reward": pa.float32(),
    "prompt_text": pa.string(),
    "prompt_ids": pa.list_(pa.int32()),
    "completion": pa.string(),
    "completion_ids": pa.list_(pa.int32()),
    "logprobs": pa.list_(pa.float32()),
    "versions": pa.list_(SPAN),
    "finish_reason": pa.string(),
    "replica": pa.string(),
}
"""Columns of evaluations/*.parquet, beside `reward_parts`: one row for each completion asked for.
`ordinal` is the prompt's row in its file, `index` the completion's place among the prompt's n,
`reward` the weighted sum of its parts before any penalty; what did not come is null."""

SCORED_COLUMNS: dict[str, pa.DataType] = {
    "reward": pa.list_(pa.float32()),
    "advantage": pa.list_(pa.float32()),
    "status": pa.list_(pa.string()),
    "failure": pa.string(),
    "scored_at": pa.float64(),
}
"""Columns that scoring adds, beside `reward_parts`: list<struct<NAME: float32, …>>, one field per
reward function."""

REFERENCE_COLUMN = "reference_logprobs"
REFERENCE_LOGPROBS = pa.list_(pa.list_(pa.float32()))
"""The reference policy's log-probs of the completions: a column of runs with a KL term."""

TOKEN_REWARDS_COLUMN = "token_rewards"
TOKEN_REWARDS = pa.list_(pa.list_(pa.float32()))
"""The part of each trajectory's reward that belongs to its tokens: a column of runs with a reward
function that is `per_token`. `reward` is their sum and all else that counts; null where the
trajectory is unscored."""

STATUSES = ("ok", "unscored", "bad_logprob", "over_long", "no_token")
"""`ok` trajectories are trained; the others are masked: kept in the row, without loss and outside
the group's statistics."""

FINISH_REASONS = ("stop", "length", "repetition", "abort")
TRUNCATED = ("length", "repetition")
"""Finish reasons of completions that did not end by themselves: cut at their limit, or in a loop of
one n-gram (rollout.repetition_stop)."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens [start, end) of a completion were made by this policy version.

    Example:
        VersionSpan(version=3, start=0, end=55), VersionSpan(version=4, start=55, end=200)
    """

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Completion:
    """One generator output: T token ids, T behavior log-probs in nats, spans that cover [0, T), a
    finish reason.

    Raises:
        ValueError: lengths disagree, spans do not cover the tokens, or versions go back.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    finish_reason: str
    text: str = ""

    def __post_init__(self) -> None:
        tokens = len(self.token_ids)
        if len(self.logprobs) != tokens:
            raise ValueError(f"{tokens} tokens have {len(self.logprobs)} log-probs")
        if self.finish_reason not in FINISH_REASONS:
            raise ValueError(f"finish reason {self.finish_reason!r} is none of {FINISH_REASONS}")
        check_spans(self.versions, tokens)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One dataset row, identified for ever by its ordinal."""

    ordinal: int
    epoch: int
    text: str
    token_ids: tuple[int, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Values as the file gave them."""
    schema: pa.Schema | None = field(default=None, compare=False)
    """Arrow fields of the columns, the same for all prompts of a run. None: inferred."""

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError(f"prompt {self.ordinal} has no tokens")
        taken = sorted(
            set(self.columns)
            & {*COLUMNS, *SCORED_COLUMNS, "reward_parts", REFERENCE_COLUMN, TOKEN_REWARDS_COLUMN}
        )
        if taken:
            raise ValueError(f"dataset columns {taken} have names that asyncrl uses; rename them")


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A completion with its loss mask [T] and, once scored, reward, reward parts, advantage and
    status."""

    completion: Completion
    loss_mask: tuple[int, ...]
    reward: float | None = None
    reward_parts: Mapping[str, float | None] = field(default_factory=dict)
    advantage: float | None = None
    status: str = "ok"
    reference_logprobs: tuple[float, ...] | None = None
    """[T], of a frozen reference policy; None in a run without a KL term."""
    token_rewards: tuple[float, ...] | None = None
    """[T]; None without a reward per token."""

    def __post_init__(self) -> None:
        if len(self.loss_mask) != len(self.completion.token_ids):
            raise ValueError(
                f"{len(self.completion.token_ids)} tokens have a loss mask of {len(self.loss_mask)}"
            )
        if self.status not in STATUSES:
            raise ValueError(f"status {self.status!r} is none of {STATUSES}")

    @property
    def oldest_version(self) -> int | None:
        """Oldest version among the tokens; None if there are no tokens."""
        return min((span.version for span in self.completion.versions), default=None)


@dataclass(frozen=True, slots=True)
class Group:
    """The sibling trajectories of one prompt. `failure` says why scoring gave the group up; None if
    it did not."""

    attempt: int
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    replica: str
    started_at: float
    finished_at: float
    scored_at: float | None = None
    failure: str | None = None

    @property
    def ordinal(self) -> int:
        return self.prompt.ordinal

    @property
    def oldest_version(self) -> int | None:
        """Oldest token version among the trajectories; None if no trajectory has a token."""
        return min(
            (t.oldest_version for t in self.trajectories if t.oldest_version is not None),
            default=None,
        )


def check_spans(spans: Sequence[VersionSpan], tokens: int) -> None:
    """Raise ValueError unless the spans cover [0, tokens) in order, without gaps, at rising
    versions."""
    at = 0
    for before, span in zip((None, *spans), spans, strict=False):
        if span.start != at or span.end <= span.start:
            raise ValueError(f"version span {span} does not go on from token {at}")
        if before is not None and span.version <= before.version:
            raise ValueError(f"version {span.version} follows {before.version}")
        at = span.end
    if at != tokens:
        raise ValueError(f"version spans cover {at} of {tokens} tokens")


def groups_to_table(groups: Sequence[Group]) -> pa.Table:
    """The Arrow table of groups, one row each. Scored columns are there if the first group is
    scored; all groups must agree."""
    if not groups:
        raise ValueError("a table needs at least one group")
    scored = groups[0].scored_at is not None
    columns: dict[str, Any] = {name: [] for name in COLUMNS}
    for group in groups:
        for name, value in _row(group).items():
            columns[name].append(value)
    arrays = {name: pa.array(values, COLUMNS[name]) for name, values in columns.items()}
    if scored:
        arrays |= _scored_arrays(groups)
    fields = [pa.field(name, array.type) for name, array in arrays.items()]
    schema = groups[0].prompt.schema
    for name in groups[0].prompt.columns:
        known = schema.field(name) if schema is not None else None
        arrays[name] = encode_column([group.prompt.columns[name] for group in groups], known)
        fields.append(known or pa.field(name, arrays[name].type))
    return pa.Table.from_arrays(list(arrays.values()), schema=pa.schema(fields))


TRAJECTORY_COLUMNS = (
    "index",
    "completion",
    "tokens",
    "oldest_version",
    "newest_version",
    "outcome",
    "reason",
    "step",
    "trained_at_version",
    "staleness",
    "completion_tokens",
)
"""Columns that `asyncrl.open_run(…).trajectories()` adds."""


def table_to_ipc(table: pa.Table) -> pa.Buffer:
    """The table as an Arrow IPC stream. Ray's own pickling of a table takes milliseconds for
    columns as nested as ours, however few the rows."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def table_from_ipc(stream: pa.Buffer) -> pa.Table:
    """The table of `table_to_ipc`, on the stream's own memory."""
    return pa.ipc.open_stream(stream).read_all()


def groups_from_table(table: pa.Table) -> list[Group]:
    """The groups of a table, exactly as `groups_to_table` was given them."""
    known = {*COLUMNS, *SCORED_COLUMNS, "reward_parts", REFERENCE_COLUMN, TOKEN_REWARDS_COLUMN}
    names = [name for name in table.column_names if name not in known]
    schema = table.select(names).schema
    return [_group(row, {name: row[name] for name in names}, schema) for row in row_values(table)]


def _row(group: Group) -> dict[str, Any]:
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
        "versions": [
            [{"version": s.version, "start": s.start, "end": s.end} for s in c.versions]
            for c in completions
        ],
        "finish_reason": [c.finish_reason for c in completions],
        "replica": group.replica,
        "started_at": group.started_at,
        "finished_at": group.finished_at,
    }


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
    if any(t.token_rewards is not None for group in groups for t in group.trajectories):
        arrays[TOKEN_REWARDS_COLUMN] = pa.array(
            [[t.token_rewards for t in group.trajectories] for group in groups], TOKEN_REWARDS
        )
    if names:
        arrays["reward_parts"] = pa.array(parts, reward_parts_type(names))
    return arrays


def reward_parts_type(names: Sequence[str]) -> pa.DataType:
    """Arrow type of `reward_parts` for these reward functions."""
    return pa.list_(pa.struct([(name, pa.float32()) for name in names]))


def _group(row: Mapping[str, Any], columns: Mapping[str, Any], schema: pa.Schema) -> Group:
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
    )


def _trajectory(row: Mapping[str, Any], index: int) -> Trajectory:
    completion = Completion(
        token_ids=tuple(row["completion_ids"][index]),
        logprobs=tuple(row["logprobs"][index]),
        versions=tuple(VersionSpan(**span) for span in row["versions"][index]),
        finish_reason=row["finish_reason"][index],
        text=row["completion_text"][index],
    )
    parts = row.get("reward_parts")
    if "status" not in row:
        return Trajectory(completion, tuple(row["loss_mask"][index]))
    return Trajectory(
        completion,
        tuple(row["loss_mask"][index]),
        reward=row["reward"][index],
        reward_parts=dict(parts[index]) if parts else {},
        advantage=row["advantage"][index],
        status=row["status"][index],
        reference_logprobs=(
            tuple(row[REFERENCE_COLUMN][index]) if row.get(REFERENCE_COLUMN) else None
        ),
        token_rewards=_tuple((row.get(TOKEN_REWARDS_COLUMN) or {index: None})[index]),
    )


def _tuple(values: Sequence[float] | None) -> tuple[float, ...] | None:
    return None if values is None else tuple(values)
