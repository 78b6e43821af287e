"""Explains an out-of-memory error: the size of the micro-batch, and the setting to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from asyncrl.learning.spec import LearnerSpec
from asyncrl.models.micro_batches import MicroBatch


class LearnerOutOfMemoryError(RuntimeError):
    """A micro-batch did not fit in memory. The message is one line: its tokens, trajectories and
    loss tokens, the setting to change, and torch's error."""


@contextmanager
def explained(batch: MicroBatch, spec: LearnerSpec) -> Iterator[None]:
    """Context manager for a computation on `batch`: raises LearnerOutOfMemoryError instead of
    an out-of-memory error."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if not _ran_out(error):
            raise
        tokens, count = batch.input_ids.shape[1], max(1, len(batch.order))
        longest = batch.segments.longest
        cause = " ".join(str(error).split())[:160]
        raise LearnerOutOfMemoryError(
            f"out of memory on learner.device: {spec.learner.device} with a micro-batch of"
            f" {tokens} tokens, {count} trajectories, the longest of {longest}, and"
            f" {len(batch.targets)} loss tokens;"
            f" {advice(spec, tokens + count, count)}{_limit(spec)} ({cause})"
        ) from error


def advice(spec: LearnerSpec, tokens: int, trajectories: int = 2) -> str:
    """The setting to change after a micro-batch of `tokens` tokens ran out of memory.

    With several trajectories, this is a cap of half the micro-batch, if the longest one fits. A cap
    cannot make a single trajectory smaller, so other settings follow.
    """
    learner, longest = spec.learner, spec.longest_trajectory
    # With a reference policy, a rank must fit a whole trajectory: that policy does not split rows.
    smallest_cap = (
        longest if spec.objective.has_reference else -(-longest // learner.sequence_parallel_size)
    )
    used = min(learner.max_tokens_per_gpu, -(-tokens // learner.sequence_parallel_size))
    if trajectories > 1 and (lower := max(used // 2, smallest_cap)) < used:
        return f"set learner.max_tokens_per_gpu: {lower}"
    bound = (
        f"learner.max_tokens_per_gpu cannot be below {smallest_cap}, as the longest trajectory"
        f" has {longest} tokens"
    )
    if not learner.gradient_checkpointing:
        return f"{bound}, so set learner.gradient_checkpointing: true"
    if learner.packing == "none":
        return f"{bound}, so lower {spec.length_setting}"
    return (
        f"{bound}, so raise learner.sequence_parallel_size above {learner.sequence_parallel_size},"
        f" or lower {spec.length_setting}"
    )


def _limit(spec: LearnerSpec) -> str:
    """The other setting that helps a rank with a limit on its GPU's memory."""
    share = spec.rank_share
    return f", or raise learner.gpu_memory_utilization = {share:g}" if share < 1 else ""


def _ran_out(error: Exception) -> bool:
    """Whether this is an out-of-memory error: torch's for a device, torch's for host memory, or
    Python's."""
    return isinstance(
        error, (MemoryError, torch.OutOfMemoryError)
    ) or "DefaultCPUAllocator: can't allocate memory" in str(error)
