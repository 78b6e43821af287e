"""Sizes of the chunks in which logits are computed. Importing this does not import torch."""

from __future__ import annotations

LIVE_CHUNKS = 4
"""Peak memory of the backward pass, in float32 tensors of the size of one chunk of logits."""
CHUNK_ELEMENTS = 1 << 23
"""Default number of logits in a chunk. Peak memory is 128 MiB."""


def chunk_elements(memory_bytes: int) -> int:
    """Return the number of logits in a chunk that keeps peak memory within `memory_bytes`."""
    return memory_bytes // (4 * LIVE_CHUNKS)
