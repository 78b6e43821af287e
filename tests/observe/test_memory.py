"""The memory sampler, tested on a process of known size."""

from __future__ import annotations

import mmap
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asyncrl.observe.memory import MemorySampler, pss_bytes, shared_memory_bytes

MIB = 1 << 20
CHILD = (
    "import sys; block = bytearray(b'x') * (64 << 20); print('ready', flush=True); sys.stdin.read()"
)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    """A process that holds 64 MiB until its input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def test_a_child_counts_and_its_peak_stays(child: subprocess.Popen[str]) -> None:
    sampler = MemorySampler(root=child.pid)
    with_child = sampler.sample()
    assert sampler.peak.by_name["python -c"] >= 60 * MIB and pss_bytes(child.pid) >= 64 * MIB
    child.kill()
    child.wait()
    assert with_child - sampler.sample() >= 48 * MIB
    assert sampler.peak.total == with_child
    assert sum(sampler.peak.by_name.values()) + sampler.peak.shared == with_child
    assert pss_bytes(child.pid) == 0


def test_shared_memory_made_since_the_start_counts_once(tmp_path: Path) -> None:
    sampler = MemorySampler()
    before = shared_memory_bytes()
    path = Path("/dev/shm") / f"asyncrl-test-{tmp_path.name}-{time.monotonic_ns()}"
    try:
        with path.open("wb+") as file:
            path.unlink()  # as Ray's object store does
            file.truncate(32 * MIB)
            sparse = shared_memory_bytes()
            with mmap.mmap(file.fileno(), 32 * MIB) as mapped:
                mapped[:] = b"x" * (32 * MIB)
                full = shared_memory_bytes()
                sampler.sample()
    finally:
        path.unlink(missing_ok=True)
    assert sparse - before < 8 * MIB
    assert 30 * MIB < full - sparse < 60 * MIB
    assert sampler.peak.shared >= 32 * MIB


def test_the_thread_takes_samples(child: subprocess.Popen[str]) -> None:
    with MemorySampler(interval_s=0.05, root=child.pid) as sampler:
        _wait_until(lambda: sampler.peak.samples >= 5)
    assert sampler.now_bytes >= 64 * MIB
    sampler.close()  # a second time is harmless


def _wait_until(condition: Callable[[], bool]) -> None:
    changed = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < changed, "no five samples in 60 s"
        time.sleep(0.01)
