"""reasoning-gym's own scorers as a reward: `asyncrl.rewards.builtin:reasoning_gym_score` in a
config."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

with warnings.catch_warnings():
    warnings.simplefilter("ignore", SyntaxWarning)  # from a package that reasoning_gym imports
    import reasoning_gym

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

__all__ = ["reasoning_gym_score"]


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
    """
    entries = zip(completions, answer, question, task, metadata, strict=True)
    return [
        float(
            _task(name).score_answer(
                completion.strip(),
                {"question": asked, "answer": expected, "metadata": json.loads(details)},
            )
        )
        for completion, expected, asked, name, details in entries
    ]


@functools.lru_cache(maxsize=64)
def _task(name: str) -> ProceduralDataset:
    return reasoning_gym.create_dataset(name, size=1, seed=0)
