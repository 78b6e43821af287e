"""Runs one attempt of an environment at a task, and says how it ended."""

from __future__ import annotations

import asyncio
import inspect
import math
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, cast

import asyncrl
from asyncrl.environments.model import ChatSession, Model
from asyncrl.runtime.functions import short, text_of
from asyncrl.runtime.single_precision import FLOAT32_MAX
from asyncrl.sessions.answers import Answer, ContextTooLongError, SessionClosedError
from asyncrl.text.template import Message, MessagesError, Schema

__all__ = ["End", "Ended", "Environment", "Game", "Limits", "attempt"]

End: TypeAlias = Literal["done", "length", "turns", "deadline", "env_error", "closed"]
"""How an attempt ends. `length`: no room is left in the context. `turns`, `deadline`: a limit was
reached. `env_error`: the environment raised, or returned nonsense. `closed`: the run ended it."""

HOME = str(Path(asyncrl.__file__).parent) + "/"
REWARD = "reward"
TURNS = "turns"
"""The keys of the reward and of the turns' rewards in a dict that an environment returns. Other
keys are its parts."""


class Game(Protocol):
    """An environment whose loop is asyncrl's. There is one object for each attempt."""

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
    """What ends an attempt."""

    turns: int = 1000
    deadline_s: float = math.inf
    """Seconds of the attempt, tools included."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of an attempt."""

    end: End
    reward: float | None = None
    """None: the environment gave none, so reward functions give it."""
    parts: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    """One line about an error, with its place in the environment's code."""
    turns: int = 0
    overridden: int = 0
    """Arguments of requests that had no effect."""
    model_s: float = 0.0
    """Seconds in which the attempt waited for the model."""
    other_s: float = 0.0
    """The other seconds of the attempt: tools and the environment's own code."""
    turn_rewards: Sequence[tuple[int, float]] = ()
    """Pairs of a turn's node in its session and its reward, for the turns that got one."""


@dataclass(frozen=True, slots=True)
class _Rewards:
    """What an environment has returned."""

    reward: float | None
    parts: Mapping[str, float]
    turns: Sequence[tuple[int, float]]


NO_REWARDS = _Rewards(None, {}, ())


class _TurnsError(RuntimeError):
    """An attempt asked for more turns than it may take."""


class _Watched:
    """A session that counts turns and the time that they take."""

    def __init__(self, session: ChatSession, turns: int) -> None:
        self._session, self._most = session, turns
        self.turns, self.model_s = 0, 0.0
        self.ended: BaseException | None = None
        """Why the model refused a request for good. An environment may catch the exception."""
        self.failed: Exception | None = None
        """The error of the model's side at the last request. An environment may catch it, too."""
        self._failed_after = 0
        """Requests that were made when that error came. Only a later one shows that it is over."""
        self.reward: object = None
        """What a game has given so far."""
        self._answered: dict[int, tuple[int, ...]] = {}
        """Number of each request with an answer → the nodes of its choices."""

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Schema] | None = None,
        n: int = 1,
        max_tokens: int | None = None,
        key: str | None = None,
    ) -> list[Answer]:
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            if self.turns >= self._most:
                raise _TurnsError(f"the attempt has taken its {self._most} turns")
            self.turns += 1
            began_as = self.turns
            # A copy: games may use one dict for all their messages.
            chat = [dict(message) for message in messages]
            answers = await self._session.chat(chat, tools, n, max_tokens, key)
            self._answered[began_as] = tuple(answer.node for answer in answers)
            if began_as > self._failed_after:
                self.failed = None
            if isinstance(self.ended, ContextTooLongError):
                self.ended = None  # it has made its chat shorter
            return answers
        except (_TurnsError, ContextTooLongError, SessionClosedError) as error:
            self.ended = error
            raise
        except MessagesError:  # what the environment asked
            raise
        except Exception as error:
            self.failed, self._failed_after = error, self.turns
            raise
        finally:
            self.model_s += clock() - began

    @property
    def taken(self) -> list[tuple[int, ...]]:
        """The nodes of each turn that the environment got, in the order of its requests. An answer
        that it got twice, because it asked again, is one turn."""
        return list(dict.fromkeys(nodes for _, nodes in sorted(self._answered.items())))


async def attempt(
    environment: Environment,
    task: Mapping[str, Any],
    session: ChatSession,
    limits: Limits,
    arguments: Mapping[str, object] | None = None,
) -> Ended:
    """Run an attempt to its end.

    Args:
        task: the columns of the prompt's row.
        arguments: further keyword arguments of the function, or of the class of games.

    Raises:
        Exception: whatever error of the model's side reaches the attempt's end, such as a dead
            engine. The environment has no part in it, so the attempt should be made again.
    """
    clock = asyncio.get_running_loop().time
    watched, began = _Watched(session, limits.turns), clock()
    model = Model(watched)

    failure: Exception | None = None

    def ended(end: End, note: str = "", given: _Rewards = NO_REWARDS) -> Ended:
        model_s = min(watched.model_s, clock() - began)
        other_s = clock() - began - model_s
        overridden = model.overridden.total()
        return Ended(
            end,
            given.reward,
            given.parts,
            note,
            watched.turns,
            overridden,
            model_s,
            other_s,
            given.turns,
        )

    try:
        deadline = None if math.isinf(limits.deadline_s) else limits.deadline_s
        async with asyncio.timeout(deadline) as timeout:
            result = await _run(environment, task, model, watched, arguments or {})
        if timeout.expired():  # and the environment has caught that
            raise TimeoutError
        given = _rewards(result, watched.taken)
    except TimeoutError as error:
        if timeout.expired():
            return ended("deadline", f"it was not over after {limits.deadline_s:g} s")
        failure = error
    except (_TurnsError, ContextTooLongError, SessionClosedError) as error:
        try:
            return ended(_end_of(error), str(error), _rewards(watched.reward, watched.taken))
        except Exception as nonsense:  # what the game has given
            failure = nonsense
    except Exception as error:  # the environment is a user's code, and may raise anything
        failure = error
    if watched.failed is not None:
        raise watched.failed
    if failure is not None:
        if watched.ended is not None and _comes_from(failure, watched.ended):
            return ended(_end_of(watched.ended), str(watched.ended))
        return ended("env_error", _place(failure))
    # An environment may catch what ended it, and give a reward for what was reached.
    return ended("done" if watched.ended is None else _end_of(watched.ended), given=given)


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


def _end_of(error: BaseException) -> End:
    if isinstance(error, _TurnsError):
        return "turns"
    return "length" if isinstance(error, ContextTooLongError) else "closed"


async def _run(
    environment: Environment,
    task: Mapping[str, Any],
    model: Model,
    watched: _Watched,
    arguments: Mapping[str, object],
) -> object:
    if not inspect.isclass(environment):
        return await cast("Callable[..., Awaitable[object]]", environment)(task, model, **arguments)
    game = cast("Callable[..., Game]", environment)(**arguments)
    chat = _messages(await _awaited(game.reset(task)))
    while True:
        answer = await model.chat.completions.create(messages=chat)
        message = {"content": "", **answer.choices[0].message.model_dump(exclude_none=True)}
        result = await _awaited(game.step(message))
        if not isinstance(result, tuple) or len(result) != 3:
            raise TypeError(f"step returned {str(result)[:80]!r}, not (messages, reward, over)")
        more, reward, over = result
        watched.reward = reward
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


def _rewards(result: object, taken: Sequence[Sequence[int]]) -> _Rewards:
    """What an environment returned: the reward, its parts, and rewards of the turns taken, each of
    which has these nodes."""
    if result is None:
        return NO_REWARDS
    values = dict(result) if isinstance(result, Mapping) else {REWARD: result}
    turns = _turn_rewards(values.pop(TURNS), taken) if TURNS in values else ()
    for name in values:
        if not isinstance(name, str) or not name or "/" in name or name != short(name):
            raise TypeError(f"{str(name)[:80]!r} is no name of a reward: a short text without '/'")
    found = {name: _number(name, value) for name, value in values.items()}
    reward = found.pop(REWARD, None)
    return _Rewards(reward, found, turns)


def _turn_rewards(given: object, taken: Sequence[Sequence[int]]) -> list[tuple[int, float]]:
    """The reward of each node of the turns that have one."""
    plain = given.tolist() if hasattr(given, "tolist") else given  # of numpy or torch
    if not isinstance(plain, Sequence) or isinstance(plain, str | bytes):
        raise TypeError(
            f"{TURNS} is {text_of(str, given)[:80]!r} ({type(given).__name__}), not a list with a"
            " number or None for each turn"
        )
    if len(plain) != len(taken):
        raise ValueError(
            f"{TURNS} has {len(plain)} rewards, and the session took {len(taken)} turns; give a"
            " number or None for each turn, in their order"
        )
    return [
        (node, _number(f"{TURNS}[{place}]", value))
        for place, (nodes, value) in enumerate(zip(taken, plain, strict=True))
        if value is not None
        for node in nodes
    ]


def _number(name: str, value: object) -> float:
    plain = value.item() if hasattr(value, "item") else value  # of numpy or torch
    if isinstance(plain, bool | int | float) and abs(plain) <= FLOAT32_MAX:
        return float(plain)
    raise TypeError(
        f"{name} is {text_of(str, value)[:80]!r} ({type(value).__name__}), not a finite number"
    )


def _place(error: BaseException) -> str:
    """The error on one line, with the last place in code outside asyncrl."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(HOME) and "/asyncio/" not in frame.filename
    ]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    text = " ".join(text_of(str, error).split())[:300]
    return short(f"{type(error).__name__}: {text}{where}")
