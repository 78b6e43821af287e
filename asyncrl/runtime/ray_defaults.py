"""What a small task or actor declares to Ray."""

from __future__ import annotations

__all__ = ["TASK_CPUS"]

TASK_CPUS = 0.1
"""Logical CPUs that one rollout worker, and one task of a Ray Data stream, declares to Ray. Ray
Data's default of 1 would starve a machine of two: an endless task never gives it back."""
