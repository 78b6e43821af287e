"""Rewards for whole runs: one that hangs, some that can be learnt, one that runs code, and one that
takes its time."""

import time

from asyncrl.rewards.builtin import code_tests


def hangs(prompts, completions, completion_ids, **columns):
    time.sleep(3600)


def digits(prompts, completions, completion_ids, **columns):
    """Share of digits among at most six tokens: a model of random weights earns some of it, and
    learns it in a few steps."""
    return [sum(character.isdigit() for character in completion) / 6 for completion in completions]


def unhurried(prompts, completions, completion_ids, **columns):
    time.sleep(0.15)
    return [0.0 for _ in completions]


def digit_tokens(prompts, completions, completion_ids, **columns):
    """A reward for each token: the more, the more digits there are."""
    return [
        [sum(character.isdigit() for character in completion) / 6 / len(ids) for _ in ids]
        for completion, ids in zip(completions, completion_ids, strict=True)
    ]


async def runs_code(completions, **columns):
    """A program for each completion, in the sandbox of the run."""
    programs = [f"```python\nlength = {len(completion)}\n```" for completion in completions]
    return await code_tests(
        programs, [f"assert length == {len(completion)}" for completion in completions]
    )
