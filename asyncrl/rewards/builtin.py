"""Built-in rewards. Each follows the contract of `asyncrl.rewards.contract`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence

__all__ = [
    "check_builtin",
    "code_tests",
    "environment",
    "exact_match",
    "llm_judge",
    "math_verify",
    "pairwise_judge",
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


def exact_match(completions: Sequence[str], answer: Sequence[str], **_: object) -> list[float]:
    """1.0 where the completion, stripped, equals column `answer`, else 0.0."""
    return [
        float(completion.strip() == str(expected).strip())
        for completion, expected in zip(completions, answer, strict=True)
    ]


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


def check_builtin(function: str, arguments: Mapping[str, object], deadline_s: float) -> None:
    """Raise ValueError if `function` is a built-in reward that cannot run with its arguments."""
    module, _, name = function.partition(":")
    if module != __name__:
        return
    if name not in __all__ or name == "check_builtin":
        raise ValueError(
            f"there is no {name!r} in {module}; choose one of"
            f" {sorted({*__all__} - {'check_builtin'})}"
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
