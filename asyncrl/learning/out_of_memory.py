"""A micro-batch that does not fit: what it was made of, and which setting makes it fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from asyncrl.learning.spec import LearnerSpec
from asyncrl.models.micro_batches import MicroBatch

__all__ = ["LearnerOutOfMemoryError", "advice", "explained"]


class LearnerOutOfMemoryError(RuntimeError):
    """A micro-batch did not fit in memory. One line: its tokens, segments and loss tokens, torch's
    own words, and the setting to change."""


@contextmanager
def explained(batch: MicroBatch, spec: LearnerSpec) -> Iterator[None]:
    """Whatever is computed on `batch` in here and runs out of memory raises LearnerOutOfMemoryError
    in place of torch's error."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if not _ran_out(error):
            raise
        lengths, tokens = batch.segments.lengths, batch.input_ids.shape[1]
        said = " ".join(str(error).split())[:160]
        raise LearnerOutOfMemoryError(
            f"out of memory on learner.device: {spec.learner.device} with a micro-batch of"
            f" {tokens} tokens, {len(lengths)} segments, the longest of {max(lengths)}, and"
            f" {len(batch.targets)} loss tokens;"
            f" {advice(spec, tokens + len(lengths), len(lengths))} ({said})"
        ) from error


def advice(spec: LearnerSpec, tokens: int, segments: int = 2) -> str:
    """What to set after a micro-batch of `tokens` tokens in so many segments ran out of memory:
    half of it for the cap, if the longest trajectory allows that. No cap makes one trajectory
    smaller."""
    learner, longest = spec.learner, spec.longest_trajectory
    # The reference policy shares no rows.
    least = (
        longest if spec.algorithm.has_reference else -(-longest // learner.sequence_parallel_size)
    )
    held = min(learner.max_tokens_per_gpu, -(-tokens // learner.sequence_parallel_size))
    if segments > 1 and (lower := max(held // 2, least)) < held:
        return f"set learner.max_tokens_per_gpu: {lower}"
    bound = (
        f"learner.max_tokens_per_gpu cannot be below {least}, as the longest trajectory has"
        f" {longest} tokens"
    )
    if not learner.gradient_checkpointing:
        return f"{bound}, so set learner.gradient_checkpointing: true"
    if learner.packing == "none":
        return f"{bound}, so lower rollout.max_completion_length"
    return (
        f"{bound}, so raise learner.sequence_parallel_size above {learner.sequence_parallel_size},"
        " or lower rollout.max_completion_length"
    )


def _ran_out(error: Exception) -> bool:
    """Whether this is torch's error of a device, that of its allocator for host memory, or Python's
    own."""
    return isinstance(
        error, (MemoryError, torch.OutOfMemoryError)
    ) or "DefaultCPUAllocator: can't allocate memory" in str(error)
