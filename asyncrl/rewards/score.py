"""From raw rewards to scored groups: totals, statuses, advantages. Pure: one table of groups in,
one out."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import NotRequired, Protocol, TypedDict, cast

import numpy as np
import pyarrow as pa

from asyncrl.algorithms.advantages import GroupInputs, group_advantages
from asyncrl.algorithms.advantages.grpo import Grpo
from asyncrl.algorithms.kl import reward_kl
from asyncrl.algorithms.turn_credit import turn_advantages
from asyncrl.algorithms.user_functions import own_verdict
from asyncrl.config import AlgorithmConfig, PolicyGradient, RewardConfig
from asyncrl.contracts.columns import column_values
from asyncrl.contracts.group_table import reward_parts_type
from asyncrl.contracts.outcomes import FILTERED, NO_BASELINE
from asyncrl.contracts.rows import (
    ADDED_COLUMNS,
    BASELINE_COLUMNS,
    BASELINE_PARTS_COLUMN,
    NO_TEACHER,
    REFERENCE_COLUMN,
    REFERENCE_LOGPROBS,
    REFERENCE_VERSION,
    REFERENCE_VERSION_COLUMN,
    SCORED_COLUMNS,
    TEACHER_COLUMNS,
    TEACHER_FAILURE_COLUMN,
    TEACHER_SECONDS_COLUMN,
    TEACHER_TOKENS,
    TOKEN_REWARDS,
    TOKEN_REWARDS_COLUMN,
    TRUNCATED,
    TURN_ADVANTAGE,
    TURN_ADVANTAGE_COLUMN,
    Completion,
    GroupRow,
    Prompt,
    TopLogprobs,
)
from asyncrl.contracts.session_table import (
    NODE_COLUMNS,
    SessionsRow,
    nodes_of_group,
    received_turns,
)
from asyncrl.rewards.contract import GroupCall, ScoredSession
from asyncrl.rewards.pool import GroupRewards, total_rewards
from asyncrl.rewards.reference_rows import Logprobs
from asyncrl.rewards.spec import ScoringSpec
from asyncrl.runtime.failures import unforeseen
from asyncrl.runtime.functions import FunctionError
from asyncrl.sessions.session_rows import session_rows

COMPLETIONS = ["prompt_text", "completion_text", "completion_ids", "finish_reason"]
"""Columns that reward functions get."""
BASELINE = ["baseline_text", "baseline_ids", "baseline_finish_reason"]
"""Columns of a baseline that reward functions get."""


SESSIONS = ("session_messages", "session_end", "session_reward", "session_parts", "session_output")
"""Columns of sessions that reward functions get."""


TURNS = [name for name in NODE_COLUMNS if name not in ("completion_ids", "logprobs")]
"""Columns of sessions that their rows are derived from, in addition to those of all groups."""
TURN_CREDITS = ("turn_trajectory", "turn_status", "turn_reward")
"""Columns of sessions that advantages of turns are from."""


class _RewardedRow(TypedDict):
    """What the map stage reads of a group's row. Lists have one item per trajectory."""

    prompt_ids: list[int]
    completion_ids: list[list[int]]
    loss_mask: list[list[int]]
    logprobs: list[list[float]]
    finish_reason: list[str]
    reward_parts: list[dict[str, float | None]]
    failure: str | None
    session_end: NotRequired[list[str]]
    turn_trajectory: NotRequired[list[int]]
    turn_status: NotRequired[list[str]]
    turn_reward: NotRequired[list[float | None]]
    reference_logprobs: NotRequired[list[list[float]]]
    baseline_ids: NotRequired[list[int]]
    baseline_finish_reason: NotRequired[str]
    baseline_reward_parts: NotRequired[dict[str, float | None]]


def completions_scored(group: pa.Table) -> int:
    """Number of completions of one group's one-row table that reward functions get: those of its
    trajectories, and the baseline if it has one."""
    return len(group["completion_ids"][0]) + ("baseline_ids" in group.column_names)


def group_call(group: pa.Table) -> GroupCall:
    """What reward functions get for one group's one-row table, dataset columns included. A baseline
    is the last completion, so one call scores all of them alike."""
    has_baseline = "baseline_ids" in group.column_names
    row: GroupRow = group.select([*COMPLETIONS, *(BASELINE if has_baseline else [])]).to_pylist()[0]
    dataset = {
        field.name: column_values(group[field.name], field)[0]
        for field in group.schema
        if field.name not in ADDED_COLUMNS
    }
    texts, ids, reasons = row["completion_text"], row["completion_ids"], row["finish_reason"]
    if has_baseline:
        texts, ids = [*texts, row["baseline_text"] or ""], [*ids, row["baseline_ids"]]
        reasons = [*reasons, row["baseline_finish_reason"]]
    return GroupCall(
        [row["prompt_text"]] * len(ids),
        texts,
        ids,
        dataset,
        reasons,
        [reason in TRUNCATED for reason in reasons],
        _sessions(group),
    )


def _sessions(group: pa.Table) -> list[ScoredSession] | None:
    """What reward functions get of the sessions of a one-row table."""
    if SESSIONS[0] not in group.column_names:
        return None
    columns = (group[name][0].as_py() for name in SESSIONS)
    return [
        ScoredSession(json.loads(messages), end, given, json.loads(parts), output)
        for messages, end, given, parts, output in zip(*columns, strict=True)
    ]


def attach_rewards(group: pa.Table, rewards: GroupRewards) -> pa.Table:
    """Add raw rewards to one group's one-row table: columns reward_parts and failure, token_rewards
    if there are any, and those of its baseline if it has one."""
    names, n = list(rewards.parts), len(group["completion_ids"][0])
    parts = [
        dict(zip(names, values, strict=True))
        for values in zip(*rewards.parts.values(), strict=True)
    ]
    kind = reward_parts_type(names)
    group = group.append_column("reward_parts", pa.array([parts[:n]], kind))
    if completions_scored(group) > n:
        group = group.append_column(BASELINE_PARTS_COLUMN, pa.array(parts[n:], kind.value_type))
    if rewards.tokens is not None:
        tokens = pa.array([rewards.tokens[:n]], TOKEN_REWARDS)
        group = group.append_column(TOKEN_REWARDS_COLUMN, tokens)
    return group.append_column("failure", pa.array([rewards.failure], SCORED_COLUMNS["failure"]))


def attach_reference(group: pa.Table, logprobs: Sequence[Logprobs]) -> pa.Table:
    """Add the reference policy's log-probs, one array per trajectory, to one group's one-row
    table."""
    return group.append_column(
        REFERENCE_COLUMN, pa.array([[values.tolist() for values in logprobs]], REFERENCE_LOGPROBS)
    )


def attach_reference_version(group: pa.Table, version: int | None) -> pa.Table:
    """Add the version of the reference policy to one group's one-row table. None = it failed."""
    return group.append_column(REFERENCE_VERSION_COLUMN, pa.array([version], REFERENCE_VERSION))


def attach_teacher(
    group: pa.Table,
    logprobs: Sequence[Logprobs],
    failure: str | None,
    seconds: float,
    top: Sequence[TopLogprobs] | None = None,
) -> pa.Table:
    """Add the teacher's log-probs to one group's one-row table. A trajectory that has another
    number of them than tokens, or one that is not finite, gets NaN.

    Args:
        logprobs: one array per trajectory; empty if the teacher failed.
        failure: why it failed; None if it did not.
        seconds: how long its answer took.
        top: the answers that `logprobs` is from, in a run that distills over top_k tokens.
    """
    lengths = [len(ids) for ids in group["completion_ids"][0].as_py()]
    if failure is None and len(logprobs) != len(lengths):
        failure = f"it scored {len(logprobs)} of {len(lengths)} completions"
    usable = list(logprobs) if failure is None else [np.zeros(0)] * len(lengths)
    answers = list(top) if top and failure is None else [None] * len(lengths)
    fits = [
        len(values) == length and bool(np.isfinite(values).all()) and _has_others(answer, length)
        for values, length, answer in zip(usable, lengths, answers, strict=True)
    ]
    if (
        failure is None
        and any(lengths)
        and not any(good for good, length in zip(fits, lengths, strict=True) if length)
    ):
        failure = "its log-probs are NaN or Inf, or another number than tokens"
    known = [
        values if good else np.full(length, math.nan)
        for values, good, length in zip(usable, fits, lengths, strict=True)
    ]
    group = attach_reference(group, known)
    added = {TEACHER_SECONDS_COLUMN: seconds, TEACHER_FAILURE_COLUMN: failure}
    for name, value in added.items():
        group = group.append_column(name, pa.array([value], TEACHER_COLUMNS[name]))
    return group if top is None else _with_others(group, answers, fits)


def _has_others(answer: TopLogprobs | None, length: int) -> bool:
    """Whether every token has other tokens with finite log-probs. True without top_k."""
    if answer is None:
        return True
    ids, values = answer.other_ids, answer.other_logprobs
    finite = bool(np.isfinite(ids).all() and np.isfinite(values).all())
    return len(ids) == length and ids.shape == values.shape and finite


def _with_others(
    group: pa.Table, answers: Sequence[TopLogprobs | None], fits: Sequence[bool]
) -> pa.Table:
    """The one-row table with the columns TEACHER_TOKENS. They are empty for an unusable answer."""
    none = np.zeros(0)
    usable = [
        answer if answer is not None and good else TopLogprobs(none, none, none)
        for answer, good in zip(answers, fits, strict=True)
    ]
    columns = (
        [answer.other_ids.ravel() for answer in usable],
        [answer.other_logprobs.ravel() for answer in usable],
    )
    for (name, kind), column in zip(TEACHER_TOKENS.items(), columns, strict=True):
        group = group.append_column(name, pa.array([column], kind))
    return group


def score_table(table: pa.Table, spec: ScoringSpec) -> pa.Table:
    """Add reward, advantage, status and scored_at to groups with raw rewards. The map stage of
    scoring."""
    failures: list[str | None] = []
    weights = {name: reward.weight for name, reward in spec.reward.functions.items()}
    scored: dict[str, list[object]] = {"reward": [], "advantage": [], "status": [], "scored_at": []}
    columns = [
        "prompt_ids",
        "completion_ids",
        "loss_mask",
        "logprobs",
        "finish_reason",
        "reward_parts",
        "failure",
        *(["session_end"] if spec.environment is not None else []),
        *dict.fromkeys(
            [
                *(TURNS if spec.most_session_tokens is not None else []),
                *(TURN_CREDITS if spec.algorithm.turn_rewards else []),
            ]
        ),
        *([REFERENCE_COLUMN] if spec.algorithm.has_reference else []),
        *([*BASELINE[1:], BASELINE_PARTS_COLUMN] if spec.algorithm.needs_baseline else []),
    ]
    baselines: list[float | None] = []
    of_turns: list[list[float | None]] = []
    rows: list[_RewardedRow] = table.select(columns).to_pylist()
    for row in rows:
        parts = {name: [part[name] for part in row["reward_parts"]] for name in weights}
        longest = spec.completion_room(len(row["prompt_ids"]))
        lengths = _lengths(row["finish_reason"], row["completion_ids"], longest)
        rewards = _less_overlong(total_rewards(parts, weights), lengths, longest, spec.reward)
        if spec.algorithm.kl_coef:
            rewards = _less_kl(rewards, row, spec.algorithm.kl_coef)
        statuses = _statuses(row, rewards, spec)
        scored["reward"].append(rewards)
        scored["status"].append(statuses)
        baselines.append(_baseline_reward(row, weights, spec))
        inputs = GroupInputs(
            baseline=baselines[-1],
            lengths=[sum(mask) for mask in row["loss_mask"]],
            parts=[(weights[name], values) for name, values in parts.items()],
        )
        advantages, failure = _advantages(row, rewards, statuses, inputs, spec.algorithm)
        if spec.algorithm.preference is not None:
            advantages = [None] * len(advantages)  # pairs are trained instead
        scored["advantage"].append(advantages)
        if isinstance(spec.algorithm, PolicyGradient) and spec.algorithm.turn_rewards is not None:
            of_turns.append(_turn_advantages(row, advantages, spec.algorithm))
        failures.append(row["failure"] or failure)
        scored["scored_at"].append(time.time())
    for name, values in scored.items():
        table = table.append_column(name, pa.array(values, SCORED_COLUMNS[name]))
    if spec.algorithm.turn_rewards is not None:
        table = table.append_column(TURN_ADVANTAGE_COLUMN, pa.array(of_turns, TURN_ADVANTAGE))
    if spec.algorithm.needs_baseline:
        kind = BASELINE_COLUMNS["baseline_reward"]
        table = table.append_column("baseline_reward", pa.array(baselines, kind))
    return table.set_column(
        table.column_names.index("failure"),
        "failure",
        pa.array(failures, SCORED_COLUMNS["failure"]),
    )


def _statuses(row: _RewardedRow, rewards: Sequence[float | None], spec: ScoringSpec) -> list[str]:
    """The status of each trajectory of a group."""
    frozen = row.get(REFERENCE_COLUMN) or [[]] * len(rewards)
    distills = spec.algorithm.distillation is not None
    ends = row.get("session_end") or ["done"] * len(rewards)
    sizes = [0] * len(rewards) if spec.most_session_tokens is None else _session_sizes(row)
    statuses = []
    for reward, ours, theirs, mask, end, size in zip(
        rewards, row["logprobs"], frozen, row["loss_mask"], ends, sizes, strict=True
    ):
        if spec.environment is not None and end not in spec.environment.train_ends:
            statuses.append(end)
            continue
        if spec.most_session_tokens is not None and size > spec.most_session_tokens:
            statuses.append("over_long")
            continue
        known, by_teacher = (ours, theirs) if distills else ([*ours, *theirs], [])
        statuses.append(
            trajectory_status(
                reward,
                known,
                len(row["prompt_ids"]),
                mask,
                # A session limits each of its rows while it runs.
                spec.longest_trajectory if spec.environment is None else None,
                by_teacher,
            )
        )
    return statuses


def _session_sizes(row: _RewardedRow) -> list[int]:
    """The tokens of all rows of each session."""
    return [
        sum(len(one.token_ids) for one in session_rows(nodes).rows)
        for nodes in nodes_of_group(cast("SessionsRow", row))
    ]


def _baseline_reward(
    row: _RewardedRow, weights: Mapping[str, float], spec: ScoringSpec
) -> float | None:
    """The reward of a group's baseline, less the overlong penalty, as that of its trajectories.
    None: the group has no baseline, the baseline has no token, or a function did not score it."""
    if not spec.algorithm.needs_baseline or not row["baseline_ids"]:
        return None
    parts = {name: [row["baseline_reward_parts"][name]] for name in weights}
    longest = spec.completion_room(len(row["prompt_ids"]))
    lengths = _lengths([row["baseline_finish_reason"]], [row["baseline_ids"]], longest)
    return _less_overlong(total_rewards(parts, weights), lengths, longest, spec.reward)[0]


def _lengths(
    reasons: Sequence[str], completions: Sequence[Sequence[int]], longest: int
) -> list[int]:
    """The completions' lengths in tokens. One that was ended in a loop counts as the longest."""
    return [
        longest if reason == "repetition" else len(ids)
        for reason, ids in zip(reasons, completions, strict=True)
    ]


def _advantages(
    row: _RewardedRow,
    rewards: Sequence[float | None],
    statuses: Sequence[str],
    inputs: GroupInputs,
    algorithm: AlgorithmConfig,
) -> tuple[list[float | None], str | None]:
    """The advantages of a group, and the reason if it is not trained: it has no baseline where one
    is needed, the user's filter rejected it, or a function of the user failed."""
    ok = [status == "ok" for status in statuses]
    if algorithm.needs_baseline and inputs.baseline is None:
        why = "could not be scored" if row["baseline_ids"] else "has no token"
        return [None] * len(ok), f"{NO_BASELINE}the greedy completion {why}"
    try:
        # With online DPO, pairs are trained instead. A filter gets what grpo would give.
        of_group = algorithm.advantage if isinstance(algorithm, PolicyGradient) else Grpo()
        advantages = group_advantages(rewards, ok, of_group, inputs)
        kept = [index for index, use in enumerate(ok) if use]
        if algorithm.group_filter is None or len(kept) < (2 if algorithm.compares_siblings else 1):
            return advantages, None
        known, lengths = (
            [float(rewards[index] or 0.0) for index in kept],
            [len(row["completion_ids"][index]) for index in kept],
        )
        truncated = [row["finish_reason"][index] in TRUNCATED for index in kept]
        trained = own_verdict(
            algorithm.group_filter.name,
            algorithm.group_filter.arguments,
            known,
            [float(advantages[index] or 0.0) for index in kept],
            lengths,
            truncated,
        )
        left_out = f"{FILTERED}{algorithm.group_filter.name} returned False"
        return advantages, None if trained else left_out
    except FunctionError as error:
        return [None] * len(ok), unforeseen("the group could not be scored", error)


def _turn_advantages(
    row: _RewardedRow, advantages: Sequence[float | None], algorithm: PolicyGradient
) -> list[float | None]:
    """The items of the column `turn_advantage` for one group. A turn that its agent never received
    has none, and its number counts nowhere."""
    turns = algorithm.turn_rewards
    assert turns is not None
    indices = received_turns(row["turn_trajectory"], row["turn_status"], len(advantages))
    found = turn_advantages(
        [[row["turn_reward"][index] for index in session] for session in indices],
        advantages,
        [advantage is not None for advantage in advantages],
        algorithm.advantage,
        turns,
    )
    items: list[float | None] = [None] * len(row["turn_reward"])
    for session, values in zip(indices, found, strict=True):
        for index, value in zip(session, values or (), strict=False):
            items[index] = value
    return items


def _less_overlong(
    rewards: Sequence[float | None], lengths: Sequence[int], longest: int, reward: RewardConfig
) -> list[float | None]:
    """The rewards less the soft overlong penalty. `longest` is the length limit of these
    completions. A completion that was ended in a loop counts as that long: it would have continued
    to the limit."""
    overlong = reward.overlong
    penalties = [0.0 if overlong is None else overlong.added(one, longest) for one in lengths]
    return [
        None if total is None else total + penalty
        for total, penalty in zip(rewards, penalties, strict=True)
    ]


def _less_kl(
    rewards: Sequence[float | None], row: _RewardedRow, kl_coef: float
) -> list[float | None]:
    """The rewards less kl_coef times each trajectory's KL divergence from the reference, over its
    tokens with loss. A KL that is not finite is ignored here: `trajectory_status` masks the
    trajectory."""
    penalized: list[float | None] = []
    columns = (row["logprobs"], row[REFERENCE_COLUMN], row["loss_mask"])
    for reward, ours, theirs, mask in zip(rewards, *columns, strict=True):
        kl = reward_kl(ours, theirs, mask)
        penalized.append(
            None if reward is None else reward - kl_coef * (kl if math.isfinite(kl) else 0.0)
        )
    return penalized


def trajectory_status(
    reward: float | None,
    logprobs: Sequence[float],
    prompt_tokens: int,
    loss_mask: Sequence[int],
    longest: int | None,
    by_teacher: Sequence[float] = (),
) -> str:
    """`ok`, or why the trajectory is masked. `logprobs` are the generator's and the reference's;
    `by_teacher` are those of a teacher; `loss_mask` has one item per completion token. `longest`:
    None = any length."""
    if not any(loss_mask):
        return "no_token"
    if longest is not None and prompt_tokens + len(loss_mask) > longest:
        return "over_long"
    if not all(math.isfinite(logprob) for logprob in logprobs):
        return "bad_logprob"
    if not all(math.isfinite(logprob) for logprob in by_teacher):
        return NO_TEACHER
    return "unscored" if reward is None else "ok"


class ScoresGroups(Protocol):
    """A reward pool, on this node or another."""

    async def score(self, call: GroupCall) -> GroupRewards:
        """Rewards of one group, under the policy on failures.

        Raises:
            RewardError: A reward failed under policy `fail`.
        """


async def score_completions(
    pool: ScoresGroups,
    prompt: Prompt,
    completions: Sequence[Completion],
    sessions: Sequence[ScoredSession] | None = None,
) -> dict[str, list[float | None]]:
    """Raw rewards of one prompt's completions outside the training stream, for evaluation.

    Args:
        sessions: with an environment, the session of each completion.

    Returns:
        Name of the reward function, and name/part of each part that it returned → one reward per
        completion. They are None if the group failed.

    Raises:
        RewardError: A reward failed under policy `fail`.
    """
    call = GroupCall(
        prompts=[prompt.text] * len(completions),
        completions=[completion.text for completion in completions],
        completion_ids=[completion.token_ids for completion in completions],
        columns=prompt.columns,
        finish_reasons=[completion.finish_reason for completion in completions],
        truncated=[completion.finish_reason in TRUNCATED for completion in completions],
        sessions=sessions,
    )
    return dict((await pool.score(call)).parts)
