"""Time and memory of a device. Memory is 0 on the CPU."""

import time
from collections.abc import Callable

import torch


def timed(once: Callable[[], None], device: str) -> tuple[float, int]:
    """Seconds of the fastest of 5 calls after a warm-up, and the bytes that a call adds at its
    peak."""
    once()
    wait(device)
    before = allocated(device)
    reset_peak(device)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        once()
        wait(device)
        seconds.append(time.perf_counter() - began)
    return min(seconds), peak(device) - before


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def allocated(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def peak(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


def reset_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
