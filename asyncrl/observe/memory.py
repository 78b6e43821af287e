"""Measures the memory of a run: the summed PSS of its processes, plus shared memory.

PSS (proportional set size, `/proc/PID/smaps_rollup`) divides the bytes of a page among the
processes that map it, so the sum counts shared libraries once. Many short-lived processes map Ray's
object store. Its pages (`Pss_Shmem`) are therefore subtracted, and the use of /dev/shm is added
instead. The object store's file has no name there, so only the file system's total shows it.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

LARGEST_SHARE = 0.02
"""Largest share of one core that sampling may take."""


@dataclass(slots=True)
class MemoryPeak:
    """The largest total so far, in bytes, with its parts at that moment. `by_name` sums the
    processes of one name."""

    total: int = 0
    shared: int = 0
    """Growth of /dev/shm: the object store, staged weights, and files of other programs."""
    by_name: dict[str, int] = field(default_factory=dict)
    processes: int = 0
    samples: int = 0
    seconds: float = 0.0
    """CPU seconds spent on sampling."""


class MemorySampler:
    """Samples, in a thread, the memory of `root` and its descendants, and the growth of shared
    memory.

    Ray starts a local cluster's raylet and workers as descendants of the driver. The sampler
    follows each process until it ends, so a process whose parent has ended is still counted."""

    def __init__(self, interval_s: float = 1.0, root: int | None = None) -> None:
        self._interval_s = interval_s
        self._root = psutil.Process(root or os.getpid())
        self._known: dict[int, psutil.Process] = {}
        self._names: dict[int, str] = {}
        self._shared_before = shared_memory_bytes()
        self._peak = MemoryPeak()
        self._now = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-sampler", daemon=True)

    def __enter__(self) -> MemorySampler:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
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
        """The total of the last sample, in bytes."""
        return self._now

    def sample(self) -> int:
        """Take one sample and return its total in bytes."""
        began = time.thread_time()
        by_name: dict[str, int] = defaultdict(int)
        processes = self._processes()
        for process in processes:
            by_name[self._name(process)] += pss_bytes(process.pid)
        shared = max(0, shared_memory_bytes() - self._shared_before)
        total = sum(by_name.values()) + shared
        with self._lock:
            self._now = total
            samples, seconds = (
                self._peak.samples + 1,
                self._peak.seconds + time.thread_time() - began,
            )
            if total > self._peak.total:
                self._peak = MemoryPeak(
                    total,
                    shared,
                    dict(sorted(by_name.items(), key=lambda item: -item[1])),
                    len(processes),
                )
            self._peak.samples, self._peak.seconds = samples, seconds
        return total

    def _run(self) -> None:
        """Take samples until closed, with at most LARGEST_SHARE of a core. A sample reads the page
        tables of every process, and takes longer the more memory they have."""
        pause = 0.0
        while not self._stop.wait(pause):
            before = self._peak.seconds
            self.sample()
            pause = max(self._interval_s, (self._peak.seconds - before) / LARGEST_SHARE)

    def _processes(self) -> list[psutil.Process]:
        for process in descendants(self._root):
            self._known.setdefault(process.pid, process)
        ended = [pid for pid, process in self._known.items() if not process.is_running()]
        for pid in ended:
            del self._known[pid]
            self._names.pop(pid, None)
        return list(self._known.values())

    def _name(self, process: psutil.Process) -> str:
        """The name of a process. Ray renames a worker once it has an actor or a task, so only such
        final names are cached."""
        if process.pid not in self._names:
            name = process_name(process)
            if name == "ray::IDLE" or not name.startswith("ray::"):
                return name
            self._names[process.pid] = name
        return self._names[process.pid]


def descendants(root: psutil.Process) -> Iterable[psutil.Process]:
    """The process and all its running descendants; empty if it has ended."""
    try:
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def process_name(process: psutil.Process) -> str:
    """A short name, the same in every sample: `ray::LearnerRank`, `raylet`, `VLLM::EngineCore`,
    …"""
    try:
        words = process.cmdline()
        plain = process.name()
    except psutil.Error:
        return "(ended)"
    first = words[0].strip() if words else ""
    if first.startswith(("ray::", "VLLM::")):
        name = re.split(r"[ .(]", first)[0]  # ray::Actor.method(): the actor
        # Ray adds the application, the deployment and an id to a replica's name.
        return "ray::ServeReplica" if "ServeReplica" in name else name
    first = first or plain
    if first.rsplit("/", 1)[-1].startswith("python"):
        if "-c" in words:
            code = words[words.index("-c") + 1]
            if "asyncrl.runtime.processes.supervisor" in code:
                return f"{words[-1].split('.')[1].removesuffix('s')} process"
            return "python (multiprocessing)" if "multiprocessing" in code else "python -c"
        modules = [word for word in words[1:] if word.endswith(".py") or not word.startswith("-")]
        return f"python {Path(modules[0]).name}" if modules else "python"
    return first.rsplit("/", 1)[-1]


def pss_bytes(pid: int) -> int:
    """Proportional set size without shared memory files, in bytes; 0 if the process has ended or
    belongs to another user."""
    try:
        fields = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    sizes = {
        parts[0]: int(parts[1])
        for parts in map(str.split, fields.splitlines()[1:])
        if len(parts) >= 2
    }
    return 1024 * (sizes.get("Pss:", 0) - sizes.get("Pss_Shmem:", 0))


def shared_memory_bytes() -> int:
    """Bytes in use on /dev/shm. Files without a name count, holes of sparse files do not."""
    return shutil.disk_usage("/dev/shm").used
