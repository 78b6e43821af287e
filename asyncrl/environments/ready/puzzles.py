"""Tasks of reasoning-gym as an environment."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from asyncrl.environments.ready.graded import first_messages
from asyncrl.environments.tools import was_cut
from asyncrl.rewards.final_answer import answers_of, tagged_answer
from asyncrl.rewards.unsafe_tasks import why_not_scored
from asyncrl.sessions.answers import ContextTooLongError
from asyncrl.text.chat_messages import plain_text

COLUMNS = ("task", "question", "answer", "metadata")
"""What reasoning-gym's scorer needs of a row."""
AGAIN = "That is wrong. Try again."


async def reasoning_gym(
    task: Mapping[str, Any],
    model: Any,
    tries: int = 1,
    again: str = AGAIN,
    system: str | None = None,
    evaluate_answers: bool = False,
) -> dict[str, float]:
    """A task of reasoning-gym. The reward is the package's own score of the last answer, in [0, 1].
    The parts are `tries`, the answers that were given, and `first_score`.

    An answer is the text in `<answer>…</answer>`, or the whole text without these marks. The row
    has the columns of `asyncrl.rewards.builtin:reasoning_gym_score`: `task`, `question`, `answer`
    and `metadata` as JSON.

    Args:
        tries: answers that the model may give until one has the score 1.
        again: what it is told after a lower score.
        system: text of a system message.
        evaluate_answers: allow tasks whose scorers evaluate the model's text as code
            (`asyncrl.rewards.unsafe_tasks`), with your rights.

    Raises:
        ValueError: `tries` is below 1, the row has no such columns, or its task is one of these.
    """
    _check(task, tries, evaluate_answers)
    chat: list[Any] = list(first_messages(task, system))
    scores: list[float] = []
    while not scores or (len(scores) < tries and scores[-1] < 1.0):
        if scores:
            chat.append({"role": "user", "content": again})
        try:
            completion = await model.chat.completions.create(messages=chat)
        except ContextTooLongError:
            if not scores:
                raise
            break  # the last answer counts
        choice = completion.choices[0]
        message = choice.message
        # In a thread, because imports and scorers may take long.
        answer = final_answer(str(plain_text(message.content)), not was_cut(choice))
        scores.append(await asyncio.to_thread(_score, task, answer))
        chat.append(message.model_dump(exclude_none=True))
    return {"reward": scores[-1], "tries": float(len(scores)), "first_score": scores[0]}


def final_answer(text: str, ended: bool = True) -> str:
    """The last text in `<answer>…</answer>`, else all that follows the reasoning; stripped. Empty
    if there is none.

    Args:
        ended: whether the turn ended by itself.
    """
    (answer,) = answers_of([text], None)
    final = None if answer is None else tagged_answer(answer, ended)
    return (final or "").strip()


def _check(task: Mapping[str, Any], tries: int, evaluate_answers: bool) -> None:
    if tries < 1:
        raise ValueError(f"environment.arguments.tries = {tries}: give at least 1")
    if missing := [name for name in COLUMNS if name not in task]:
        raise ValueError(
            f"the data has no column {missing[0]}; rows of reasoning-gym have {', '.join(COLUMNS)}"
        )
    why = why_not_scored(task["task"], "set environment.arguments.evaluate_answers: true")
    if why and not evaluate_answers:
        raise ValueError(why)


def _score(task: Mapping[str, Any], answer: str) -> float:
    from asyncrl.rewards.reasoning import own_score

    return own_score(answer, **{name: task[name] for name in COLUMNS})
