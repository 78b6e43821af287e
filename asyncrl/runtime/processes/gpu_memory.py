"""How much of a GPU's memory a process may use, and how much is free."""

from __future__ import annotations

from asyncrl.contracts.errors import GpuMemoryError

CUDA_CONTEXT_BYTES = 1 << 29
"""GPU memory that CUDA itself often takes in a process. vLLM compares what is free after that."""


def limit_gpu_memory(device: str, fraction: float) -> None:
    """Limit PyTorch in this process to a fraction (0..1) of its GPU's memory. More is an
    out-of-memory error, also while other processes leave memory free. CUDA's own context, often
    half a GiB, is not counted. Without an effect on the CPU."""
    if device == "cuda" and fraction < 1:
        import torch

        torch.cuda.set_per_process_memory_fraction(fraction)


def gpu_memory() -> tuple[int, int]:
    """Free and total bytes of this process's GPU, over all processes that use it."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return int(free), int(total)


def check_room(needs: str, needed: int, memory: tuple[int, int], others: str, fix: str) -> None:
    """Check that a side of a GPU may begin its shift.

    Args:
        needs: who needs the bytes, for the message.
        memory: free and total bytes of the GPU (`gpu_memory`).
        others: who may hold the rest.
        fix: what to change.

    Raises:
        GpuMemoryError: fewer than `needed` bytes are free.
    """
    free, total = memory
    if free < needed:
        raise GpuMemoryError(
            f"{needs} {gib(needed)} of GPU memory, but {gib(free)} of {gib(total)} are free:"
            f" {others} {gib(total - free)}; {fix}"
        )


def gib(size: int) -> str:
    """A number of bytes in GiB, for messages."""
    return f"{size / 2**30:.2f} GiB"
