"""reasoning-gym's own scorers as a reward: `asyncrl.rewards.builtin:reasoning_gym_score` in a
config."""

from __future__ import annotations

import functools
import json
import re
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncrl.rewards.contract import RewardError
from asyncrl.rewards.final_answer import answers_of, tagged_answer
from asyncrl.rewards.unsafe_tasks import why_not_scored

with warnings.catch_warnings():
    warnings.simplefilter("ignore", SyntaxWarning)  # from a package that reasoning_gym imports
    import reasoning_gym

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

FIX = "write a reward function that evaluates nothing"
MOST_CHARACTERS = 10_000
"""A longer completion scores 0, unless the right answer has more than half of that. Scorers may
take a time that grows with the square of the length."""
FEWER_CHARACTERS = {"codeio": 2_000, "propositional_logic": 500}
"""Tasks whose scorers take seconds for MOST_CHARACTERS → their own limit."""
LARGE_EXPONENT = re.compile(r"e[-+]?\d{4}", re.IGNORECASE)
"""In a number of coin_flip, whose scorer makes an integer with that many digits of it."""


def reasoning_gym_score(
    completions: Sequence[str],
    answer: Sequence[str],
    question: Sequence[str],
    task: Sequence[str],
    metadata: Sequence[str],
    answer_texts: Sequence[str | None] | None = None,
    answer_ended: Sequence[bool] | None = None,
    **_: object,
) -> list[float]:
    """The score of reasoning-gym's own scorer, in [0, 1], for the task that column `task` names
    (such as "chain_sum").

    Columns `question` and `answer` come from the task's entry. `metadata` is its metadata as JSON.
    The scorer gets the completion without its reasoning, or what is in its last `<answer>` tag. An
    answer for which the scorer raises has the score 0, as has a very long one (`own_score`), and a
    completion without an answer.

    Raises:
        RewardError: the scorer of a task would evaluate the model's text as code.
    """
    for name in task:
        if why := why_not_scored(name, FIX):
            raise RewardError(f"asyncrl.rewards.builtin:reasoning_gym_score: {why}")
    texts = answers_of(completions, answer_texts)
    finals = [
        None if text is None else tagged_answer(text, ended)
        for text, ended in zip(texts, answer_ended or [True] * len(texts), strict=True)
    ]
    entries = zip(finals, answer, question, task, metadata, strict=True)
    return [
        0.0 if final is None else own_score(final, expected, asked, name, details)
        for final, expected, asked, name, details in entries
    ]


def own_score(completion: str, answer: str, question: str, task: str, metadata: str) -> float:
    """The score of one completion. It is 0 if the completion is empty or too long, or if the task's
    scorer raises for it. The scorers of EVALUATED tasks run the completion as code.

    Raises:
        Exception: what the scorer raises for the right answer too, so the row is at fault.
    """
    text = completion.strip()
    if not text:
        return 0.0
    score = _task(task).score_answer
    entry = {"question": question, "answer": answer, "metadata": json.loads(metadata)}
    if _costly(text, str(answer), task):
        return 0.0
    try:
        return float(score(text, entry))
    except Exception:
        score(str(answer), entry)
        return 0.0


def _costly(text: str, answer: str, task: str) -> bool:
    """Whether a task's scorer might take very long for a text."""
    if len(text) > max(FEWER_CHARACTERS.get(task, MOST_CHARACTERS), 2 * len(answer)):
        return True
    digits = text.replace(",", "").replace("_", "")  # as the scorer reads a number
    return task == "coin_flip" and LARGE_EXPONENT.search(digits) is not None


@functools.lru_cache(maxsize=64)
def _task(name: str) -> ProceduralDataset:
    return reasoning_gym.create_dataset(name, size=1, seed=0)
