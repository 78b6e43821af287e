"""Rewards for whole runs: three that break their contract, and one that takes its time."""

import time


def raises(prompts, completions, completion_ids, **columns):
    raise ValueError("no such answer")


def hangs(prompts, completions, completion_ids, **columns):
    time.sleep(3600)


def too_few(prompts, completions, completion_ids, **columns):
    return [0.0]


def unhurried(prompts, completions, completion_ids, **columns):
    time.sleep(0.15)
    return [0.0 for _ in completions]
