"""The reward contract, and the call that enforces it. Runs in a reward process, so it imports
nothing heavy.

    def reward(prompts, completions, completion_ids, finish_reason, truncated, **columns)

is called once per group. Every argument is a list of n items, one per trajectory. With
`algorithm.advantage: remax`, the last item is the group's greedy completion:

prompts          the prompt as the model saw it, n times
completions      the texts
completion_ids   their token ids
finish_reason    "stop", "length", "repetition" or "abort"
truncated        whether the completion was cut off (finish_reason length or repetition)
answer_texts     the texts without their reasoning, by the model's own turn format; None where
                 nothing else came. Only for a function that names it
answer_ended     whether the completion ended by itself (finish_reason stop, or unknown). Only for a
                 function that names it
shared_arguments names of the entries of `arguments`, which are no lists of n items. Only for a
                 function that names it
messages         the chat messages that the template rendered, as the dataset has them; only where
                 a template was applied
session_messages with an environment, each trajectory's messages with all its turns. `completions`
                 are then the texts of the last turns
session_end      with an environment, how each session ended: "done", "turns", …
session_reward   with an environment, the reward that it returned for each session, or None
session_parts    with an environment, a dict of the other values that it returned
session_output   with an environment, a text that it returned, or "": what an agent program wrote
anything else    a column of the dataset, n times, or an entry of the function's `arguments`,
                 unchanged

A function without `**columns` gets only the arguments that its parameters name. It may be `async`.

It returns one of
- a list of n rewards: a finite number each, or None for a trajectory that cannot be scored;
- a dict of named parts, each such a list. The entry `reward` is the reward, and the others are only
  reported. Without that entry, the reward is the sum of the parts, and None where a part is None.
  A part `unscored_REASON` says which trajectories it could not score for that reason: 1, else 0;
- only with `per_token: true` in the config: a list of n lists with a finite number per completion
  token. None replaces the list of a trajectory that cannot be scored. A trajectory's reward is the
  sum. Under `algorithm.advantage: gae`, each token has its own reward.

Anything else breaks the contract.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import math
import numbers
import re
import traceback
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence, Set, Sized
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from asyncrl.rewards.missing_key import missing_column
from asyncrl.runtime import functions
from asyncrl.runtime.functions import (
    FunctionError,
    chosen_arguments,
    did_you_mean,
    import_function,
    location_of,
    near_module,
    parameter_names,
    refuse_main,
    short,
    text_of,
)
from asyncrl.runtime.single_precision import FLOAT32_MAX
from asyncrl.text.answer import AnswerFormat, AnswerReader

CALLERS = {str(Path(__file__)), str(Path(__file__).with_name("process.py")), functions.__file__}
"""Files whose frames precede those of the reward in a traceback."""
MOST_FRAMES = 12
"""Frames of a traceback that are kept, from the innermost."""
ON_REQUEST = ("answer_texts", "answer_ended", "shared_arguments")
"""Arguments for functions that name them. No column of the data replaces them."""
UNSCORED_REASON = "unscored_"
"""Beginning of the names of parts that say why there is no reward."""
ENDED = "stop"
"""Finish reason of a completion that ended by itself."""
TOTAL = "reward"
"""Key of the reward in a dict that a function returns."""


class RewardError(Exception):
    """A reward function raised, hung, died or broke its contract. The message names the function
    and the cause."""


class ContractError(RewardError):
    """A reward function returned something that the contract does not allow."""


@dataclass(frozen=True, slots=True)
class ScoredSession:
    """What reward functions get of a session."""

    messages: Sequence[Mapping[str, object]] = ()
    end: str = "done"
    given: float | None = None
    """The reward that the environment returned. None: it returned no reward."""
    parts: Mapping[str, float] = field(default_factory=dict)
    output: str = ""
    """A text that it returned, such as what an agent program wrote."""


@dataclass(frozen=True, slots=True)
class GroupCall:
    """The input of reward functions: one group of n trajectories."""

    prompts: Sequence[str]
    completions: Sequence[str]
    completion_ids: Sequence[Sequence[int]]
    columns: Mapping[str, object] = field(default_factory=dict)
    """Dataset columns of the group's prompt, one value each."""
    finish_reasons: Sequence[str] = ()
    """Why each completion ended; empty = unknown, for texts from another source."""
    truncated: Sequence[bool] = ()
    """Whether each completion was cut off; empty if `finish_reasons` is empty."""
    sessions: Sequence[ScoredSession] | None = None
    """With an environment, one for each trajectory."""


@dataclass(frozen=True, slots=True)
class FunctionRewards:
    """The rewards of one function for one group of n trajectories."""

    rewards: list[float | None]
    parts: dict[str, list[float | None]] = field(default_factory=dict)
    """The named parts that the function returned, n values each."""
    tokens: list[list[float] | None] | None = None
    """For a function with per_token: one list per trajectory, whose sum is its reward. None for an
    unscored trajectory."""


def find_reward(function: str) -> None:
    """Look for the package of `package.module:function`, without running it. Looking for a module
    in the package would run the package.

    Raises:
        RewardError: There is no such package.
    """
    module = re.split("[.:]", function)[0]
    try:
        refuse_main("reward function", function)
    except FunctionError as error:
        raise RewardError(str(error)) from None
    try:
        missing = importlib.util.find_spec(module) is None
    except (ImportError, ValueError) as error:
        raise RewardError(
            f"reward function {function!r} cannot be imported ({error}); check its name and that"
            " its package is installed"
        ) from None
    if missing:
        raise RewardError(
            f"reward function {function!r}: there is no module {module!r}; start in its folder, or"
            f" install its package{near_module(module)}"
        )


def import_reward(function: str) -> Callable[..., object]:
    """The function that `package.module:function` names.

    Raises:
        RewardError: The function cannot be imported, or is not callable.
    """
    try:
        return import_function("reward function", function)
    except FunctionError as error:
        raise RewardError(str(error)) from None


def call_reward(
    function: str,
    call: GroupCall,
    arguments: Mapping[str, object] | None = None,
    per_token: bool = False,
    answers: AnswerReader | None = None,
) -> FunctionRewards:
    """Call one reward function for one group, in this process and without a deadline.

    Raises:
        RewardError: The function raised.
        ContractError: It returned something that the contract does not allow.
    """
    reward = import_reward(function)
    try:
        values = reward(**keyword_arguments(reward, call, arguments or {}, answers))
        if inspect.isawaitable(values):
            values = asyncio.run(_wait_for(values))
    except Exception as error:
        raise failed(function, error, call, arguments or {}) from None
    return check_rewards(function, values, call, per_token)


async def _wait_for(values: Awaitable[object]) -> object:
    return await values


def keyword_arguments(
    reward: Callable[..., object],
    call: GroupCall,
    arguments: Mapping[str, object],
    answers: AnswerReader | None = None,
) -> dict[str, object]:
    """The available arguments for a group that the function's parameters accept. Dataset columns
    override `truncated` and `finish_reason`, and `arguments` overrides both.

    Args:
        answers: finds the answers of the model's completions. None: their texts show them.

    Raises:
        TypeError: The function requires an argument that is not available.
    """
    n = len(call.completions)
    available: dict[str, object] = {}
    if call.finish_reasons:
        available |= {"finish_reason": list(call.finish_reasons), "truncated": list(call.truncated)}
    available |= {name: [value] * n for name, value in call.columns.items()}
    available |= arguments
    if call.sessions is not None:
        available |= {
            "session_messages": [list(session.messages) for session in call.sessions],
            "session_end": [session.end for session in call.sessions],
            "session_reward": [session.given for session in call.sessions],
            "session_parts": [dict(session.parts) for session in call.sessions],
            "session_output": [session.output for session in call.sessions],
        }
    available |= {
        "prompts": list(call.prompts),
        "completions": list(call.completions),
        "completion_ids": [list(ids) for ids in call.completion_ids],
    }
    if named := parameter_names(reward) & {*ON_REQUEST}:
        found: dict[str, Callable[[], object]] = {
            "answer_texts": partial(_answers, call, answers or AnswerReader(AnswerFormat())),
            "answer_ended": partial(_ended, call),
            "shared_arguments": lambda: sorted(arguments),
        }
        available |= {name: found[name]() for name in named}
    return chosen_arguments(
        reward, available, "no column of the data and no entry of its arguments provides"
    )


def row_of(
    columns: Mapping[str, object], index: int, count: int, shared: Collection[str] = ()
) -> dict[str, object]:
    """One trajectory's values of the arguments that a function got for `count` trajectories.

    Args:
        shared: those that are the same for all (`shared_arguments`). Another one is the same for
            all unless it is a list of `count` items.
    """
    return {
        name: values[index]
        if isinstance(values, list | tuple) and len(values) == count and name not in shared
        else values
        for name, values in columns.items()
    }


def _answers(call: GroupCall, reader: AnswerReader) -> list[str | None]:
    """The answer part of each completion."""
    if call.sessions is not None:
        return [
            reader.of_session(prompt, text, session.messages[-1] if session.messages else {})
            for prompt, text, session in zip(
                call.prompts, call.completions, call.sessions, strict=True
            )
        ]
    return list(map(reader.of_completion, call.prompts, call.completion_ids, call.completions))


def _ended(call: GroupCall) -> list[bool]:
    """Whether each completion ended by itself."""
    return [reason == ENDED for reason in call.finish_reasons or [ENDED] * len(call.completions)]


def failed(
    function: str, error: BaseException, call: GroupCall, arguments: Mapping[str, object]
) -> RewardError:
    """The RewardError for an exception of a reward function, with the function's name and the line
    that raised, and the columns if it did not find one. Its note is the traceback, from the
    function on. A RewardError stays as it is."""
    if isinstance(error, RewardError):  # of a built-in function, which refuses its input
        return error
    if isinstance(error, MemoryError):
        return RewardError(
            f"reward function {function!r} needs more memory than reward.memory_bytes allows;"
            " raise that, or free unused memory"
        )
    wrapped = RewardError(
        f"reward function {function!r} raised {type(error).__name__}:"
        f" {text_of(str, error)}{location_of(_frames(error))}{_columns(error, call, arguments)}"
    )
    if frames := _frames(error):
        wrapped.add_note(
            "".join(
                [
                    "Traceback (most recent call last):\n",
                    *traceback.format_list(frames[-MOST_FRAMES:]),
                ]
            ).rstrip()
        )
    return wrapped


def _columns(error: BaseException, call: GroupCall, arguments: Mapping[str, object]) -> str:
    """The columns and arguments, for a function that did not find one of them; else ""."""
    names = sorted(keyword_arguments(_any_arguments, call, arguments))
    if (missing := missing_column(error, call.columns, names)) is None:
        return ""
    looked = "" if isinstance(error, KeyError) else f"; it looked for {text_of(repr, missing)}"
    columns = ", ".join(sorted(call.columns)) or "none"
    near = did_you_mean(missing, names)
    return f"{looked}; columns of the data: {columns}; all arguments: {', '.join(names)}{near}"


def _any_arguments(**_: object) -> None: ...


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of the traceback, from the reward function on."""
    frames = list(traceback.extract_tb(error.__traceback__))
    ours = [index for index, frame in enumerate(frames) if frame.filename in CALLERS]
    return frames[ours[-1] + 1 :] if ours else frames


def with_notes(error: BaseException) -> str:
    """The message and its notes, such as the traceback of a reward that raised."""
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def check_rewards(
    function: str, values: object, call: GroupCall, per_token: bool = False
) -> FunctionRewards:
    """The rewards that a function returned for this group, as floats and None.

    Raises:
        ContractError: The contract does not allow `values`.
    """
    try:
        return _checked(function, values, call, per_token)
    except ContractError:
        raise
    except Exception as error:
        # Reading the user's own objects can raise any exception.
        why = f"{type(error).__name__}: {text_of(str, error)}"
        raise ContractError(
            f"reward function {function!r} returned a {type(values).__name__} that cannot be read"
            f" ({why}); return floats or None"
        ) from None


def _checked(function: str, values: object, call: GroupCall, per_token: bool) -> FunctionRewards:
    n = len(call.completions)
    if per_token:
        return _check_tokens(function, values, call)
    if hasattr(values, "tolist"):  # an array or a tensor
        values = values.tolist()
    if not isinstance(values, Mapping):
        return FunctionRewards(_check_list(function, values, n))
    if not values or not all(
        isinstance(name, str) and name and "/" not in name and name == short(name)
        for name in values
    ):
        raise ContractError(
            f"reward function {function!r} returned a dict with the keys"
            f" {short(repr(list(values)))}; name its parts with short strings without '/'"
        )
    parts = {
        name: _check_list(f"{function}, part {name}", some, n) for name, some in values.items()
    }
    total = parts.pop(TOTAL, None)
    if total is None:
        total = _check_list(
            f"{function}, sum of parts",
            [None if None in row else sum(row) for row in zip(*parts.values(), strict=True)],
            n,
        )
    return FunctionRewards(total, parts)


def _check_tokens(function: str, values: object, call: GroupCall) -> FunctionRewards:
    trajectories = _check_length(
        function, values, len(call.completions), "lists of floats, or None (per_token: true)"
    )
    tokens: list[list[float] | None] = []
    for index, (given, ids) in enumerate(zip(trajectories, call.completion_ids, strict=True)):
        if given is None:
            tokens.append(None)
            continue
        per_token = _check_length(
            f"{function}, trajectory {index}", given, len(ids), "floats, one per token"
        )
        checked = [
            _check_value(f"{function}, trajectory {index}", value, token)
            for token, value in enumerate(per_token)
        ]
        if None in checked:
            raise ContractError(
                f"reward function {function!r} returned None for a token of trajectory {index};"
                " return None for the trajectory, or a number"
            )
        tokens.append([value for value in checked if value is not None])
    return FunctionRewards(
        _check_list(
            f"{function}, sum of tokens",
            [None if some is None else finite_sum(some) for some in tokens],
            len(tokens),
        ),
        tokens=tokens,
    )


def finite_sum(values: Iterable[float]) -> float:
    """The exact sum; infinity if it does not fit a float."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # ValueError: inf plus -inf
        return math.inf


def _check_list(function: str, values: object, n: int) -> list[float | None]:
    checked = _check_length(function, values, n, "floats or None")
    return [_check_value(function, value, index) for index, value in enumerate(checked)]


def _check_length(function: str, values: object, n: int, wanted: str) -> Iterable[object]:
    """Return `values`. Raises ContractError if it is not an ordered collection of n items."""
    if (
        isinstance(values, str | bytes | Mapping | Set)
        or not isinstance(values, Sized)
        or not isinstance(values, Iterable)
    ):
        raise ContractError(
            f"reward function {function!r} returned {type(values).__name__}; return a list of {n}"
            f" {wanted}"
        )
    if len(values) != n:
        what = "tokens" if wanted.endswith("token") else "completions"
        raise ContractError(
            f"reward function {function!r} returned {len(values)} rewards for {n} {what}; return"
            " one for each"
        )
    return values


def _check_value(function: str, value: object, index: int) -> float | None:
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # a number from numpy or torch
        value = value.item()
    if value is None:
        return None
    if not isinstance(value, numbers.Real):
        fix = (
            "return a float or None (one per token needs per_token: true)"
            if isinstance(value, list | tuple)
            else "return a float or None"
        )
        raise ContractError(
            f"reward function {function!r} returned {text_of(repr, value)} ({type(value).__name__})"
            f" at index {index}; {fix}"
        )
    try:
        number = float(value)
    except OverflowError:  # an integer above any float
        number = math.inf
    if not abs(number) <= FLOAT32_MAX:
        raise ContractError(
            f"reward function {function!r} returned {text_of(repr, value)} at index {index}; return"
            " a finite number, or None if it cannot be scored"
        )
    return number
