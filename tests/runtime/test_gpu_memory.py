"""The limit on a process's GPU memory, with torch's call replaced."""

import pytest
import torch

from asyncrl.runtime.gpu_memory import limit_gpu_memory


def test_only_a_fraction_of_a_gpu_is_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limits.append)
    limit_gpu_memory("cpu", 0.5)
    limit_gpu_memory("cuda", 1.0)
    assert limits == []
    limit_gpu_memory("cuda", 0.5)
    assert limits == [0.5]
