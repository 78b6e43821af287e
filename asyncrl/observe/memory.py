"""How much memory a run takes: the summed PSS of its processes, the object store apart.

PSS (proportional set size, `/proc/PID/smaps_rollup`) shares a page's bytes among the processes that map it, so the sum
counts shared libraries once. Ray's object store is mapped by many processes that come and go: its pages are left out of
PSS (they are `Pss_Shmem`) and taken from the store's own file instead.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import psutil

__all__ = ["MemoryPeak", "MemorySampler", "descendants", "process_name", "pss_bytes", "shared_memory_bytes"]

MAX_SHARE_OF_A_CORE = 0.02
"""The sampler waits longer between samples rather than take more than this share of one core."""


@dataclass(slots=True)
class MemoryPeak:
    """The largest total seen, in bytes, with its parts at that moment. `by_name` sums processes of one name."""

    total: int = 0
    shared: int = 0
    """Bytes of shared memory under /dev/shm: the object store and staged weights."""
    by_name: dict[str, int] = field(default_factory=dict)
    processes: int = 0
    samples: int = 0
    seconds: float = 0.0
    """CPU seconds that sampling has taken."""


class MemorySampler:
    """A thread that samples the memory of `root` and its descendants, and of shared memory made since it began.

    Ray starts a local cluster's raylet and workers as descendants of the driver. Processes that are reparented (their
    parent ended) are still counted: a process once seen is followed until it ends.
    """

    def __init__(self, interval_s: float = 1.0, root: int | None = None) -> None:
        self._interval_s = interval_s
        self._root = psutil.Process(root or os.getpid())
        self._known: dict[int, psutil.Process] = {}
        self._names: dict[int, str] = {}
        self._shared_before = _shared_files()
        self._peak = MemoryPeak()
        self._now = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-sampler", daemon=True)

    def __enter__(self) -> MemorySampler:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and wait for it."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def peak(self) -> MemoryPeak:
        with self._lock:
            return self._peak

    @property
    def now_bytes(self) -> int:
        """Total of the last sample, in bytes."""
        return self._now

    def sample(self) -> int:
        """Take one sample; its total in bytes."""
        began = time.thread_time()
        by_name: dict[str, int] = defaultdict(int)
        processes = self._processes()
        for process in processes:
            by_name[self._name(process)] += pss_bytes(process.pid)
        shared = shared_memory_bytes(exclude=self._shared_before)
        total = sum(by_name.values()) + shared
        with self._lock:
            self._now = total
            samples, seconds = self._peak.samples + 1, self._peak.seconds + time.thread_time() - began
            if total > self._peak.total:
                self._peak = MemoryPeak(total, shared, dict(sorted(by_name.items(), key=lambda item: -item[1])), len(processes))
            self._peak.samples, self._peak.seconds = samples, seconds
        return total

    def _run(self) -> None:
        wait = 0.0
        while not self._stop.wait(wait):
            began = time.thread_time()
            self.sample()
            spent = time.thread_time() - began
            wait = max(self._interval_s, spent / MAX_SHARE_OF_A_CORE)

    def _processes(self) -> list[psutil.Process]:
        for process in descendants(self._root):
            self._known.setdefault(process.pid, process)
        ended = [pid for pid, process in self._known.items() if not process.is_running()]
        for pid in ended:
            del self._known[pid]
            self._names.pop(pid, None)
        return list(self._known.values())

    def _name(self, process: psutil.Process) -> str:
        """Ray renames a worker to its actor or task once it knows it; only such final names are remembered."""
        if process.pid not in self._names:
            name = process_name(process)
            if name == "ray::IDLE" or not name.startswith("ray::"):
                return name
            self._names[process.pid] = name
        return self._names[process.pid]


def descendants(root: psutil.Process) -> Iterable[psutil.Process]:
    """The process and all its descendants that run now."""
    try:
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def process_name(process: psutil.Process) -> str:
    """A short name that stays the same from sample to sample: `ray::LearnerRank`, `raylet`, `VLLM::EngineCore`, …"""
    try:
        words = process.cmdline()
        plain = process.name()
    except psutil.Error:
        return "(ended)"
    first = words[0].strip() if words else ""
    if first.startswith(("ray::", "VLLM::")):
        return re.split(r"[ .(]", first)[0]  # ray::Actor.method(): the actor
    first = first or plain
    if first.rsplit("/", 1)[-1].startswith("python"):
        modules = [word for word in words[1:] if word.endswith(".py") or not word.startswith("-")]
        return f"python {Path(modules[0]).name}" if modules else "python"
    return first.rsplit("/", 1)[-1]


def pss_bytes(pid: int) -> int:
    """Proportional set size without shared memory files, in bytes; 0 if the process has ended or is not ours."""
    try:
        fields = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    sizes = {parts[0]: int(parts[1]) for parts in map(str.split, fields.splitlines()[1:]) if len(parts) >= 2}
    return 1024 * (sizes.get("Pss:", 0) - sizes.get("Pss_Shmem:", 0))


def shared_memory_bytes(exclude: Iterable[str] = ()) -> int:
    """Bytes that files under /dev/shm really occupy (a sparse file's holes do not count)."""
    left_out = set(exclude)
    return sum(size for name, size in _shared_files().items() if name not in left_out)


def _shared_files() -> dict[str, int]:
    sizes = {}
    for directory, _, names in os.walk("/dev/shm"):
        for name in names:
            path = os.path.join(directory, name)
            try:
                sizes[path] = os.lstat(path).st_blocks * 512
            except OSError:
                continue
    return sizes
