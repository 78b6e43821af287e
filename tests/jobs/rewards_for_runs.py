"""Rewards for whole runs: one hangs, some can be learned, one runs code, and one is slow."""

import os
import time

from asyncrl.rewards.builtin import code_tests


def hangs(prompts, completions, completion_ids, **columns):
    time.sleep(3600)


def hangs_in_the_run(prompts, completions, completion_ids, **columns):
    """Passes the trial of the plan, which scores one made-up completion."""
    if len(completions) > 1:
        time.sleep(3600)
    return [0.0]


def digits(prompts, completions, completion_ids, **columns):
    """Share of digits among at most six tokens. A model with random weights earns some of it, and
    learns it in a few steps."""
    return [sum(character.isdigit() for character in completion) / 6 for completion in completions]


def unhurried(prompts, completions, completion_ids, **columns):
    """Always 0, and slow until the file exists that a variable of the run names."""
    if not os.path.exists(os.environ["HURRY"]):
        time.sleep(0.4)
    return [0.0 for _ in completions]


def digit_tokens(prompts, completions, completion_ids, **columns):
    """A reward for each token, which grows with the number of digits."""
    return [
        [sum(character.isdigit() for character in completion) / 6 / len(ids) for _ in ids]
        for completion, ids in zip(completions, completion_ids, strict=True)
    ]


async def runs_code(completions, **columns):
    """Run a program for each completion in the run's sandbox."""
    programs = [f"```python\nlength = {len(completion)}\n```" for completion in completions]
    return await code_tests(
        programs, [f"assert length == {len(completion)}" for completion in completions]
    )
