"""User-defined losses for the tests. The ranks' processes can import this module."""

from pathlib import Path
from runpy import run_path

import torch

clipped = run_path(str(Path(__file__).parents[2] / "jobs" / "own_algorithm.py"))["clipped"]


def twelve_only(logprobs):
    return logprobs * torch.ones(12)
