"""The limit on a process's GPU memory, and what is free there, with torch's calls replaced."""

import pytest
import torch

from asyncrl.contracts.errors import GpuMemoryError
from asyncrl.runtime.processes.gpu_memory import check_room, gpu_memory, limit_gpu_memory

GIB = 2**30


def test_only_a_fraction_of_a_gpu_is_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limits.append)
    limit_gpu_memory("cpu", 0.5)
    limit_gpu_memory("cuda", 1.0)
    assert limits == []
    limit_gpu_memory("cuda", 0.5)
    assert limits == [0.5]


def test_too_little_room_is_one_line_with_both_sides_bytes_and_the_fix() -> None:
    check_room("a rank needs", 8 * GIB, (8 * GIB, 80 * GIB), "others hold", "lower it")
    with pytest.raises(GpuMemoryError) as refused:
        check_room("a rank needs", 8 * GIB + 1, (8 * GIB, 80 * GIB), "others hold", "lower it")
    assert str(refused.value) == (
        "a rank needs 8.00 GiB of GPU memory, but 8.00 GiB of 80.00 GiB are free: others hold"
        " 72.00 GiB; lower it"
    )


def test_free_and_total_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3, 5))
    assert gpu_memory() == (3, 5)
