"""Runs one session of an environment, and says how it ended."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, cast

import asyncrl
from asyncrl.environments.model import ChatSession, Model, SessionUrl
from asyncrl.environments.results import NOTHING, EnvironmentResult, result_of
from asyncrl.runtime.functions import one_line, text_of
from asyncrl.sessions.answers import (
    ContextTooLongError as ContextTooLongError,
    SessionClosedError,
    TurnDeadlineError,
    TurnsExceededError as TurnsExceededError,
)
from asyncrl.sessions.counted_session import CountedSession

logger = logging.getLogger(__name__)

End: TypeAlias = Literal[
    "done", "length", "turns", "deadline", "agent_error", "env_error", "reward_error", "closed"
]
"""How a session ends. `length`: no room is left in the context. `turns`, `deadline`: a limit was
reached. `agent_error`: its agent program failed. `env_error`: the environment raised, blocked or
ended its process. `reward_error`: it gave no valid reward. `closed`: the run ended it."""

HOME = str(Path(asyncrl.__file__).parent) + "/"
CLOSE_S = 3.0
"""Seconds that a game's `close` may take."""


class Game(Protocol):
    """An environment whose loop is asyncrl's. There is one object for each session. It may have a
    method `close`, which is called at the session's end, however that comes."""

    def reset(self, task: Mapping[str, Any]) -> object:
        """The first messages: a text for one user message, or a list of messages."""
        ...

    def step(self, message: Mapping[str, Any]) -> object:
        """What follows an answer: (messages or text, reward so far or None, whether it is over)."""
        ...


Solve: TypeAlias = Callable[[Mapping[str, Any], Model], Awaitable[object]]
Environment: TypeAlias = "Solve | Callable[[], Game]"
"""An async function of a task and the model, or a class of games."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What ends a session."""

    turns: int = 1000
    deadline_s: float = math.inf
    """Seconds of the session, tools included."""


class AgentFailedError(RuntimeError):
    """An environment raises it to say that its agent failed, and not the environment itself."""


class RewardFailedError(RuntimeError):
    """An environment raises it to say that it could not compute the reward."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a session."""

    end: End
    reward: float | None = None
    """The environment's reward. None: it gave none, so reward functions give it."""
    parts: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    """One line about an error, with its location in the environment's code."""
    turns: int = 0
    overridden: int = 0
    """Arguments of requests that had no effect."""
    model_s: float = 0.0
    """Seconds in which the session waited for the model."""
    other_s: float = 0.0
    """The other seconds of the session: tools and the environment's own code."""
    output: str = ""
    """A text that the environment returned, for reward functions."""
    turn_rewards: Sequence[tuple[int, float]] = ()
    """Pairs of a turn's node in its session and its reward, for the turns that got one."""
    rewards_at_url: Sequence[float | None] | None = None
    """Rewards of the turns that were taken at the URL, which are not placed yet."""
    raised: bool = False
    """Whether the environment or its agent raised an error of its own."""


async def run_session(
    environment: Environment,
    task: Mapping[str, Any],
    session: ChatSession,
    limits: Limits,
    arguments: Mapping[str, object] | None = None,
    url: SessionUrl | None = None,
) -> Ended:
    """Run a session to its end.

    Args:
        task: the columns of the prompt's row.
        session: answers the requests of the environment.
        arguments: further keyword arguments of the function, or of the class of games.
        url: where the session is served, if it is.

    Raises:
        Exception: whatever error of the model's side reaches the session's end, such as a dead
            engine. The environment has no part in it, so the session should begin again.
    """
    course = _Course(session, limits, url)
    work = _run(environment, task, course, arguments or {})
    result: object = None
    failure: Exception | None = None
    try:
        result = await _within(limits.deadline_s, work)
    except _OverdueError:
        return course.ended("deadline", f"it was not over after {limits.deadline_s:g} s")
    except (TurnsExceededError, ContextTooLongError, SessionClosedError) as error:
        return course.refused(error)
    except Exception as error:  # the environment is a user's code, and may raise anything
        failure = error
    return course.returned(result) if failure is None else course.failed(failure)


class _Course:
    """The course of one session: what it has taken so far, and how it ends."""

    def __init__(self, session: ChatSession, limits: Limits, url: SessionUrl | None) -> None:
        self._clock = asyncio.get_running_loop().time
        self._began = self._clock()
        self._watched = CountedSession(
            lambda request, _: session.chat(request), limits.turns, self._clock
        )
        self._at_url = url is not None
        self.model = Model(self._watched, url=url)
        self.reward: object = None
        """What a game has given so far."""

    def returned(self, result: object) -> Ended:
        """The end of a session whose environment returned."""
        self._raise_failure_of_model()
        ended = self._watched.ended
        # An environment may catch what ended it, and give a reward for what was reached.
        if ended is None:
            return self._rewarded("done", "", result)
        return self._rewarded(end_of(ended), str(ended), result)

    def refused(self, error: Exception) -> Ended:
        """The end of a session whose environment raised the model's refusal. A game has given a
        reward."""
        return self._rewarded(end_of(error), str(error), self.reward)

    def failed(self, error: Exception) -> Ended:
        """The end of a session whose environment raised an error."""
        self._raise_failure_of_model()
        ended = self._watched.ended
        if ended is not None and _comes_from(error, ended):
            return self.ended(end_of(ended), str(ended))
        return replace(self.ended(_blamed(error), _located(error)), raised=True)

    def _raise_failure_of_model(self) -> None:
        if self._watched.failed is not None:
            raise self._watched.failed

    def _rewarded(self, end: End, note: str, result: object) -> Ended:
        """The end of a session whose environment gave this."""
        # Turns that were taken at the URL are known to those who serve it.
        taken = None if self._at_url else self._watched.taken
        try:
            return self.ended(end, note, result_of(result, taken))
        except Exception as nonsense:  # a value of any class
            return self.ended("reward_error", _located(nonsense))

    def ended(self, end: End, note: str = "", given: EnvironmentResult = NOTHING) -> Ended:
        """The end, with what the session took."""
        whole_s = self._clock() - self._began
        model_s = min(self._watched.model_s, whole_s)
        return Ended(
            end,
            given.reward,
            given.parts,
            note,
            self._watched.turns,
            self.model.overridden.total(),
            model_s,
            whole_s - model_s,
            given.output,
            given.turns,
            given.turns_at_url,
        )


class _OverdueError(Exception):
    """A session was not over in time."""


async def _within(deadline_s: float, work: Awaitable[object]) -> object:
    """The result of `work`. Raises _OverdueError after the deadline, even if `work` catches that it
    is canceled."""
    try:
        async with asyncio.timeout(None if math.isinf(deadline_s) else deadline_s) as timeout:
            result = await work
    except TimeoutError:
        if timeout.expired():
            raise _OverdueError from None
        raise
    if timeout.expired():
        raise _OverdueError
    return result


def _comes_from(error: BaseException, cause: BaseException) -> bool:
    """Whether an error is the cause, has it among its own, or was raised because of it."""
    seen: list[BaseException] = []
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is cause:
            return True
        if one is not None and not any(one is other for other in seen):
            seen.append(one)
            left += one.exceptions if isinstance(one, BaseExceptionGroup) else ()
            left += [one.__cause__, one.__context__]
    return False


def _blamed(error: BaseException) -> End:
    """The end of a session whose environment raised an error of its own."""
    if isinstance(error, BaseExceptionGroup):
        causes = {_blamed(one) for one in error.exceptions}
        return causes.pop() if len(causes) == 1 else "env_error"
    if isinstance(error, AgentFailedError):
        return "agent_error"
    return "reward_error" if isinstance(error, RewardFailedError) else "env_error"


def end_of(error: BaseException) -> End:
    """How a session ended whose request the model refused with this error."""
    if isinstance(error, TurnsExceededError):
        return "turns"
    if isinstance(error, TurnDeadlineError):
        return "deadline"
    return "length" if isinstance(error, ContextTooLongError) else "closed"


async def _run(
    environment: Environment,
    task: Mapping[str, Any],
    course: _Course,
    arguments: Mapping[str, object],
) -> object:
    """What the environment returns."""
    if inspect.isclass(environment):
        game = cast("Callable[..., Game]", environment)(**arguments)
        try:
            result = await _play(game, task, course)
        except BaseException:  # a limit, an error of the game, or nobody waits for it any more
            try:
                await _close(game)
            except Exception:  # what ended the session counts
                logger.exception("close() of the environment failed, after another error")
            raise
        await _close(game)
        return result
    solve = cast("Callable[..., Awaitable[object]]", environment)
    return await solve(task, course.model, **arguments)


async def _close(game: Game) -> None:
    """Call the game's `close`, if it has one. Raises TimeoutError after CLOSE_S."""
    close = getattr(game, "close", None)
    if not callable(close):
        return
    try:
        async with asyncio.timeout(CLOSE_S) as limit:
            await _awaited(close())
    except TimeoutError:
        if not limit.expired():
            raise
        raise TimeoutError(f"close() took longer than {CLOSE_S:g} s") from None


async def _play(game: Game, task: Mapping[str, Any], course: _Course) -> object:
    """The last reward of a game."""
    chat = _messages(await _awaited(game.reset(task)))
    while True:
        answer = await course.model.chat.completions.create(messages=chat)
        message = {"content": "", **answer.choices[0].message.model_dump(exclude_none=True)}
        result = await _awaited(game.step(message))
        if not isinstance(result, tuple) or len(result) != 3:
            raise TypeError(f"step returned {str(result)[:80]!r}, not (messages, reward, over)")
        more, reward, over = result
        course.reward = reward
        if over:
            return reward
        chat = [*chat, message, *_messages(more)]


async def _awaited(value: object) -> object:
    return await value if inspect.isawaitable(value) else value


def _messages(given: object) -> list[Any]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if isinstance(given, Sequence) and given and all(isinstance(one, Mapping) for one in given):
        return list(given)
    raise TypeError(f"{str(given)[:80]!r} is neither a text nor a list of messages")


def _located(error: BaseException) -> str:
    """The error on one line, with the innermost line of code outside asyncrl."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(HOME) and "/asyncio/" not in frame.filename
    ]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    text = one_line(text_of(str, error))[:300]
    # An environment says that its agent or its reward failed. Then the end has the kind.
    said = isinstance(error, AgentFailedError | RewardFailedError)
    return one_line(f"{text if said and text else f'{type(error).__name__}: {text}'}{where}")
