"""reasoning-gym's own scorers as a reward: `asyncrl.rewards.builtin:reasoning_gym_score` in a
config."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncrl.rewards.contract import RewardError
from asyncrl.rewards.evaluated import why_not_scored

with warnings.catch_warnings():
    warnings.simplefilter("ignore", SyntaxWarning)  # from a package that reasoning_gym imports
    import reasoning_gym

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

__all__ = ["own_score", "reasoning_gym_score"]

FIX = "write a reward function that evaluates nothing"


def reasoning_gym_score(
    completions: Sequence[str],
    answer: Sequence[str],
    question: Sequence[str],
    task: Sequence[str],
    metadata: Sequence[str],
    **_: object,
) -> list[float]:
    """The score of reasoning-gym's own scorer, in [0, 1], for the task that column `task` names
    (such as "chain_sum").

    Columns `question` and `answer` come from the task's entry. `metadata` is its metadata as JSON.

    Raises:
        RewardError: the scorer of a task would evaluate the model's text as code.
    """
    for name in task:
        if why := why_not_scored(name, FIX):
            raise RewardError(f"asyncrl.rewards.builtin:reasoning_gym_score: {why}")
    entries = zip(completions, answer, question, task, metadata, strict=True)
    return [
        own_score(completion, expected, asked, name, details)
        for completion, expected, asked, name, details in entries
    ]


def own_score(completion: str, answer: str, question: str, task: str, metadata: str) -> float:
    """The score of one completion. The scorers of EVALUATED tasks run the completion as code."""
    entry = {"question": question, "answer": answer, "metadata": json.loads(metadata)}
    return float(_task(task).score_answer(completion.strip(), entry))


@functools.lru_cache(maxsize=64)
def _task(name: str) -> ProceduralDataset:
    return reasoning_gym.create_dataset(name, size=1, seed=0)
