"""What the ready environments share: the first messages of a task, and the grade of an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, cast

from asyncrl.text.chat_messages import Message

Grade: TypeAlias = Literal["math", "exact", "none"]
"""`math`: the answer is mathematically equal to the column `answer` (math-verify). `exact`: it is
the same text. `none`: the environment gives no reward, and `reward.functions` does."""


def first_messages(task: Mapping[str, Any], system: str | None = None) -> list[Message]:
    """The task's chat if its prompt is one, else its prompt as a user's message.

    Args:
        system: text of a system message, for a chat without one.
    """
    given = task.get("messages")
    chat = list(given) if given else [{"role": "user", "content": task["prompt"]}]
    if system is None or chat[0]["role"] == "system":
        return chat
    return [{"role": "system", "content": system}, *chat]


async def graded(
    task: Mapping[str, Any], answer: str, grade: Grade, ended: bool = True
) -> dict[str, float]:
    """The reward of an answer, as an environment returns it: 1.0 or 0.0. Empty if there is none.

    Args:
        ended: whether the answer ended by itself.

    Raises:
        ValueError: `grade` is unknown, or the task has no column `answer`.
    """
    if grade not in ("math", "exact", "none"):
        raise ValueError(f"grade = {grade!r}: choose math, exact or none")
    if grade == "none":
        return {}
    if "answer" not in task:
        raise ValueError(
            "the data has no column answer; add it, or set environment.arguments.grade: none and"
            " name reward.functions"
        )
    reward = await asyncio.to_thread(_score, grade, answer, task["answer"], ended)
    return {} if reward is None else {"reward": reward}


def _score(grade: Grade, answer: str, expected: object, ended: bool) -> float | None:
    # In a thread, because the import of math-verify takes long, and so may its verdict.
    from asyncrl.rewards import builtin

    function = builtin.math_verify if grade == "math" else builtin.exact_match
    score = cast("Callable[..., list[float | None]]", function)
    return score(completions=[answer], answer=[expected], answer_ended=[ended])[0]
