"""Makes groups whose trajectories are sessions: each is one try at the prompt."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import uuid
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from asyncrl.contracts.errors import InvalidRequestError
from asyncrl.contracts.group_table import groups_to_table
from asyncrl.contracts.messages import EngineLoad, Generated
from asyncrl.contracts.nodes import CONSTRAINED
from asyncrl.contracts.rows import SESSION_COLUMNS, TURN_COLUMNS, Completion, Prompt, Trajectory
from asyncrl.contracts.session_table import flat_completion, turn_rewards, turns_of_group
from asyncrl.contracts.text_listener import Heard
from asyncrl.environments.pool import SessionLostError
from asyncrl.environments.running import Ended
from asyncrl.rollout.prefixes import PrefixCounter
from asyncrl.rollout.session_player import Player
from asyncrl.rollout.spec import SessionsSpec
from asyncrl.runtime.all_or_nothing import all_or_nothing
from asyncrl.sessions.answers import TurnDeadlineError
from asyncrl.sessions.session import Sampled, Session, SessionTemplate, TurnRequest
from asyncrl.text.chat_messages import Message, MessagesError, Schema, plain_text
from asyncrl.text.response import ResponseReader
from asyncrl.text.stops import Stops, load_stops
from asyncrl.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from asyncrl.contracts.rows import Group


@dataclass(frozen=True, slots=True)
class Played:
    """One session that has ended."""

    session: Session
    ended: Ended
    load: EngineLoad | None
    unparsed: int
    """Turns whose tool calls or reasoning could not be parsed."""
    prefixes: PrefixCounter
    """What its turns found in the engines' caches."""

    @property
    def text(self) -> str:
        """The text of its last answer."""
        chat = self.session.chat_so_far
        return str(plain_text(chat[-1].get("content"))) if chat else ""

    def trajectory(self) -> Trajectory:
        """All tokens that it sampled."""
        return Trajectory(*flat_completion(self.session.nodes, self.text))


logger = logging.getLogger(__name__)

Generates = Callable[[TurnRequest, int, str, Heard | None], "Coroutine[None, None, Generated]"]
"""Generates the completions of a turn with this seed, for the session of this name. The last
argument gets their text as it comes."""


def turn_seed(seed: int, ordinal: int, sample: int, retry: int, turn: int, answered: int) -> int:
    """Sampling seed of a turn, the same in every process and attempt of the run. It is below 2**48,
    so that the engine can add a completion's index.

    Args:
        retry: sessions of this trajectory that were lost before.
        answered: answers that the same tokens have already.
    """
    name = f"{seed}:{ordinal}:{sample}:{retry}:{turn}:{answered}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "big")


def session_stops(spec: SessionsSpec) -> Stops:
    """What ends a turn of the sessions."""
    return load_stops(
        spec.model.path,
        load_tokenizer(spec.model.path),
        spec.rollout.rollout_stop,
        spec.rollout.rollout_stop_token_ids,
        spec.data.chat_template_kwargs,
    )


def session_template(spec: SessionsSpec) -> SessionTemplate:
    """How the sessions of a run become tokens."""
    tokenizer = load_tokenizer(spec.model.path)
    stops = session_stops(spec)
    return SessionTemplate(
        tokenizer,
        frozenset(stops.tokens),
        spec.longest_trajectory,
        spec.environment.history,
        spec.data.chat_template_kwargs,
        spec.longest_trajectory * max(map(len, tokenizer.get_vocab())),
    )


class Sessions:
    """Plays sessions in environment processes, which belong to this process."""

    def __init__(self, spec: SessionsSpec, seed: int) -> None:
        self._template = session_template(spec)
        self._reader = ResponseReader(self._template.tokenizer)
        self._seed = seed
        self._name = uuid.uuid4().hex[:8]
        """Part of the sessions' names: other workers play sessions of the same prompts."""
        self._player = Player(spec.environment)
        self._turn_s = spec.environment.turn_s
        self._warned = False

    async def start(self) -> None:
        """Wait until the environment is imported. Raises EnvironmentFailedError."""
        await self._player.start()

    async def end_sessions(self) -> None:
        """See `EnvironmentPool.end_sessions`."""
        await self._player.end_sessions()

    async def close(self) -> None:
        """End the environment processes."""
        await self._player.close()

    async def play_all(
        self, prompt: Prompt, samples: Iterable[int], generate: Generates
    ) -> list[Played]:
        """One session for each sample of a prompt, all at once.

        Raises:
            Any error of `generate`.
            EnvironmentFailedError: no environment process starts.
        """
        return await all_or_nothing(self.play(prompt, sample, generate) for sample in samples)

    async def play(self, prompt: Prompt, sample: int, generate: Generates) -> Played:
        """One session. It begins again if its process ends because of another one. Raises as
        `play_all` does."""
        retry, alone = 0, False
        while True:
            turns = _Turns(
                self._reader,
                generate,
                self._turn_s,
                f"{self._name}-{prompt.ordinal}-{sample}-{retry}",
                lambda turn, answered, retry=retry: turn_seed(  # type: ignore[misc]
                    self._seed, prompt.ordinal, sample, retry, turn, answered
                ),
            )
            session = Session(self._template, turns, turns.read)
            task = {**prompt.columns, "prompt": prompt.text}
            try:
                ended = await self._player.play(task, session, alone)
            except SessionLostError as error:
                retry, alone = retry + 1, alone or error.alone
            else:
                self._warn_of_unseen_tools(session)
                return Played(session, ended, turns.load, turns.unparsed, turns.prefixes)
            finally:
                session.close("the session has ended")

    def _warn_of_unseen_tools(self, session: Session) -> None:
        if session.unseen_tools and not self._warned:
            self._warned = True
            logger.warning(
                "the chat template does not write the tools of requests, so the model does not see"
                " them; session/overridden counts these requests"
            )


class _Turns:
    """`TurnGenerator` of one session, and what reads its turns."""

    def __init__(
        self,
        reader: ResponseReader,
        generate: Generates,
        turn_s: float | None,
        session: str,
        seed: Callable[[int, int], int],
    ) -> None:
        self._reader, self._generate, self._seed = reader, generate, seed
        self._turn_s, self._session = turn_s, session
        self.prefixes = PrefixCounter()
        self.load: EngineLoad | None = None
        self.unparsed = 0

    def read(
        self, prompt_ids: Sequence[int], completion: Completion, tools: Sequence[Schema] | None
    ) -> Message:
        """The message of a turn."""
        message, parsed = self._reader.read(
            prompt_ids, completion.token_ids, completion.text, tools
        )
        self.unparsed += not parsed
        return message

    async def generate(self, request: TurnRequest, heard: Heard | None = None) -> Sequence[Sampled]:
        expected = self.prefixes.expected(request.prompt_ids)
        seed = self._seed(request.turn, request.answered)
        # With a model's own response template, the text need not begin the message's content. A
        # grammar cannot go on in the middle of a text, which a replica's death would need.
        if not self._reader.text_begins_content or request.schema is not None:
            heard = None
        try:
            async with asyncio.timeout(self._turn_s) as limit:
                generated = await self._generate(request, seed, self._session, heard)
        except InvalidRequestError as error:  # such as a schema that the engine cannot follow
            raise MessagesError(str(error)) from None
        except TimeoutError:
            if not limit.expired():
                raise
            raise TurnDeadlineError(
                f"a turn took longer than environment.turn_s = {self._turn_s:g} s"
            ) from None
        if len(generated.completions) != request.n:
            raise RuntimeError(
                f"replica {generated.replica} returned {len(generated.completions)} completions,"
                f" not {request.n}"
            )
        self.load = generated.load
        self.prefixes.count(expected, request.prompt_ids, generated)
        return [
            Sampled(
                one,
                generated.replica,
                generated.started_at,
                generated.finished_at,
                "ok" if request.schema is None else CONSTRAINED,
            )
            for one in generated.completions
        ]


def session_table(group: Group, played: Sequence[Played]) -> pa.Table:
    """The one-row table of a group whose trajectories are these sessions."""
    table = groups_to_table([group])
    ends = [one.ended for one in played]
    columns = {
        **turns_of_group([one.session.nodes for one in played]),
        "turn_reward": [
            reward
            for one in played
            for reward in turn_rewards(one.session.nodes, one.ended.turn_rewards)
        ],
        "session_end": [end.end for end in ends],
        "session_note": [end.note for end in ends],
        "session_messages": [json.dumps(one.session.chat_so_far) for one in played],
        "session_reward": [end.reward for end in ends],
        "session_parts": [json.dumps(dict(end.parts)) for end in ends],
        "session_output": [end.output for end in ends],
        "session_unparsed": [one.unparsed for one in played],
        "session_overridden": [one.ended.overridden + one.session.unseen_tools for one in played],
        "session_reusable": [one.prefixes.reusable for one in played],
        "session_cached": [one.prefixes.cached for one in played],
        "session_model_s": [end.model_s for end in ends],
        "session_other_s": [end.other_s for end in ends],
    }
    for name, kind in {**TURN_COLUMNS, **SESSION_COLUMNS}.items():
        table = table.append_column(name, pa.array([columns[name]], kind))
    return table
