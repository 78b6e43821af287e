"""Default Ray resources of small tasks and actors."""

from __future__ import annotations

TASK_CPUS = 0.1
"""Logical CPUs of one rollout worker or one task of a Ray Data stream. With Ray Data's default of
1, endless tasks would occupy a small machine for the whole run."""
