"""Built-in rewards. Each follows the contract of `asyncrl.rewards.contract`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "check_builtin",
    "code_tests",
    "exact_match",
    "llm_judge",
    "math_verify",
    "reasoning_gym_score",
]

SLOW_IMPORTS = {
    "code_tests": "code",
    "reasoning_gym_score": "reasoning",
    "math_verify": "mathematics",
    "llm_judge": "judge",
}
"""Functions whose packages take long to import → their module: paid when a reward process starts,
and only if they are named."""


def exact_match(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """1.0 where the completion, stripped, equals column `answer`, else 0.0."""
    return [
        float(completion.strip() == str(expected).strip())
        for completion, expected in zip(completions, answer, strict=True)
    ]


def check_builtin(function: str, arguments: Mapping[str, Any], deadline_s: float) -> None:
    """Raise ValueError if `function` is one of these and could not run with its arguments."""
    module, _, name = function.partition(":")
    if module != __name__:
        return
    if name not in __all__ or name == "check_builtin":
        raise ValueError(
            f"there is no {name!r} in {module}; choose one of"
            f" {sorted({*__all__} - {'check_builtin'})}"
        )
    if name == "llm_judge":
        from asyncrl.rewards.judge import JudgeSettings

        settings = JudgeSettings.model_validate(arguments.get("judge", {}))
        if settings.timeout_s >= deadline_s:
            raise ValueError(
                f"judge.timeout_s = {settings.timeout_s:g} is not below reward.deadline_s ="
                f" {deadline_s:g}; raise the deadline, or lower it"
            )


def __getattr__(name: str) -> Any:
    if name in SLOW_IMPORTS:
        return getattr(importlib.import_module(f"asyncrl.rewards.{SLOW_IMPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
