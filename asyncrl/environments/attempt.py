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
from asyncrl.environments.model import ChatSession, Model, SessionUrl
from asyncrl.runtime.functions import short, text_of
from asyncrl.runtime.single_precision import FLOAT32_MAX
from asyncrl.sessions.answers import (
    ContextTooLongError,
    SessionClosedError,
    TurnDeadlineError,
    TurnsExceededError,
)
from asyncrl.sessions.watched import Watched

__all__ = [
    "AgentFailedError",
    "End",
    "Ended",
    "Environment",
    "Game",
    "Limits",
    "RewardFailedError",
    "attempt",
    "end_of",
    "turn_rewards_of",
]

End: TypeAlias = Literal[
    "done", "length", "turns", "deadline", "agent_error", "env_error", "reward_error", "closed"
]
"""How an attempt ends. `length`: no room is left in the context. `turns`, `deadline`: a limit was
reached. `agent_error`: its agent program failed. `env_error`: the environment raised, blocked or
ended its process. `reward_error`: it gave no valid reward. `closed`: the run ended it."""

HOME = str(Path(asyncrl.__file__).parent) + "/"
REWARD = "reward"
TURNS = "turns"
"""The keys of the reward and of the turns' rewards in a dict that an environment returns. Other
keys are its parts."""
OUTPUT = "output"
"""The key of a text that reward functions get."""
MOST_OUTPUT = 1 << 16
"""Characters of that text that are kept, from its end."""


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


class AgentFailedError(RuntimeError):
    """An environment raises it to say that its agent failed, and not the environment itself."""


class RewardFailedError(RuntimeError):
    """An environment raises it to say that it could not compute the reward."""


@dataclass(frozen=True, slots=True)
class Given:
    """What an environment returned."""

    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    output: str = ""
    turns: Sequence[tuple[int, float]] = ()
    """Pairs of a turn's node and its reward."""
    turns_at_url: Sequence[float | None] | None = None
    """The same for turns that were taken at the URL: one item for each."""


NOTHING = Given()


@dataclass(slots=True)
class Progress:
    """What a game has given so far."""

    reward: object = None


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
    output: str = ""
    """A text that the environment returned, for reward functions."""
    turn_rewards: Sequence[tuple[int, float]] = ()
    """Pairs of a turn's node in its session and its reward, for the turns that got one."""
    rewards_at_url: Sequence[float | None] | None = None
    """Rewards of the turns that were taken at the URL, which are not placed yet."""


async def attempt(
    environment: Environment,
    task: Mapping[str, Any],
    session: ChatSession,
    limits: Limits,
    arguments: Mapping[str, object] | None = None,
    url: SessionUrl | None = None,
) -> Ended:
    """Run an attempt to its end.

    Args:
        task: the columns of the prompt's row.
        arguments: further keyword arguments of the function, or of the class of games.
        url: where its session is served, if it is.

    Raises:
        Exception: whatever error of the model's side reaches the attempt's end, such as a dead
            engine. The environment has no part in it, so the attempt should be made again.
    """
    clock = asyncio.get_running_loop().time
    watched = Watched(lambda request, _: session.chat(request), limits.turns, clock)
    progress, began = Progress(), clock()
    model = Model(watched, url=url)

    failure: Exception | None = None

    def ended(end: End, note: str = "", given: Given = NOTHING) -> Ended:
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
            given.output,
            given.turns,
            given.turns_at_url,
        )

    try:
        deadline = None if math.isinf(limits.deadline_s) else limits.deadline_s
        async with asyncio.timeout(deadline) as timeout:
            result = await _run(environment, task, model, progress, arguments or {})
        if timeout.expired():  # and the environment has caught that
            raise TimeoutError
    except TimeoutError as error:
        if timeout.expired():
            return ended("deadline", f"it was not over after {limits.deadline_s:g} s")
        failure = error
    except (TurnsExceededError, ContextTooLongError, SessionClosedError) as error:
        try:
            taken = watched.taken if url is None else None
            return ended(end_of(error), str(error), _given(progress.reward, taken))
        except Exception as nonsense:  # what the game has given
            return ended("reward_error", _place(nonsense))
    except Exception as error:  # the environment is a user's code, and may raise anything
        failure = error
    if watched.failed is not None:
        raise watched.failed
    if failure is not None:
        if watched.ended is not None and _comes_from(failure, watched.ended):
            return ended(end_of(watched.ended), str(watched.ended))
        return ended(_blamed(failure), _place(failure))
    try:
        # Turns that were taken at the URL are known to those who serve it.
        given = _given(result, watched.taken if url is None else None)
    except Exception as nonsense:  # a value of any class
        return ended("reward_error", _place(nonsense))
    # An environment may catch what ended it, and give a reward for what was reached.
    return ended("done" if watched.ended is None else end_of(watched.ended), given=given)


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
    """The end of an attempt that raised an error of its own."""
    if isinstance(error, BaseExceptionGroup):
        causes = {_blamed(one) for one in error.exceptions}
        return causes.pop() if len(causes) == 1 else "env_error"
    if isinstance(error, AgentFailedError):
        return "agent_error"
    return "reward_error" if isinstance(error, RewardFailedError) else "env_error"


def end_of(error: BaseException) -> End:
    """How an attempt ended whose request the model refused with this error."""
    if isinstance(error, TurnsExceededError):
        return "turns"
    if isinstance(error, TurnDeadlineError):
        return "deadline"
    return "length" if isinstance(error, ContextTooLongError) else "closed"


async def _run(
    environment: Environment,
    task: Mapping[str, Any],
    model: Model,
    progress: Progress,
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
        progress.reward = reward
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


def _given(result: object, taken: Sequence[Sequence[int]] | None) -> Given:
    """What an environment returned: the reward, its parts, a text, and rewards of the turns taken,
    each of which has these nodes. None: they were taken elsewhere.

    Raises:
        TypeError, ValueError: it is nonsense.
    """
    if result is None:
        return NOTHING
    values = dict(result) if isinstance(result, Mapping) else {REWARD: result}
    given = _turn_numbers(values.pop(TURNS)) if TURNS in values else None
    turns = () if given is None or taken is None else turn_rewards_of(given, taken)
    output = values.pop(OUTPUT, "")
    if not isinstance(output, str):
        shown = short(text_of(repr, output))
        raise TypeError(f"{OUTPUT} is {shown} ({type(output).__name__}), not a text")
    # Half of a surrogate pair is no text.
    output = output[-MOST_OUTPUT:].encode("utf-8", "backslashreplace").decode()
    for name in values:
        if not isinstance(name, str) or not name or "/" in name or name != short(name):
            raise TypeError(f"{str(name)[:80]!r} is no name of a reward: a short text without '/'")
    found = {name: _number(name, value) for name, value in values.items()}
    at_url = given if taken is None else None
    return Given(found.pop(REWARD, None), found, output, turns, at_url)


def _turn_numbers(given: object) -> list[float | None]:
    """The rewards of turns. Raises TypeError for nonsense."""
    plain = given.tolist() if hasattr(given, "tolist") else given  # of numpy or torch
    if not isinstance(plain, Sequence) or isinstance(plain, str | bytes):
        raise TypeError(
            f"{TURNS} is {text_of(str, given)[:80]!r} ({type(given).__name__}), not a list with a"
            " number or None for each turn"
        )
    return [
        None if value is None else _number(f"{TURNS}[{place}]", value)
        for place, value in enumerate(plain)
    ]


def turn_rewards_of(
    rewards: Sequence[float | None], taken: Sequence[Sequence[int]]
) -> list[tuple[int, float]]:
    """Pairs of a node and its reward.

    Args:
        taken: the nodes of each turn that the agent got.

    Raises:
        ValueError: the rewards are not one for each turn.
    """
    if len(rewards) != len(taken):
        raise ValueError(
            f"{TURNS} has {len(rewards)} rewards, and the session took {len(taken)} turns; give a"
            " number or None for each turn, in their order"
        )
    return [
        (node, value)
        for nodes, value in zip(taken, rewards, strict=True)
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
