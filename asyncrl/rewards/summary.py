"""What control needs to know of scored groups: a `Scored` for each row of a table, and an example
to show. NumPy does the work that grows with the tokens."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any, TypeAlias, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from asyncrl.contracts.columns import SOURCE_COLUMN
from asyncrl.contracts.messages import Scored, ScoredBaseline, SessionCounts, TrajectoryText
from asyncrl.contracts.nodes import branch_class
from asyncrl.contracts.rows import AFTER_CUT, FAILED_ENDS, REFERENCE_VERSION_COLUMN, TRUNCATED
from asyncrl.rewards.contract import UNSCORED_REASON
from asyncrl.rewards.text_quality import looping, unprintable
from asyncrl.runtime.functions import short
from asyncrl.runtime.redact import redact_all
from asyncrl.sessions.session_rows import repeated_tokens
from asyncrl.text.transcript import transcript

EXAMPLE_LENGTH = 1000
SUMMARIZED = (
    "ordinal",
    "completion_text",
    "finish_reason",
    "status",
    "reward",
    "reward_parts",
    "failure",
)
"""Columns of `_Row` that every scored group has."""
OPTIONAL = (
    SOURCE_COLUMN,
    REFERENCE_VERSION_COLUMN,
    "baseline_finish_reason",
    "baseline_reward",
)
"""Columns of `_Row` that some runs have."""

COUNTED = (
    "turn_trajectory",
    "turn_parent",
    "turn_tokens",
    "turn_status",
    "turn_branch_reason",
    "session_end",
    "session_note",
    "session_unparsed",
    "session_overridden",
    "session_reusable",
    "session_cached",
    "session_model_s",
    "session_other_s",
    "turn_reward",
)
"""Columns of sessions that are counted."""

REASON_LENGTH = 240
"""Characters that are kept of the reason why a session failed."""

CARRIED = tuple(field.name for field in fields(Scored) if field.name not in ("ref", "example"))
"""Fields of a summary that the scoring task knows."""

Array: TypeAlias = "NDArray[Any]"


class _Row(TypedDict, total=False):
    """A group's row without its tokens. Lists have one item per trajectory."""

    ordinal: int
    completion_text: list[str]
    finish_reason: list[str]
    status: list[str]
    reward: list[float | None]
    reward_parts: list[dict[str, float | None]]
    failure: str | None
    source_name: str | None
    reference_version: int | None
    baseline_finish_reason: str
    baseline_reward: float | None


@dataclass(frozen=True, slots=True)
class _Nested:
    """A column of one list per trajectory, flat."""

    values: pa.Array
    lists: Array
    """[trajectories + 1] where each trajectory's list begins among the values."""
    rows: Array
    """[rows + 1] where each row begins among the trajectories."""

    @classmethod
    def of(cls, column: pa.ChunkedArray) -> _Nested:
        outer = column.combine_chunks()
        inner = pc.list_flatten(outer)
        return cls(pc.list_flatten(inner), _starts(inner), _starts(outer))

    @property
    def row_starts(self) -> list[int]:
        """[rows + 1] where each row begins among the values."""
        starts: list[int] = self.lists[self.rows].tolist()
        return starts


def summaries(table: pa.Table) -> list[Scored]:
    """What control needs to know of each scored group of a table, without `ref`, `content` and
    `example`."""
    if not table.num_rows:
        return []
    columns = [*SUMMARIZED, *(name for name in OPTIONAL if name in table.column_names)]
    rows: list[_Row] = table.select(columns).to_pylist()
    ids, logprobs = _Nested.of(table["completion_ids"]), _Nested.of(table["logprobs"])
    loops = looping(ids.values.to_numpy(zero_copy_only=False), ids.lists)
    known = logprobs.values.to_numpy(zero_copy_only=False)
    sums = _row_sums(np.where(np.isfinite(known), known, 0.0), logprobs.row_starts)
    looped = _row_sums(loops, ids.rows.tolist())
    tokens = np.diff(ids.row_starts).tolist()
    lengths = np.diff(ids.lists)
    versions, trained = _versions(table), _loss_tokens(table, ids)
    baselines, sessions = _baselines(table, rows), _session_counts(table)
    return [
        Scored(
            ordinal=row["ordinal"],
            oldest_version=versions[index][0],
            newest=versions[index][1],
            versions=tuple(trained[index]),
            loss_tokens=tuple(trained[index].values()),
            masked=Counter(status for status in row["status"] if status != "ok"),
            ref=None,
            tokens=tokens[index],
            lengths=tuple(lengths[ids.rows[index] : ids.rows[index + 1]].tolist()),
            rewards=tuple(
                reward
                for reward, status in zip(row["reward"], row["status"], strict=True)
                if status == "ok" and reward is not None
            ),
            reward_parts=_part_means(
                [
                    parts
                    for parts, status in zip(row["reward_parts"], row["status"], strict=True)
                    if status == "ok"
                ]
            ),
            usable=sum(status == "ok" for status in row["status"]),
            truncated=sum(reason in TRUNCATED for reason in row["finish_reason"]),
            logprob_sum=float(sums[index]),
            looping=int(looped[index]),
            characters=sum(map(len, row["completion_text"])),
            unprintable=unprintable("".join(row["completion_text"])),
            unscored=_unscored(row["reward_parts"]),
            failure=row["failure"],
            source=row.get("source_name"),
            reference_version=row.get("reference_version"),
            baseline=baselines[index],
            sessions=sessions[index],
        )
        for index, row in enumerate(rows)
    ]


def scored_to_text(scored: Scored) -> str:
    """A summary without `ref` and `example` as JSON, for the way to another process."""
    tree = {name: getattr(scored, name) for name in CARRIED}
    if (baseline := scored.baseline) is not None:
        tree["baseline"] = [baseline.reward, baseline.tokens, baseline.truncated]
    if scored.sessions is not None:
        tree["sessions"] = asdict(scored.sessions)
    return json.dumps(tree)


def scored_from_text(text: str) -> Scored:
    """The inverse of `scored_to_text`."""
    tree = json.loads(text)
    for name in ("rewards", "versions", "loss_tokens", "lengths"):
        tree[name] = tuple(tree[name])
    if tree["baseline"] is not None:
        tree["baseline"] = ScoredBaseline(*tree["baseline"])
    if tree["sessions"] is not None:
        tree["sessions"] = SessionCounts(**tree["sessions"])
    return Scored(**tree, ref=None)


def _starts(lists: pa.Array) -> Array:
    """[len + 1] where each list begins in the flattened array."""
    lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False)
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _row_sums(values: Array, starts: Sequence[int]) -> list[float]:
    """The sum of each row's values, in double precision."""
    return [values[start:end].sum(dtype=np.float64) for start, end in pairwise(starts)]


def _versions(table: pa.Table) -> list[tuple[int, int]]:
    """Each row's oldest and newest version, that of its baseline included; 0 without tokens."""
    spans = _Nested.of(table["versions"])
    numbers = [_numbers(spans.values, spans.row_starts)]
    if "baseline_versions" in table.column_names:
        column = table["baseline_versions"].combine_chunks()
        numbers.append(_numbers(pc.list_flatten(column), _starts(column).tolist()))
    found = [np.concatenate(of_row) for of_row in zip(*numbers, strict=True)]
    return [(int(of.min()), int(of.max())) if len(of) else (0, 0) for of in found]


def _loss_tokens(table: pa.Table, ids: _Nested) -> list[dict[int, int]]:
    """For each row, version → tokens with loss in its trajectories with status ok, in increasing
    order."""
    spans = _Nested.of(table["versions"])
    trajectory = np.repeat(np.arange(len(spans.lists) - 1), np.diff(spans.lists))
    version, start, end = (
        pc.struct_field(spans.values, name).to_numpy(zero_copy_only=False)
        for name in ("version", "start", "end")
    )
    masks = _Nested.of(table["loss_mask"]).values.to_numpy(zero_copy_only=False)
    before = np.concatenate([[0], np.cumsum(masks, dtype=np.int64)])
    offset = ids.lists[:-1][trajectory]
    ok = pc.equal(pc.list_flatten(table["status"].combine_chunks()), "ok")
    usable = ok.to_numpy(zero_copy_only=False)[trajectory].astype(bool)
    counts = np.where(usable, before[offset + end] - before[offset + start], 0)
    found: list[dict[int, int]] = []
    for at, to in pairwise(spans.row_starts):
        of_row: Counter[int] = Counter()
        for one, count in zip(version[at:to].tolist(), counts[at:to].tolist(), strict=True):
            of_row[one] += count
        found.append({one: of_row[one] for one in sorted(of_row) if of_row[one]})
    return found


def _numbers(spans: pa.Array, starts: Sequence[int]) -> list[Array]:
    """The versions of each row's spans."""
    versions = pc.struct_field(spans, "version").to_numpy(zero_copy_only=False)
    return [versions[start:end] for start, end in pairwise(starts)]


def examples(table: pa.Table) -> list[TrajectoryText]:
    """The first trajectory of each group, without this process's secrets, and shortened."""
    if not table.num_rows:
        return []
    shown = ["completion_text", "reward", "reward_parts", "versions"]
    prompts = table["prompt_text"].to_pylist()
    firsts = [pc.list_element(table[name].combine_chunks(), 0).to_pylist() for name in shown]
    if "session_messages" in table.column_names:
        chats = pc.list_element(table["session_messages"].combine_chunks(), 0).to_pylist()
        firsts[0] = [transcript(json.loads(chat)) for chat in chats]
    # Redact before the cut: half a secret would not be recognized.
    texts = redact_all([*prompts, *firsts[0]])
    return [
        TrajectoryText(
            prompt=_shortened(prompt),
            completion=_shortened(completion),
            reward=reward,
            # Another group of the table may have parts that this one lacks.
            reward_parts={
                name: value
                for name, value in (parts or {}).items()
                if value is not None or "/" not in name
            },
            version=min((span["version"] for span in spans), default=0),
        )
        for prompt, completion, reward, parts, spans in zip(
            texts[: len(prompts)], texts[len(prompts) :], *firsts[1:], strict=True
        )
    ]


def _baselines(table: pa.Table, rows: Sequence[_Row]) -> list[ScoredBaseline | None]:
    if "baseline_ids" not in table.column_names:
        return [None] * len(rows)
    tokens = pc.list_value_length(table["baseline_ids"]).to_pylist()
    return [
        ScoredBaseline(
            reward=row.get("baseline_reward"),
            tokens=length,
            truncated=row["baseline_finish_reason"] in TRUNCATED,
        )
        for row, length in zip(rows, tokens, strict=True)
    ]


def _session_counts(table: pa.Table) -> list[SessionCounts | None]:
    if COUNTED[0] not in table.column_names:
        return [None] * table.num_rows
    return [_counts(row) for row in table.select([*COUNTED, "status"]).to_pylist()]


def _counts(row: Mapping[str, Any]) -> SessionCounts:
    tokens: Counter[str] = Counter()
    trained: list[int] = []
    for trajectory, count, how in zip(
        row["turn_trajectory"], row["turn_tokens"], row["turn_status"], strict=True
    ):
        status = row["status"][trajectory]
        reason = status if status != "ok" else "trained" if how == "ok" else how
        tokens[reason] += count
        trained.append(count if reason == "trained" else 0)
    rewards = [reward for reward in row["turn_reward"] if reward is not None]
    unasked = _unasked(row)
    return SessionCounts(
        ends=dict(Counter(row["session_end"])),
        turns=len(row["turn_tokens"]),
        unparsed=sum(row["session_unparsed"]),
        overridden=sum(row["session_overridden"]),
        reusable=sum(row["session_reusable"]),
        cached=sum(row["session_cached"]),
        branches=dict(Counter(map(branch_class, filter(None, row["turn_branch_reason"])))),
        tokens=dict(tokens),
        repeated=repeated_tokens(row["turn_parent"], trained),
        model_s=sum(row["session_model_s"]),
        other_s=sum(row["session_other_s"]),
        rewarded_turns=len(rewards),
        turn_reward=sum(rewards),
        failures=_failures(row, unasked),
        unasked=len(unasked),
    )


def _unasked(row: Mapping[str, Any]) -> set[int]:
    """The sessions in which the model took no turn, although they did not fail."""
    asked = set(row["turn_trajectory"])
    return {
        session
        for session, end in enumerate(row["session_end"])
        if session not in asked and end not in (*FAILED_ENDS, "closed")
    }


def _failures(row: Mapping[str, Any], unasked: Collection[int]) -> dict[str, int]:
    """How and why sessions failed → how many did. One that `environment.train_ends` leaves out has
    its end as its status."""
    sessions = zip(row["session_end"], row["session_note"], row["status"], strict=True)
    return dict(
        Counter(
            short(f"{end}: {note}" if note else end, REASON_LENGTH)
            for session, (end, note, status) in enumerate(sessions)
            if (end == status and end in FAILED_ENDS)
            or session in unasked
            or (status == "unscored" and (note or "").startswith(AFTER_CUT))
        )
    )


def _shortened(text: str) -> str:
    """The text without its middle if it is longer than EXAMPLE_LENGTH."""
    half = EXAMPLE_LENGTH // 2
    return text if len(text) <= EXAMPLE_LENGTH else f"{text[:half]} … {text[-half:]}"


def _unscored(parts: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """Number of trajectories without a reward, by function, and by NAME/REASON where a function
    says why. Other entries NAME/PART are not functions, and are left out."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {
        name: math.fsum(part.get(name) or 0.0 for part in parts)
        if _is_reason(name)
        else sum(part[name] is None for part in parts)
        for name in names
        if "/" not in name or _is_reason(name)
    }


def _is_reason(name: str) -> bool:
    """Whether a part says why a function scored nothing."""
    return name.partition("/")[2].startswith(UNSCORED_REASON)


def _part_means(parts: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """Mean of each part over the trajectories that have it. A part without a value is left out."""
    names = dict.fromkeys(name for part in parts for name in part if not _is_reason(name))
    values = {
        name: [value for part in parts if (value := part.get(name)) is not None] for name in names
    }
    return {name: sum(some) / len(some) for name, some in values.items() if some}
