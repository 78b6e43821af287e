"""Losses of a user's own, for ranks: their processes can import the tests' modules."""

from pathlib import Path
from runpy import run_path

import torch

clipped = run_path(str(Path(__file__).parents[2] / "jobs" / "own_algorithm.py"))["clipped"]


def twelve_only(logprobs):
    return logprobs * torch.ones(12)
