"""Plays sessions: in environment processes, and at a URL if their agents need one."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from asyncrl.agents.served import ServedSession
from asyncrl.config import EnvironmentConfig
from asyncrl.contracts.rows import AFTER_CUT
from asyncrl.environments.model import SessionUrl
from asyncrl.environments.pool import EnvironmentPool
from asyncrl.environments.results import turn_rewards_of
from asyncrl.environments.running import Ended, end_of
from asyncrl.rollout.session_time import PacedSession, PlayedSession
from asyncrl.runtime.functions import one_line
from asyncrl.sessions.answers import Answer, ChatRequest

if TYPE_CHECKING:
    from asyncrl.agents.server import AgentServer

UNASKED = "it asked the model for no turn"
AT_URL = "; an agent finds it by OPENAI_BASE_URL or ANTHROPIC_BASE_URL, and the key of its session"


class _Counted:
    """A session whose requests in process count together with those at its URL."""

    def __init__(self, session: PlayedSession, served: ServedSession) -> None:
        self.abandon, self._served = session.abandon, served

    async def chat(self, request: ChatRequest) -> list[Answer]:
        return await self._served.chat(request)


class Player:
    """Plays sessions of one environment. Use it on one event loop, and close it.

    Args:
        output: see `EnvironmentPool`.
    """

    def __init__(self, config: EnvironmentConfig, output: int | None = None) -> None:
        self._pool = EnvironmentPool(config, output)
        self._most_turns, self._tool_s = config.max_turns, config.tool_s
        self._server: AgentServer | None = None
        if config.at_url:
            from asyncrl.agents.server import AgentServer  # it imports a web framework

            self._server = AgentServer()

    async def start(self) -> None:
        """Wait until the environment is imported. Raises EnvironmentFailedError."""
        if self._server is not None:
            await self._server.start()
        await self._pool.start()

    async def end_sessions(self) -> None:
        """See `EnvironmentPool.end_sessions`."""
        await self._pool.end_sessions()

    async def close(self) -> None:
        """End the environment processes and the server."""
        await self._pool.close()
        if self._server is not None:
            await self._server.close()

    async def play(
        self, task: Mapping[str, Any], session: PlayedSession, alone: bool = False
    ) -> Ended:
        """Play one session to its end. Raises as `EnvironmentPool.play` does."""
        paced = PacedSession(session, self._tool_s)
        if self._server is None:
            played = self._pool.play(task, paced, alone, clock=paced)
            return _with_note(await self._in_time(paced, played), UNASKED)
        await self._server.start()
        served = ServedSession(paced.chat, self._most_turns)
        with self._server.serving(served) as key:
            url = SessionUrl(self._server.address, key)
            played = self._pool.play(task, _Counted(session, served), alone, url, paced)
            ended = with_requests(await self._in_time(paced, played), served)
            served.end = ended.end
        return _with_note(ended, UNASKED + AT_URL)

    async def _in_time(self, paced: PacedSession, played: Awaitable[Ended]) -> Ended:
        """The end of a session, which comes at once if its tools take too long."""
        try:
            async with paced:
                return await played
        except TimeoutError:
            if not paced.expired:
                raise
            note = (
                f"it asked for no turn within environment.tool_s = {self._tool_s:g} s after an"
                " answer: a tool, or its own code, took longer"
            )
            model_s = paced.model_s
            return Ended(
                "deadline",
                note=note,
                turns=paced.turns,
                overridden=paced.overridden,
                model_s=model_s,
                other_s=paced.played_s - model_s,
            )


def _with_note(ended: Ended, unasked: str) -> Ended:
    """The end of a session, with a note if it took no turn."""
    quiet = ended.end == "done" and not ended.turns and not ended.note
    return replace(ended, note=unasked) if quiet else ended


def with_requests(ended: Ended, served: ServedSession) -> Ended:
    """The end of a session with its requests, also those at its URL. If the model refused one for
    good, that is why it ended. If its agent failed after a turn that the run cut, its end is
    `length`.

    Raises:
        Exception: the model's side failed at its last request.
    """
    if served.failed is not None:
        raise served.failed
    if served.ended is not None and ended.end in ("done", "env_error", "agent_error"):
        ended = replace(ended, end=end_of(served.ended), note=one_line(str(served.ended)))
    elif served.cut and ended.raised and ended.end in ("env_error", "agent_error"):
        ended = replace(ended, end="length", note=f"{AFTER_CUT}; then: {ended.note}")
    if ended.rewards_at_url is not None:
        try:
            placed = turn_rewards_of(ended.rewards_at_url, served.taken)
        except ValueError as error:
            ended = replace(
                ended, end="reward_error", reward=None, parts={}, note=one_line(str(error))
            )
        else:
            ended = replace(ended, turn_rewards=placed)
    whole = ended.model_s + ended.other_s
    model_s = min(served.model_s, whole)
    return replace(
        ended,
        turns=served.turns,
        overridden=ended.overridden + served.overridden.total(),
        model_s=model_s,
        other_s=whole - model_s,
        rewards_at_url=None,
    )
