"""Scorers of reasoning-gym that evaluate the model's text as code are never called with it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from asyncrl.rewards.contract import GroupCall, RewardError, call_reward, with_notes
from asyncrl.rewards.unsafe_tasks import EVALUATED, why_not_scored

NAME = "asyncrl.rewards.builtin:reasoning_gym_score"
CALLS = re.compile(r"\b(eval|exec|parse_expr|sympify|parse_latex)\(")
"""Functions that run a text as code, some of them of sympy."""
WITHOUT_THE_ANSWER = {
    "basic_arithmetic": "evaluates its own expression, when it makes a task",
    "bitwise_arithmetic": "evaluates the row's problem",
    "codeio": "runs the code of its own data, when it makes a task",
    "number_sorting": "evaluates the row's answer",
    "propositional_logic": "its parse_expr is a parser of its own",
}
"""Tasks whose modules call one of these, but never with the model's text."""


def scored(task: str, completion: str) -> float | None:
    columns = {"task": task, "question": "q", "answer": "1", "metadata": "{}"}
    call = GroupCall(["q"], [completion], [[1]], columns, ["stop"], [False])
    return call_reward(NAME, call).rewards[0]


@pytest.mark.parametrize("task", sorted(EVALUATED))
def test_a_task_is_refused_before_anything_is_evaluated(task: str, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    with pytest.raises(RewardError) as refused:
        scored(task, f"__import__('pathlib').Path({str(touched)!r}).touch() or 1")
    text = with_notes(refused.value)
    assert f"{NAME}: reasoning-gym's scorer of {task!r} evaluates the model's answer" in text
    assert "choose another task" in text and "\n" not in text
    assert not touched.exists()


def test_other_tasks_are_scored() -> None:
    assert scored("chain_sum", "1") == 1.0
    assert why_not_scored("chain_sum", "fix") is None


def test_the_list_is_that_of_the_installed_package() -> None:
    """A new version's scorer that evaluates must be looked at, also if a helper does it."""
    from reasoning_gym.factory import DATASETS

    scorers = {
        name: inspect.getsource(kind.score_answer)
        for name, (kind, _) in DATASETS.items()
        if CALLS.search(inspect.getsource(inspect.getmodule(kind) or kind))
    }
    assert scorers.keys() == EVALUATED | WITHOUT_THE_ANSWER.keys()
    answered = re.compile(rf"{CALLS.pattern}answer")
    assert {name for name, source in scorers.items() if answered.search(source)} == EVALUATED


def test_a_composite_task_cannot_hide_one() -> None:
    """Its scorer calls that of the task which the row's metadata name."""
    with pytest.raises(RewardError, match="composite"):
        scored("composite", "1")
