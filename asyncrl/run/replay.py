"""Replays recorded sessions against their environment, without a model.

The environment runs in a process of its own, as in training. Each of its requests must have exactly
the tokens of a recorded one, and gets the recorded answers. So a replay shows whether an
environment still does what it did: the same requests, the same end, the same reward.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from asyncrl.config import ConfigError
from asyncrl.contracts.columns import row_values
from asyncrl.contracts.group_table import groups_from_table
from asyncrl.contracts.nodes import Node
from asyncrl.contracts.rows import Completion, Group
from asyncrl.contracts.session_table import NODE_COLUMNS, SessionsRow, TurnsRow, nodes_of_group
from asyncrl.contracts.text_listener import Heard
from asyncrl.environments.pool import EnvironmentFailedError
from asyncrl.environments.running import Ended
from asyncrl.preflight.model_snapshot import resolve_models
from asyncrl.preflight.specs import sessions_spec
from asyncrl.rollout.session_groups import session_stops, session_template
from asyncrl.rollout.session_player import Player
from asyncrl.runtime.redact import shown
from asyncrl.sessions.session import Sampled, Session, SessionTemplate, TurnRequest
from asyncrl.text.continuation import first_difference
from asyncrl.text.response import ResponseReader
from asyncrl.text.stops import text_before
from asyncrl.text.tokenizer import decode, decode_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from asyncrl.rollout.spec import SessionsSpec
    from asyncrl.rundir.reader import Run
    from asyncrl.text.chat_messages import Message, Schema

BEFORE, AFTER = 8, 24
"""Tokens that a message shows before a difference, and from there on."""
SESSION = "session_end"
"""A column that each version of asyncrl has written for sessions."""
END_COLUMNS = (SESSION, "session_reward", "session_parts", "session_note")
"""Columns with the recorded ends."""
CUT_OFF = ("deadline", "closed")
"""Ends that came from outside. Their time is not recorded, so they are not compared."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """A recorded session and its replay."""

    ordinal: int
    attempt: int
    """The run's attempt that recorded it."""
    sample: int
    """Index of the session in its group."""
    turns: int
    """Recorded turns."""
    asked: int
    """Recorded turns that the environment asked for again."""
    recorded: Ended
    replayed: Ended | None
    """How the replay ended. None: it was stopped at a difference, or at the end of a cut record."""
    difference: str
    """What differs, in words; "" if nothing does."""


def replay_sessions(
    run: Run, ordinal: int, sample: int | None = None, attempt: int | None = None
) -> list[Replayed]:
    """Replay the recorded sessions of one prompt against the run's environment, as it is now.

    Args:
        sample: the index of one session in its group. None: all sessions of the group.
        attempt: the run's attempt that recorded the group. None: the newest one that did.

    Raises:
        ConfigError: the run has no environment or no such session, the environment cannot be
            imported, or the columns of the group are damaged.
    """
    config = resolve_models(run.config)
    spec = sessions_spec(config)
    if spec is None:
        raise ConfigError(
            f"{run.directory} is a run without an environment, whose completions cannot be replayed"
        )
    table = _group(run, ordinal, attempt)
    samples = _samples(len(table["completion_ids"][0]), sample, ordinal)
    try:
        return asyncio.run(_replay(spec, table, samples))
    except EnvironmentFailedError as error:
        raise ConfigError(str(error)) from None


def _group(run: Run, ordinal: int, attempt: int | None) -> pa.Table:
    """The only row of a recorded group."""
    groups = run.groups()
    found = groups.filter(pc.equal(groups["ordinal"], ordinal))
    if attempt is not None:
        found = found.filter(pc.equal(found["attempt"], attempt))
    if not found.num_rows:
        of = "" if attempt is None else f" of attempt {attempt}"
        ordinals = groups["ordinal"].to_pylist()
        there = f"{min(ordinals)} to {max(ordinals)}" if ordinals else "no group yet"
        raise ConfigError(f"{run.directory} has no group {ordinal}{of}; groups/ has {there}")
    newest = found.slice(found.num_rows - 1)
    missing = [
        name
        for name in dict.fromkeys((*NODE_COLUMNS, *END_COLUMNS))
        if name not in newest.column_names or newest[name].null_count
    ]
    if SESSION in missing:
        raise ConfigError(
            f"{run.directory}: group {ordinal} has no column {SESSION}, so its trajectories are no"
            " sessions; name another one"
        )
    if missing:
        raise ConfigError(
            f"{run.directory}: group {ordinal} was recorded by an earlier version of asyncrl, and"
            f" lacks the column {', '.join(missing)}; replay it with that version, or a session of"
            " a newer run"
        )
    return newest


def _samples(there: int, sample: int | None, ordinal: int) -> Sequence[int]:
    if sample is None:
        return range(there)
    if not 0 <= sample < there:
        raise ConfigError(
            f"--sample = {sample}: group {ordinal} has the sessions 0 to {there - 1}; name one"
        )
    return [sample]


async def _replay(spec: SessionsSpec, table: pa.Table, samples: Sequence[int]) -> list[Replayed]:
    record = _read(table)
    group = record.group
    task = {**group.prompt.columns, "prompt": group.prompt.text}
    template = session_template(spec)
    stops = session_stops(spec)
    reader = ResponseReader(template.tokenizer)
    pool = Player(spec.environment.model_copy(update={"processes": 1}))
    try:
        await pool.start()
        replayed = []
        for sample in samples:
            ended = record.ends[sample]
            model = _RecordedModel(
                record.sessions[sample], template.tokenizer, reader, stops.strings
            )
            again = await _play(pool, task, template, model)
            replayed.append(
                Replayed(
                    group.prompt.ordinal,
                    group.attempt,
                    sample,
                    model.turns,
                    model.asked,
                    ended,
                    again,
                    _difference(model, ended, again),
                )
            )
        return replayed
    finally:
        await pool.close()


@dataclass(frozen=True, slots=True)
class _Record:
    """A recorded group, and the turns and the end of each of its sessions."""

    group: Group
    sessions: Sequence[Sequence[Node]]
    ends: Sequence[Ended]


def _read(table: pa.Table) -> _Record:
    """The record of a group's row.

    Raises:
        ConfigError: its columns are damaged.
    """
    try:
        (row,) = row_values(table)
        (group,) = groups_from_table(table)
        for name in TurnsRow.__annotations__:
            if None in cast("Sequence[object]", row[name]):
                raise ValueError(f"{name} is null for a turn")
        sessions = nodes_of_group(cast("SessionsRow", row))
        for node in (node for nodes in sessions for node in nodes):
            for token in node.token_ids:
                if not isinstance(token, int) or token < 0:
                    raise ValueError(f"a turn has the token {token}")
        ends = [_recorded_end(row, sample) for sample in range(len(sessions))]
    except (ValueError, TypeError, LookupError) as error:
        ordinal = table["ordinal"][0].as_py()
        why = " ".join(str(error).split())
        raise ConfigError(
            f"group {ordinal}: its columns are damaged ({why}); restore the file"
        ) from None
    return _Record(group, sessions, ends)


def _recorded_end(row: Mapping[str, Any], sample: int) -> Ended:
    end, parts = row["session_end"][sample], json.loads(row["session_parts"][sample])
    if end is None:
        raise ValueError(f"session_end is {end} for session {sample}")
    if not isinstance(parts, dict):
        raise ValueError(f"session_parts is no JSON object for session {sample}")
    return Ended(end, row["session_reward"][sample], parts, row["session_note"][sample])


async def _play(
    pool: Player,
    task: Mapping[str, Any],
    template: SessionTemplate,
    model: _RecordedModel,
) -> Ended | None:
    """The end of a session with recorded answers. None: a request has none, which `model` knows."""
    session = Session(template, model, model.read)
    playing = asyncio.ensure_future(pool.play(task, session, alone=True))
    try:
        either: list[asyncio.Future[Any]] = [playing, model.stopped]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return None if model.stopped.done() else playing.result()
    finally:
        playing.cancel()
        session.close("the replay has ended")
        await asyncio.gather(playing, return_exceptions=True)


def _difference(model: _RecordedModel, recorded: Ended, replayed: Ended | None) -> str:
    """What differs between a recorded session and its replay; "" if nothing does."""
    cut_off = recorded.end in CUT_OFF
    if replayed is None:
        return "" if model.exhausted and cut_off else model.stopped.result()
    if left := model.turns - model.asked:
        return (
            f"the environment ended ({_end_text(replayed)}) and did not ask for {left} of"
            f" {model.turns} recorded turns"
        )
    if cut_off or _compared(recorded) == _compared(replayed):
        return ""
    return f"the record ends with {_end_text(recorded)}, and the replay with {_end_text(replayed)}"


def _compared(ended: Ended) -> tuple[object, ...]:
    return ended.end, ended.reward, dict(ended.parts)


def _end_text(ended: Ended) -> str:
    """Such as "done, reward 1, won 1"."""
    reward = "no reward" if ended.reward is None else f"reward {ended.reward!r}"
    parts = [f"{name} {value!r}" for name, value in ended.parts.items()]
    note = [ended.note] if ended.note else []
    return ", ".join([ended.end, reward, *parts, *note])


class _RecordedModel:
    """`TurnGenerator` that answers from a record: the answers to the same tokens, in order."""

    def __init__(
        self,
        nodes: Sequence[Node],
        tokenizer: PreTrainedTokenizerBase,
        reader: ResponseReader,
        stop: Sequence[str],
    ) -> None:
        self._tokenizer, self._reader, self._stop = tokenizer, reader, stop
        self._left: dict[tuple[int, ...], list[Node]] = {}
        """Tokens before a turn → the turns after them that no request has got yet."""
        paths: list[tuple[int, ...]] = []
        for node in nodes:
            before = () if node.parent is None else paths[node.parent]
            paths.append((*before, *node.token_ids))
            if node.sampled:
                self._left.setdefault(before, []).append(node)
        self.turns = sum(node.sampled for node in nodes)
        self.asked = 0
        self.exhausted = False
        """Whether a request came after all recorded turns."""
        self.stopped: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """What differs at the first request that is not in the record."""

    def read(
        self, prompt_ids: Sequence[int], completion: Completion, tools: Sequence[Schema] | None
    ) -> Message:
        """The message of a turn."""
        return self._reader.read(prompt_ids, completion.token_ids, completion.text, tools)[0]

    async def generate(self, request: TurnRequest, heard: Heard | None = None) -> Sequence[Sampled]:
        """The next recorded answers to the request. Never returns if there are none."""
        left = self._left.get(tuple(request.prompt_ids), [])
        turns = left[: request.n]
        difference = self._differs(request, turns)
        if difference:
            if not self.stopped.done():
                self.exhausted = self.asked == self.turns
                self.stopped.set_result(difference)
            await asyncio.get_running_loop().create_future()  # the session is canceled
        del left[: request.n]
        self.asked += len(turns)
        return [self._sampled(turn, request.stop) for turn in turns]

    def _sampled(self, turn: Node, stop: Sequence[str]) -> Sampled:
        completion = Completion(
            turn.token_ids,
            turn.logprobs,
            turn.versions,
            turn.finish_reason,
            text_before(decode(self._tokenizer, turn.token_ids), (*self._stop, *stop)),
        )
        return Sampled(completion, turn.replica, turn.started_at, turn.finished_at)

    def _differs(self, request: TurnRequest, turns: Sequence[Node]) -> str:
        """Why a request is not in the record; "" if it is."""
        number = self.asked + 1
        longest = max((len(turn.token_ids) for turn in turns), default=0)
        if len(turns) == request.n and longest <= request.max_tokens:
            return ""
        if self.asked == self.turns:
            return f"the environment asks for turn {number}, and the record has {self.turns}"
        if len(turns) == request.n:
            return (
                f"turn {number}: the request allows {request.max_tokens} tokens, and the recorded"
                f" answer has {longest}"
            )
        if turns or tuple(request.prompt_ids) in self._left:
            return (
                f"turn {number}: the environment asks for {request.n} more answers to the same"
                f" messages, and the record has {len(turns)}"
            )
        return f"turn {number}: {self._other_messages(tuple(request.prompt_ids))}"

    def _other_messages(self, prompt: tuple[int, ...]) -> str:
        """Where the messages of a request leave those of the most similar recorded one."""
        waiting = [before for before, turns in self._left.items() if turns]
        lengths = [_same(before, prompt) for before in waiting]
        same = max(lengths)
        recorded = waiting[lengths.index(same)]
        begin = max(0, same - BEFORE)
        was, now = (
            decode_prompt(self._tokenizer, ids[begin : same + AFTER]) for ids in (recorded, prompt)
        )
        return (
            f"the messages differ at token {same}: the record has {was!r}, and the replay {now!r}"
        )


def _same(recorded: tuple[int, ...], asked: tuple[int, ...]) -> int:
    """How many tokens two sequences share at their start. One may be the other's beginning."""
    same = first_difference(recorded, asked)
    return min(len(recorded), len(asked)) if same is None else same


def replay_text(sessions: Sequence[Replayed]) -> str:
    """One line for each session, and one in total. Control characters are replaced."""
    lines = [_line(one) for one in sessions]
    differ = sum(bool(one.difference) for one in sessions)
    total = f"{len(sessions)} replayed, {differ} differ from the record"
    return shown("\n".join([*lines, total]))


def _line(one: Replayed) -> str:
    head = f"prompt {one.ordinal} (attempt {one.attempt}), session {one.sample}: "
    if one.difference:
        return f"{head}DIFFERS: {one.difference}"
    same = f"{head}{one.turns} turns as recorded, "
    if one.replayed is None or one.recorded.end in CUT_OFF:
        return f"{same}until it was cut off ({one.recorded.end}); the end is not compared"
    return f"{same}ends with {_end_text(one.replayed)}"
