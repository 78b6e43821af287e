"""The rows that travel between stations, and their Arrow columns: one row = one group.

`data.prompts` makes each `Prompt`, `generation` each `Completion`, and `rollout` each `Group`.
`rewards` adds rewards, advantages and statuses, and the learner reads the same row. Dataset columns
are top-level Arrow columns next to those defined here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, NamedTuple, NotRequired, TypedDict

import numpy as np
import pyarrow as pa

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
"""Columns of a group from a rollout worker. Lists have one item per trajectory. `started_at` and
`finished_at` are Unix seconds by the replica's `steady_time`: request accepted, and completed."""

TIME_COLUMNS: dict[str, pa.DataType] = {
    "admitted_at": pa.float64(),
    "generated_from": pa.list_(pa.float64()),
    "generated_to": pa.list_(pa.float64()),
}
"""Further times of a group, in Unix seconds. `admitted_at`, by the rollout worker's `steady_time`:
it began to make the group. The others have one item per trajectory, by the replica's: the engine
first computed it, and its last token came. Null in runs before they were recorded; `generated_*`
also in groups of sessions, whose turns have times of their own."""

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
"""Columns of evaluations/*.parquet, in addition to `reward_parts`: one row per requested
completion. `ordinal` is the prompt's row in its file. `index` is the completion's index among the
prompt's n. `reward` is the weighted sum of the parts before any penalty. Values that were not
produced are null."""

SCORED_COLUMNS: dict[str, pa.DataType] = {
    "reward": pa.list_(pa.float32()),
    "advantage": pa.list_(pa.float32()),
    "status": pa.list_(pa.string()),
    "failure": pa.string(),
    "scored_at": pa.float64(),
}
"""Columns that scoring adds, in addition to `reward_parts`. That is a list<struct<NAME: float32,
…>> with one field per reward function."""

TRAINED_COLUMNS: dict[str, pa.DataType] = {
    "attempt": pa.int32(),
    "ordinal": pa.int64(),
    "index": pa.int32(),
    "trained_in": pa.int32(),
    "version": pa.int32(),
    "positions": pa.list_(pa.int32()),
    "logprobs": pa.list_(pa.float32()),
    "weights": pa.list_(pa.float32()),
    "advantages": pa.list_(pa.float32()),
    "clipped": pa.list_(pa.bool_()),
    "masked": pa.list_(pa.bool_()),
}
"""Columns of trained/*.parquet: one row per row that a policy step computed, which is a trajectory,
or a path through a session. `attempt`, `ordinal` and `index` name the trajectory; `trained_in` is
the attempt that trained it, and `version` the learner's version before the step. The lists have one
item per loss token: its index among the trajectory's completion tokens (null: 0, 1, 2, …), the
learner's log-prob in nats, the importance weight, the advantage, whether the loss's clip stopped
its gradient, and whether a correction masked it."""

REFERENCE_COLUMN: Final = "reference_logprobs"
REFERENCE_LOGPROBS = pa.list_(pa.list_(pa.float32()))
"""Log-probs of the completions by the reference policy: a column of runs with a KL term. In a
session, each turn that is trained has them, after the tokens that came before it; tokens of other
turns have 0, which nothing reads."""

REFERENCE_VERSION_COLUMN: Final = "reference_version"
REFERENCE_VERSION = pa.int32()
"""The version of the reference policy that scored the group's completions, all of them: a column of
runs with a reference policy that is no teacher. 0 = the weights with which the run began; null = it
failed."""

TOKEN_REWARDS_COLUMN: Final = "token_rewards"
TOKEN_REWARDS = pa.list_(pa.list_(pa.float32()))
"""Rewards of single tokens: a column of runs with a `per_token` reward function. They are included
in `reward`. Null for an unscored trajectory."""

TEACHER_SECONDS_COLUMN: Final = "teacher_s"
TEACHER_FAILURE_COLUMN: Final = "teacher_failure"
TEACHER_COLUMNS: dict[str, pa.DataType] = {
    TEACHER_SECONDS_COLUMN: pa.float64(),
    TEACHER_FAILURE_COLUMN: pa.string(),
}
"""Columns of runs with a teacher: seconds of its answer, and why it scored no trajectory of the
group (null: it scored some). Its log-probs are in REFERENCE_COLUMN, NaN where it failed."""

TEACHER_IDS_COLUMN: Final = "teacher_ids"
TEACHER_LOGPROBS_COLUMN: Final = "teacher_logprobs"
TEACHER_TOKENS: dict[str, pa.DataType] = {
    TEACHER_IDS_COLUMN: pa.list_(pa.list_(pa.int32())),
    TEACHER_LOGPROBS_COLUMN: pa.list_(pa.list_(pa.float32())),
}
"""Columns of runs that distill over top_k tokens: ids and log-probs of the K tokens other than the
completion's that the teacher finds most probable. Each trajectory has K for its first token, then K
for its second, and so on. Empty where the teacher failed. Tokens of a session that are not trained
have K times 0."""

BASELINE_COLUMNS: dict[str, pa.DataType] = {
    "baseline_text": pa.string(),
    "baseline_ids": pa.list_(pa.int32()),
    "baseline_logprobs": pa.list_(pa.float32()),
    "baseline_versions": pa.list_(SPAN),
    "baseline_finish_reason": pa.string(),
    "baseline_reward": pa.float32(),
}
"""Columns of runs with `algorithm.advantage: remax`: the group's greedy completion, which is scored
and never trained. Scoring adds its reward, null if there is none, and BASELINE_PARTS_COLUMN."""
BASELINE_PARTS_COLUMN: Final = "baseline_reward_parts"
"""The baseline's rewards by function: a struct<NAME: float32, …>."""

NO_TEACHER: Final = "no_teacher"
"""Status of a trajectory that the teacher could not score."""
SESSION_ENDS = (
    "done",
    "length",
    "turns",
    "deadline",
    "agent_error",
    "env_error",
    "reward_error",
    "closed",
)
"""How a session ends (`asyncrl.environments.running`). `done` is the ordinary end."""
FAILED_ENDS = ("deadline", "agent_error", "env_error", "reward_error")
"""Ends that someone should repair. Each has a metric `session/<end>_ratio` with an alarm."""
AFTER_CUT = "the run cut the last turn (rollout.max_completion_length, or data.max_length)"
"""Beginning of `session_note` if an agent failed after such a turn. The run is the cause, so its
end is `length`."""
STATUSES = (
    "ok",
    "unscored",
    "bad_logprob",
    "over_long",
    "no_token",
    NO_TEACHER,
    *SESSION_ENDS[1:],
)
"""Only `ok` trajectories are trained. The others are masked: they stay in the row, without loss and
outside the group's statistics. A session that `environment.train_ends` leaves out has its end as
its status."""

TURN_COLUMNS: dict[str, pa.DataType] = {
    "turn_trajectory": pa.list_(pa.int32()),
    "turn_parent": pa.list_(pa.int32()),
    "turn_context": pa.list_(pa.list_(pa.int32())),
    "turn_tokens": pa.list_(pa.int32()),
    "turn_status": pa.list_(pa.string()),
    "turn_finish_reason": pa.list_(pa.string()),
    "turn_branch_reason": pa.list_(pa.string()),
    "turn_request_hash": pa.list_(pa.string()),
    "turn_replica": pa.list_(pa.string()),
    "turn_started_at": pa.list_(pa.float64()),
    "turn_finished_at": pa.list_(pa.float64()),
    "turn_reward": pa.list_(pa.float64()),
}
"""Columns of groups whose trajectories are sessions. A group has N turns, and these lists have one
item for each. A trajectory's completion ids, loss mask, log-probs and version spans are those of
its sampled tokens, turn after turn. So `turn_tokens` cuts them into turns. `turn_reward` is null
for a turn to which the environment gave none."""

TURN_ADVANTAGE_COLUMN: Final = "turn_advantage"
TURN_ADVANTAGE = pa.list_(pa.float32())
"""The advantage of each turn: a column that scoring adds in runs with `algorithm.advantage.turns`.
Null for the turns of a session that is not trained, and for turns that the agent never received."""

SESSION_COLUMNS: dict[str, pa.DataType] = {
    "session_end": pa.list_(pa.string()),
    "session_note": pa.list_(pa.string()),
    "session_messages": pa.list_(pa.string()),
    "session_reward": pa.list_(pa.float64()),
    "session_parts": pa.list_(pa.string()),
    "session_output": pa.list_(pa.string()),
    "session_unparsed": pa.list_(pa.int32()),
    "session_overridden": pa.list_(pa.int32()),
    "session_reusable": pa.list_(pa.int64()),
    "session_cached": pa.list_(pa.int64()),
    "session_model_s": pa.list_(pa.float64()),
    "session_other_s": pa.list_(pa.float64()),
}
"""Columns of groups whose trajectories are sessions, with one item per trajectory: how it ended,
one line about an error, the chat of its last turn (JSON), the reward that its environment gave
(null: none) with its parts (JSON) and a text that it returned, turns that could not be parsed,
arguments of requests that had no effect, prompt tokens that its earlier turns had in a prefix cache
and those of them that were there, and seconds for the model and for everything else."""

SUMMARY_COLUMN = "scored_summary"
"""Column in which a group's `Scored` travels from the scoring task to the driver. It is not written
to files."""

ADDED_COLUMNS = {
    SUMMARY_COLUMN,
    *COLUMNS,
    *TIME_COLUMNS,
    *SCORED_COLUMNS,
    *TEACHER_COLUMNS,
    *TEACHER_TOKENS,
    *BASELINE_COLUMNS,
    *TURN_COLUMNS,
    *SESSION_COLUMNS,
    TURN_ADVANTAGE_COLUMN,
    BASELINE_PARTS_COLUMN,
    "reward_parts",
    REFERENCE_COLUMN,
    REFERENCE_VERSION_COLUMN,
    TOKEN_REWARDS_COLUMN,
}
"""Columns of groups that do not come from the dataset."""

FINISH_REASONS = ("stop", "length", "repetition", "abort")
TRUNCATED = ("length", "repetition")
"""Finish reasons of completions that were cut off: at the length limit, or in a loop of one n-gram
(rollout.repetition_stop)."""


class SpanRow(TypedDict):
    """One item of the column `versions`: a `VersionSpan`."""

    version: int
    start: int
    end: int


class GroupRow(TypedDict):
    """One row of a table of groups, as Python values. [G] trajectories, each with [T] tokens."""

    attempt: int
    ordinal: int
    epoch: int
    prompt_text: str
    prompt_ids: Sequence[int]
    completion_text: Sequence[str]
    completion_ids: Sequence[Sequence[int]]
    """[G][T], as are `loss_mask`, `logprobs`, `reference_logprobs` and `token_rewards`."""
    loss_mask: Sequence[Sequence[int]]
    logprobs: Sequence[Sequence[float]]
    versions: Sequence[Sequence[SpanRow]]
    finish_reason: Sequence[str]
    replica: str
    started_at: float
    finished_at: float
    admitted_at: NotRequired[float | None]
    generated_from: NotRequired[Sequence[float] | None]
    """[G], as is `generated_to`; both null if the engine told no times."""
    generated_to: NotRequired[Sequence[float] | None]
    reward: NotRequired[Sequence[float | None]]
    """[G]. Scoring adds this and the following columns."""
    reward_parts: NotRequired[Sequence[Mapping[str, float | None]] | None]
    advantage: NotRequired[Sequence[float | None]]
    status: NotRequired[Sequence[str]]
    failure: NotRequired[str | None]
    scored_at: NotRequired[float | None]
    reference_logprobs: NotRequired[Sequence[Sequence[float]] | None]
    reference_version: NotRequired[int | None]
    token_rewards: NotRequired[Sequence[Sequence[float] | None] | None]
    turn_trajectory: NotRequired[Sequence[int]]
    """[N turns], as is `turn_tokens`; only in groups of sessions."""
    turn_tokens: NotRequired[Sequence[int]]
    baseline_text: NotRequired[str | None]
    """Null, as are the following columns, in a group without a baseline."""
    baseline_ids: NotRequired[Sequence[int]]
    baseline_logprobs: NotRequired[Sequence[float]]
    baseline_versions: NotRequired[Sequence[SpanRow]]
    baseline_finish_reason: NotRequired[str]
    baseline_reward: NotRequired[float | None]
    baseline_reward_parts: NotRequired[Mapping[str, float | None] | None]


class ReferenceLogprobs(NamedTuple):
    """The reference policy's answer for the completions of one group: its version, which scored all
    of them, and the log-probs of each completion's tokens, in nats."""

    version: int
    logprobs: list[np.ndarray]


class TopLogprobs(NamedTuple):
    """A teacher's answer for the C tokens of one completion: their log-probs [C], and ids [C, K]
    and log-probs [C, K] of the most probable other tokens for each token, in nats."""

    logprobs: np.ndarray
    other_ids: np.ndarray
    other_logprobs: np.ndarray


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """The policy version that sampled tokens [start, end) of a completion.

    Example:
        VersionSpan(version=3, start=0, end=55), VersionSpan(version=4, start=55, end=200)
    """

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Completion:
    """One output of a generator: T token ids, T behavior log-probs in nats, version spans that
    cover [0, T), and a finish reason. A session's has the tokens of all its turns.

    Raises:
        ValueError: lengths disagree, spans do not cover the tokens, or versions decrease within a
            turn.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    finish_reason: str
    text: str = ""
    turns: tuple[int, ...] = ()
    """Tokens of each turn, if it is a session's. Spans end where turns end."""

    def __post_init__(self) -> None:
        tokens = len(self.token_ids)
        if len(self.logprobs) != tokens:
            raise ValueError(f"{tokens} tokens have {len(self.logprobs)} log-probs")
        if self.finish_reason not in FINISH_REASONS:
            raise ValueError(f"finish reason {self.finish_reason!r} is not one of {FINISH_REASONS}")
        if sum(self.turns) != tokens and self.turns:
            raise ValueError(f"turns of {sum(self.turns)} tokens have {tokens} tokens")
        check_spans(self.versions, tokens, self.turns)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One dataset row, identified by its ordinal for the whole run."""

    ordinal: int
    epoch: int
    text: str
    token_ids: tuple[int, ...]
    columns: Mapping[str, object] = field(default_factory=dict)
    """Dataset columns, with the values that their file gave them."""
    schema: pa.Schema | None = field(default=None, compare=False)
    """Arrow fields of the columns, the same for all prompts of a run. None = inferred."""

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError(f"prompt {self.ordinal} has no tokens")
        taken = sorted(set(self.columns) & ADDED_COLUMNS)
        if taken:
            raise ValueError(f"dataset columns {taken} have names that asyncrl uses; rename them")


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A completion with its loss mask [T]. Scoring adds the reward, its parts, the advantage and
    the status."""

    completion: Completion
    loss_mask: tuple[int, ...]
    reward: float | None = None
    reward_parts: Mapping[str, float | None] = field(default_factory=dict)
    advantage: float | None = None
    status: str = "ok"
    reference_logprobs: tuple[float, ...] | None = None
    """[T], by the reference policy; None in a run without one."""
    token_rewards: tuple[float, ...] | None = None
    """[T]; None without per-token rewards."""

    def __post_init__(self) -> None:
        if len(self.loss_mask) != len(self.completion.token_ids):
            raise ValueError(
                f"{len(self.completion.token_ids)} tokens have a loss mask of {len(self.loss_mask)}"
            )
        if self.status not in STATUSES:
            raise ValueError(f"status {self.status!r} is not one of {STATUSES}")

    @property
    def oldest_version(self) -> int | None:
        """Oldest version among the tokens; None for an empty completion."""
        return min((span.version for span in self.completion.versions), default=None)


@dataclass(frozen=True, slots=True)
class Baseline:
    """The greedy completion of a group's prompt. It is scored like the trajectories, and is none of
    them: it has no loss, no advantage and no status. Its versions count in the group's
    staleness."""

    completion: Completion
    reward: float | None = None
    reward_parts: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Group:
    """The sibling trajectories of one prompt. `failure` says why scoring dropped the group; None if
    it did not."""

    attempt: int
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    replica: str
    started_at: float
    finished_at: float
    scored_at: float | None = None
    failure: str | None = None
    reference_version: int | None = None
    """The version of the reference policy that scored the group. None: there is no
    reference policy, or it failed."""
    baseline: Baseline | None = None
    """None in a run without baselines."""
    admitted_at: float | None = None
    """See `TIME_COLUMNS`."""
    generated: tuple[tuple[float, float], ...] = ()
    """`generated_from` and `generated_to` of each trajectory; empty if the engine told none."""

    @property
    def ordinal(self) -> int:
        return self.prompt.ordinal

    @property
    def oldest_version(self) -> int | None:
        """Oldest token version among the trajectories and the baseline; None without a token."""
        made = [trajectory.completion for trajectory in self.trajectories]
        made += [self.baseline.completion] if self.baseline is not None else []
        return min((span.version for one in made for span in one.versions), default=None)


def check_spans(spans: Sequence[VersionSpan], tokens: int, turns: Sequence[int] = ()) -> None:
    """Raise ValueError unless the spans cover [0, tokens) in order, without gaps, with increasing
    versions. Versions may begin anew after each of the turns, which have these many tokens."""
    at = 0
    ends = set(accumulate(turns))
    for before, span in zip((None, *spans), spans, strict=False):
        if span.start != at or span.end <= span.start:
            raise ValueError(f"version span {span} does not continue from token {at}")
        if before is not None and span.version <= before.version and at not in ends:
            raise ValueError(f"version {span.version} follows {before.version}")
        if any(span.start < end < span.end for end in ends):
            raise ValueError(f"version span {span} has tokens of two turns")
        at = span.end
    if at != tokens:
        raise ValueError(f"version spans cover {at} of {tokens} tokens")


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
