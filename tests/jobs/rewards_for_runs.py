"""Rewards for whole runs: one that hangs, one that can be learnt, and one that takes its time."""

import time


def hangs(prompts, completions, completion_ids, **columns):
    time.sleep(3600)


def digits(prompts, completions, completion_ids, **columns):
    """Share of digits among at most six tokens: a model of random weights earns some of it, and learns it in a few steps."""
    return [sum(character.isdigit() for character in completion) / 6 for completion in completions]


def unhurried(prompts, completions, completion_ids, **columns):
    time.sleep(0.15)
    return [0.0 for _ in completions]
