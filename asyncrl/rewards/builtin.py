"""Built-in rewards. Each follows the contract of `asyncrl.rewards.contract`."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence

from asyncrl.rewards.final_answer import answers_of, tagged_answer
from asyncrl.runtime.functions import did_you_mean, short
from asyncrl.runtime.single_precision import FLOAT32_MAX

__all__ = [
    "check_builtin",
    "code_tests",
    "environment",
    "exact_match",
    "llm_judge",
    "math_verify",
    "pairwise_judge",
    "printed_reward",
    "reasoning_gym_score",
    "reward_model",
]

SLOW_IMPORTS = {
    "code_tests": "code",
    "reasoning_gym_score": "reasoning",
    "math_verify": "mathematics",
    "llm_judge": "judge",
    "pairwise_judge": "pairwise",
    "reward_model": "reward_model",
}
"""Functions whose packages take long to import → their module. A reward process imports a module
only if the config names its function."""


def exact_match(
    completions: Sequence[str],
    answer: Sequence[str],
    answer_texts: Sequence[str | None] | None = None,
    answer_ended: Sequence[bool] | None = None,
    **_: object,
) -> list[float]:
    """1.0 where the completion without its reasoning equals column `answer`, else 0.0. The text in
    its last `<answer>` tag may equal the column instead. White space around both is ignored."""
    texts = answers_of(completions, answer_texts)
    ended = answer_ended or [True] * len(texts)
    return [
        float(text is not None and str(expected).strip() in _exact(text, done))
        for text, expected, done in zip(texts, answer, ended, strict=True)
    ]


def _exact(text: str, ended: bool) -> tuple[str, ...]:
    """The texts that may equal an answer."""
    return tuple(one.strip() for one in (text, tagged_answer(text, ended)) if one is not None)


def environment(
    session_reward: Sequence[float | None],
    session_parts: Sequence[Mapping[str, float]],
    **_: object,
) -> dict[str, list[float | None]]:
    """The rewards that the environment returned, and the other values that it returned as parts.
    None where it returned none."""
    names = dict.fromkeys(name for parts in session_parts for name in parts)
    return {name: [parts.get(name) for parts in session_parts] for name in names} | {
        "reward": list(session_reward)
    }


MOST_PRINTED = 32
"""Numbers of a printed line that count. A program may write what its model wrote."""


def printed_reward(session_output: Sequence[str], **_: object) -> dict[str, list[float | None]]:
    """The reward on the last line that each session's program printed: a number, or a JSON object
    with `reward`. Its other numbers are parts. None where there is none. A session has the output
    of a program that ended by itself, also after it reached a limit."""
    printed = [_printed(output) for output in session_output]
    names = dict.fromkeys(["reward", *(name for values in printed for name in values)])
    return {name: [values.get(name) for values in printed] for name in names}


def _printed(output: str) -> dict[str, float]:
    """The numbers on the last line that is not empty."""
    lines = [line for line in output.split("\n") if line.strip()]
    try:
        found = json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError):
        return {}
    values = found if isinstance(found, dict) else {"reward": found}
    numbers = {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and abs(value) <= FLOAT32_MAX
        if name and name == short(name) and "/" not in name
    }
    return dict(list(numbers.items())[:MOST_PRINTED])


def check_builtin(function: str, arguments: Mapping[str, object], deadline_s: float) -> None:
    """Raise ValueError if `function` is a built-in reward that cannot run with its arguments."""
    module, _, name = function.partition(":")
    if module != __name__:
        return
    if name not in __all__ or name == "check_builtin":
        names = sorted({*__all__} - {"check_builtin"})
        raise ValueError(
            f"there is no {name!r} in {module}; choose one of {names}{did_you_mean(name, names)}"
        )
    if name in ("llm_judge", "pairwise_judge"):
        from asyncrl.rewards.judge import JudgeSettings
        from asyncrl.rewards.pairwise import PairwiseSettings

        kind = JudgeSettings if name == "llm_judge" else PairwiseSettings
        judge = kind.model_validate(arguments.get("judge", {}))
        _check_timeout("judge", judge.timeout_s, deadline_s)
    if name == "reward_model":
        from asyncrl.rewards.reward_model import RewardModelSettings

        settings = RewardModelSettings.model_validate(arguments.get(name, {}))
        _check_timeout(name, settings.timeout_s, deadline_s)


def _check_timeout(name: str, timeout_s: float, deadline_s: float) -> None:
    if timeout_s >= deadline_s:
        raise ValueError(
            f"{name}.timeout_s = {timeout_s:g} is not below reward.deadline_s = {deadline_s:g};"
            " raise the deadline, or lower the timeout"
        )


def __getattr__(name: str) -> object:
    if name in SLOW_IMPORTS:
        found: object = getattr(
            importlib.import_module(f"asyncrl.rewards.{SLOW_IMPORTS[name]}"), name
        )
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
