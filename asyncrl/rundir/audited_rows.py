"""Reading the rows of groups/*.parquet for an audit, with the faults of each row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from asyncrl.algorithms.pairs import Candidates
from asyncrl.contracts.content_hash import content_hashes
from asyncrl.contracts.rows import (
    COLUMNS,
    FINISH_REASONS,
    REFERENCE_COLUMN,
    REFERENCE_VERSION_COLUMN,
    SCORED_COLUMNS,
    STATUSES,
    TIME_COLUMNS,
    TRUNCATED,
    TURN_ADVANTAGE_COLUMN,
    GroupRow,
    SpanRow,
)
from asyncrl.contracts.session_table import NODE_COLUMNS
from asyncrl.rundir.audited_turns import (
    BEGIN,
    Generation,
    TurnCredit,
    broken_sessions,
    generations,
    has_turns,
    turn_credit,
    turn_starts,
)
from asyncrl.rundir.baselines import impossible_baselines, odd_advantages
from asyncrl.runtime.files import parquet

ROUNDING = 1e-3
"""Tolerance above 0 for a log-prob in nats: rounding may exceed 0 for a certain token."""
CLOCKS_S = 60.0
"""Seconds by which the clocks of two machines of a run may differ."""
UNEVEN = "lists of different lengths, or missing values"
READ = (
    "attempt",
    "ordinal",
    "replica",
    "started_at",
    "finished_at",
    "versions",
    "status",
    "prompt_ids",
    "reward",
    "finish_reason",
)
"""Columns whose values `Row` needs as Python objects."""
CREDIT = (TURN_ADVANTAGE_COLUMN, "turn_trajectory", "turn_status", "turn_reward", "advantage")
"""Columns that advantages of turns are from, and themselves."""
GENERATION = ("replica", "started_at", "finished_at", "completion_ids", "logprobs")
"""Columns that identify a generation: where, when, and what was sampled."""


@dataclass(frozen=True, slots=True)
class Row:
    """The data of a group's row that an audit needs."""

    attempt: int
    ordinal: int
    replica: str
    started_at: float
    finished_at: float
    lengths: tuple[int, ...]
    """Completion tokens of each trajectory."""
    losses: tuple[int, ...]
    """Tokens with loss of each trajectory with status ok; 0 for the others."""
    candidates: Candidates
    """The trajectories as online DPO chooses pairs from them."""
    versions: tuple[int, ...]
    """Each token version in increasing order, those of a baseline included."""
    loss_by_version: Mapping[int, int]
    """Token version → tokens with loss, in the trajectories with status ok."""
    whole: bool
    """Whether every trajectory has a loss mask, log-probs and versions for each of its tokens."""
    content: str
    """Hash of the whole row, to compare with its outcome's."""
    generation: str
    """Hash of the columns `GENERATION`."""
    prompt_ids: tuple[int, ...]
    rewards: tuple[float, ...]
    """Rewards of the trajectories with status ok."""
    faults: tuple[str, ...]
    """The row's faults: keys of `FAULTS`, or `UNEVEN`."""
    reference: int | None = None
    """Version of the reference policy that scored the group; None without one."""
    turns: tuple[Generation, ...] | None = None
    """The turns of its sessions that have tokens; None if its trajectories are completions."""
    credit: TurnCredit | None = None
    """Credit of the turns of the group; None if they have no advantages of their own."""
    endings: frozenset[tuple[str, str]] = frozenset()
    """How its sessions ended, each with its status. Empty if its trajectories are completions."""

    @property
    def oldest(self) -> int | None:
        """Oldest token version; None without tokens."""
        return min(self.versions, default=None)

    @property
    def newest(self) -> int | None:
        """Newest token version; None without tokens."""
        return max(self.versions, default=None)

    @property
    def generations(self) -> tuple[Generation, ...]:
        """What replicas generated of it at once."""
        if self.turns is not None:
            return self.turns
        if self.oldest is None or self.newest is None:
            return ()
        return (
            Generation(self.replica, self.started_at, self.finished_at, self.oldest, self.newest),
        )

    def loss_tokens(self, oldest_version: int = 0) -> int:
        """Tokens with loss of this version and later ones, in the trajectories with status ok."""
        return sum(
            tokens for version, tokens in self.loss_by_version.items() if version >= oldest_version
        )


def read_rows(path: Path) -> list[Row]:
    """Read the rows of one file.

    Raises:
        ValueError: a column is missing or has the wrong type.
        OSError, pa.ArrowException: the file cannot be read.
    """
    table = parquet.read_table(path)
    for name, kind in {**COLUMNS, **SCORED_COLUMNS}.items():
        if name not in table.column_names:
            raise ValueError(
                f"{path} is from an older asyncrl, or damaged: it has no column {name!r}"
            )
        if not table.schema.field(name).type.equals(kind):
            raise ValueError(
                f"{path} is damaged: column {name!r} has type {table.schema.field(name).type},"
                f" not {kind}"
            )
    if not table.num_rows:
        return []
    try:
        return list(_rows(table.combine_chunks()))
    except (ValueError, IndexError, TypeError):
        # Some row has lists of different lengths, or a missing value: read the rows singly.
        return [
            _row_or_uneven(table.slice(number, 1).combine_chunks())
            for number in range(table.num_rows)
        ]


def _row_or_uneven(table: pa.Table) -> Row:
    """The row of a one-row table. A malformed row is empty and has the fault `UNEVEN`."""
    try:
        (row,) = _rows(table)
        return row
    except (ValueError, IndexError, TypeError):
        attempt, ordinal = (table[name][0].as_py() for name in ("attempt", "ordinal"))
        (content,) = content_hashes(table)
        return Row(
            attempt=attempt,
            ordinal=ordinal,
            replica="",
            started_at=0.0,
            finished_at=0.0,
            lengths=(),
            losses=(),
            candidates=Candidates((), (), (), ()),
            versions=(),
            loss_by_version={},
            whole=False,
            content=content,
            generation=content,
            prompt_ids=(),
            rewards=(),
            faults=(UNEVEN,),
        )


def _rows(table: pa.Table) -> Iterator[Row]:
    lengths = _token_counts(table, "completion_ids")
    bounds = np.concatenate([[0], np.cumsum(_trajectories(table))])
    _refuse_uneven(table)
    masks, starts = _loss_before(table), np.cumsum(lengths) - lengths
    loss = masks[starts + lengths] - masks[starts]
    completions = _completion_hashes(table, lengths)
    alike = (lengths == _token_counts(table, "loss_mask")) & (
        lengths == _token_counts(table, "logprobs")
    )
    bad = {name: find(table, lengths) for name, find in FAULTS.items()}
    read = [*READ, *({REFERENCE_VERSION_COLUMN, "baseline_versions"} & set(table.column_names))]
    sessions = has_turns(table)
    turns = table.select([*NODE_COLUMNS, "session_end"]).to_pylist() if sessions else []
    credits = table.select(list(CREDIT)).to_pylist() if CREDIT[0] in table.column_names else []
    groups: list[GroupRow] = table.select(read).to_pylist()
    hashes = zip(content_hashes(table), content_hashes(table.select(list(GENERATION))), strict=True)
    for number, (group, (content, generation)) in enumerate(zip(groups, hashes, strict=True)):
        mine = slice(bounds[number], bounds[number + 1])
        tokens, versions, status = lengths[mine].tolist(), group["versions"], group["status"]
        spanned = [sum(span["end"] - span["start"] for span in spans) for spans in versions]
        made = [*versions, group.get("baseline_versions") or []]
        seen = [span["version"] for spans in made for span in spans]
        yield Row(
            attempt=group["attempt"],
            ordinal=group["ordinal"],
            replica=group["replica"],
            started_at=group["started_at"],
            finished_at=group["finished_at"],
            lengths=tuple(tokens),
            losses=tuple(
                int(count) if how == "ok" else 0
                for count, how in zip(loss[mine], status, strict=False)
            ),
            candidates=Candidates(
                tuple(group["reward"]),
                tuple(how == "ok" for how in status),
                tuple(reason in TRUNCATED for reason in group["finish_reason"]),
                completions[mine],
            ),
            versions=tuple(sorted(set(seen))),
            loss_by_version=_loss_by_version(versions, status, masks, starts[mine]),
            whole=bool(alike[mine].all()) and spanned == tokens and len(status) == len(versions),
            content=content,
            generation=generation,
            prompt_ids=tuple(group["prompt_ids"]),
            rewards=tuple(
                reward
                for reward, how in zip(group["reward"], status, strict=True)
                if how == "ok" and reward is not None
            ),
            faults=tuple(name for name, found in bad.items() if found[mine].any()),
            reference=group.get(REFERENCE_VERSION_COLUMN),
            turns=generations(turns[number]) if sessions else None,
            credit=turn_credit(credits[number]) if credits else None,
            endings=frozenset(
                zip(turns[number]["session_end"], status, strict=True) if sessions else ()
            ),
        )


def _loss_before(table: pa.Table) -> np.ndarray:
    """[T + 1] tokens that the loss masks keep before each of the table's completion tokens."""
    return np.concatenate([[0], np.cumsum(_flat(table, "loss_mask"))])


def _loss_by_version(
    versions: Sequence[Sequence[SpanRow]],
    status: Sequence[str],
    masks: np.ndarray,
    starts: np.ndarray,
) -> dict[int, int]:
    """Token version → tokens with loss, in a group's trajectories with status ok.

    Args:
        masks: [T + 1], by `_loss_before`.
        starts: where each trajectory of the group begins among the table's tokens.
    """
    counts: Counter[int] = Counter()
    for spans, how, start in zip(versions, status, starts.tolist(), strict=False):
        for span in spans if how == "ok" else ():
            # A fault of the row may be a span beyond its tokens.
            first, last = (
                max(0, min(start + span[edge], len(masks) - 1)) for edge in ("start", "end")
            )
            counts[span["version"]] += int(masks[last] - masks[first])
    return dict(counts)


def _completion_hashes(table: pa.Table, lengths: np.ndarray) -> tuple[int, ...]:
    """A hash of each trajectory's token ids, for comparisons within this process."""
    parts = np.split(_flat(table, "completion_ids"), np.cumsum(lengths)[:-1])
    return tuple(hash(part.tobytes()) for part in parts)


def _refuse_uneven(table: pa.Table) -> None:
    """Raise ValueError unless the lists of each row have one item per trajectory and no value is
    missing."""
    n = _trajectories(table)
    for name in (
        "loss_mask",
        "logprobs",
        "versions",
        "status",
        "finish_reason",
        "completion_text",
        "reward",
        "advantage",
    ):
        if not np.array_equal(
            _column(table, name).value_lengths().to_numpy(zero_copy_only=False), n
        ):
            raise ValueError(f"{name} does not have one item per trajectory")
    if any(
        table[name].null_count
        for name in ("attempt", "ordinal", "replica", "started_at", "finished_at", "prompt_ids")
    ):
        raise ValueError("a value is missing")


def _masks_other_than_0_and_1(table: pa.Table, lengths: np.ndarray) -> np.ndarray:
    masks = _flat(table, "loss_mask")
    owner = _owners(table, "loss_mask")
    found = np.zeros(len(lengths), bool)
    found[owner[(masks != 0) & (masks != 1)]] = True
    return found


def _impossible_spans(table: pa.Table, lengths: np.ndarray) -> np.ndarray:
    """Spans with gaps or overlaps, beyond the tokens, or with versions that do not increase."""
    spans = _column(table, "versions").flatten()
    counts = spans.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    version, start, end = (
        part.to_numpy(zero_copy_only=False) for part in spans.flatten().flatten()
    )
    owner = np.repeat(np.arange(len(counts)), counts)
    first = np.ones(len(owner), bool)
    first[1:] = owner[1:] != owner[:-1]
    last = np.ones(len(owner), bool)
    last[:-1] = first[1:]
    expected = np.where(first, 0, np.concatenate([[0], end[:-1]]) if len(end) else end)
    rises = first | (version > np.concatenate([[-1], version[:-1]])) if len(version) else first
    if has_turns(table):
        rises |= np.isin(owner * BEGIN + start, turn_starts(table))
    wrong = (
        (start != expected)
        | (end <= start)
        | (version < 0)
        | ~rises
        | (last & (end != lengths[owner]))
    )
    found = (counts == 0) & (lengths > 0)
    found[owner[wrong]] = True
    return np.asarray(found)


def _times_that_go_back(table: pa.Table, lengths: np.ndarray) -> np.ndarray:
    """A replica accepts the request, computes each trajectory, and has completed the request. A
    group without times of its trajectories has the others only."""
    of_each = _trajectories(table)
    started, finished = (
        np.repeat(_column(table, name).to_numpy(zero_copy_only=False), of_each)
        for name in ("started_at", "finished_at")
    )
    back = np.asarray(~((started <= finished) & np.isfinite(started) & np.isfinite(finished)))
    if not set(TIME_COLUMNS) <= set(table.column_names):
        return back
    back |= np.repeat(_far(table, "admitted_at", "started_at"), of_each)
    back |= np.repeat(_far(table, "finished_at", "scored_at"), of_each)
    columns = [_column(table, name) for name in ("generated_from", "generated_to")]
    counts = [_numbers(pc.fill_null(column.value_lengths(), 0)) for column in columns]
    told = (counts[0] == of_each) & (counts[1] == of_each)
    back |= np.repeat(~told & ((counts[0] > 0) | (counts[1] > 0)), of_each)
    began, ended = (
        _numbers(column.flatten())[np.repeat(told, count)]
        for column, count in zip(columns, counts, strict=True)
    )
    mine = np.repeat(told, of_each)
    back[mine] |= ~((started[mine] <= began) & (began <= ended) & (ended <= finished[mine]))
    return np.asarray(back)


def _far(table: pa.Table, first: str, second: str) -> np.ndarray:
    """Groups whose second time is before the first one, by more than the clocks of two machines
    may differ. A time that is missing counts for nothing."""
    before, after = (
        _column(table, name).to_numpy(zero_copy_only=False).astype(float)
        for name in (first, second)
    )
    there = ~_numbers(pc.or_(_column(table, first).is_null(), _column(table, second).is_null()))
    return np.asarray(there & ~(before <= after + CLOCKS_S))


def _not_finite_or_positive_logprobs(table: pa.Table, lengths: np.ndarray) -> np.ndarray:
    """Checks trajectories with status ok. Others may be masked for this very fault."""
    logprobs = _flat(table, "logprobs")
    owner = _owners(table, "logprobs")
    found = np.zeros(len(lengths), bool)
    found[owner[~np.isfinite(logprobs) | (logprobs > ROUNDING)]] = True
    return np.asarray(found & _ok(table))


def _odd_reference(table: pa.Table, lengths: np.ndarray) -> np.ndarray:
    """Trajectories with status ok whose log-probs by the reference policy or a teacher are not one
    finite number for each token. Tables in which some group has none are not checked."""
    if REFERENCE_COLUMN not in table.column_names or table[REFERENCE_COLUMN].null_count:
        return np.zeros(len(lengths), bool)
    counts = _token_counts(table, REFERENCE_COLUMN)
    found = counts != lengths
    owner = np.repeat(np.arange(len(counts)), counts)
    found[owner[~np.isfinite(_flat(table, REFERENCE_COLUMN))]] = True
    return np.asarray(found & _ok(table))


def _impossible_rewards(table: pa.Table, lengths: np.ndarray) -> np.ndarray:
    """Rewards and advantages that are NaN or infinite, and missing rewards of trajectories with
    status ok."""
    found = np.zeros(len(lengths), bool)
    for name in ("reward", "advantage"):
        values = _column(table, name).flatten()
        found |= values.is_valid().to_numpy(zero_copy_only=False) & ~np.isfinite(
            values.fill_null(0).to_numpy(zero_copy_only=False)
        )
        if name == "reward":
            found |= values.is_null().to_numpy(zero_copy_only=False) & _ok(table)
    return found


def _masked_without_reason(table: pa.Table, lengths: np.ndarray) -> np.ndarray:
    """Trajectories that are masked for a reason that they do not show: `unscored` with a reward,
    `no_token` with a token that has loss, or `bad_logprob` with finite log-probs. Of a run with a
    reference policy, the log-probs are not checked: the policy's own may be the bad ones."""
    status = _numbers(_column(table, "status").flatten())
    trains, finite = np.zeros(len(lengths), bool), np.ones(len(lengths), bool)
    trains[_owners(table, "loss_mask")[_flat(table, "loss_mask") != 0]] = True
    finite[_owners(table, "logprobs")[~np.isfinite(_flat(table, "logprobs"))]] = False
    rewarded = _numbers(_column(table, "reward").flatten().is_valid())
    return np.asarray(
        ((status == "unscored") & rewarded)
        | ((status == "no_token") & trains)
        | ((status == "bad_logprob") & finite & (REFERENCE_COLUMN not in table.column_names))
    )


def _unknown_words(table: pa.Table, lengths: np.ndarray) -> np.ndarray:
    known = {"status": STATUSES, "finish_reason": FINISH_REASONS}
    columns = [
        pc.is_in(_column(table, name).flatten(), pa.array(words)).to_numpy(zero_copy_only=False)
        for name, words in known.items()
    ]
    return ~np.asarray(np.logical_and(*columns))


def _negative_tokens(table: pa.Table, lengths: np.ndarray) -> np.ndarray:
    found = np.zeros(len(lengths), bool)
    found[np.repeat(np.arange(len(lengths)), lengths)[~(_flat(table, "completion_ids") >= 0)]] = (
        True
    )
    return found


def _ok(table: pa.Table) -> np.ndarray:
    ok = pc.fill_null(pc.equal(_column(table, "status").flatten(), "ok"), False)
    return _numbers(ok)


FAULTS: Mapping[str, Callable[[pa.Table, np.ndarray], np.ndarray]] = {
    "masks other than 0 and 1": _masks_other_than_0_and_1,
    "overlapping or impossible version spans": _impossible_spans,
    "times that go back": _times_that_go_back,
    "invalid log-probs": _not_finite_or_positive_logprobs,
    "invalid log-probs of the reference policy": _odd_reference,
    "rewards or advantages that are not numbers": _impossible_rewards,
    "an unknown status or finish reason": _unknown_words,
    "trajectories masked without a reason": _masked_without_reason,
    "negative or missing token ids": _negative_tokens,
    "turns that do not make up their sessions": broken_sessions,
    "an impossible baseline": impossible_baselines,
    "advantages other than the reward less the baseline's": odd_advantages,
}
"""Faults that a row written by asyncrl cannot have: name → check. A check takes the table and the
completion tokens of each trajectory, and returns whether each trajectory has the fault."""


def _column(table: pa.Table, name: str) -> pa.Array:
    column = table[name].combine_chunks()
    return column if isinstance(column, pa.Array) else pa.concat_arrays(column.chunks)


def _trajectories(table: pa.Table) -> np.ndarray:
    """Number of trajectories of each row."""
    return _numbers(_column(table, "completion_ids").value_lengths())


def _token_counts(table: pa.Table, name: str) -> np.ndarray:
    """Length of each trajectory's list in a column."""
    return _numbers(_column(table, name).flatten().value_lengths())


def _owners(table: pa.Table, name: str) -> np.ndarray:
    """For each value of a column of lists per trajectory, the number of its trajectory."""
    counts = _token_counts(table, name)
    return np.repeat(np.arange(len(counts)), counts)


def _flat(table: pa.Table, name: str) -> np.ndarray:
    return _numbers(_column(table, name).flatten().flatten())


def _numbers(array: pa.Array) -> np.ndarray:
    return np.asarray(array.to_numpy(zero_copy_only=False))
