"""How much of a GPU's memory a process may use."""

from __future__ import annotations

__all__ = ["limit_gpu_memory"]


def limit_gpu_memory(device: str, fraction: float) -> None:
    """Limit PyTorch in this process to a fraction (0..1) of its GPU's memory. More is an
    out-of-memory error, also while other processes leave memory free. CUDA's own context, often
    half a GiB, is not counted. Without an effect on the CPU."""
    if device == "cuda" and fraction < 1:
        import torch

        torch.cuda.set_per_process_memory_fraction(fraction)
