"""reasoning-gym's own scorers as a reward; named `asyncrl.rewards.builtin:reasoning_gym_score` in a
config."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Sequence
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore", SyntaxWarning)  # of a package that it imports
    import reasoning_gym

__all__ = ["reasoning_gym_score"]


def reasoning_gym_score(
    completions: Sequence[str],
    answer: Sequence[str],
    question: Sequence[str],
    task: Sequence[str],
    metadata: Sequence[str],
    **_: Any,
) -> list[float]:
    """Score of reasoning-gym's own scorer, in [0, 1], for the task named in column `task` (such as
    "chain_sum").

    Columns `question` and `answer` are those of the task's entry, `metadata` its metadata as JSON.
    """
    entries = zip(completions, answer, question, task, metadata, strict=True)
    return [
        float(
            _task(name).score_answer(
                completion.strip(),
                {"question": asked, "answer": expected, "metadata": json.loads(extra)},
            )
        )
        for completion, expected, asked, name, extra in entries
    ]


@functools.lru_cache(maxsize=64)
def _task(name: str) -> Any:
    return reasoning_gym.create_dataset(name, size=1, seed=0)
