"""What a tree of processes uses, read from /proc, and what a folder contains. For the supervisor.

The kernel limits each process (rlimits) and their number. These sums limit them together.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass

from asyncrl.sandbox.levels import Limits

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
DEEPEST = 64
"""Levels of folders that a program may nest. Checks and cleanup walk all of them."""
LOOKS, BETWEEN_LOOKS_S = 40, 0.005


@dataclass(frozen=True, slots=True)
class Usage:
    """What several processes use together."""

    tasks: int = 0
    """Processes and threads."""
    memory_bytes: int = 0
    """Anonymous, shared and swapped pages. Files are not counted: the kernel can drop those."""
    cpu_s: float = 0.0
    """Processor time of the processes and of the children that they have reaped."""


def children_known() -> bool:
    """Whether the kernel lists children (CONFIG_PROC_CHILDREN)."""
    return os.path.exists("/proc/thread-self/children")


def descendants(process: int) -> list[int]:
    """Ids of all processes below `process`, parents first. A process that ends during the call may
    hide its children."""
    found: list[int] = []
    waiting = [process]
    while waiting:
        children = _children(waiting.pop())
        found += children
        waiting += children
    return found


def _children(process: int) -> list[int]:
    children: list[int] = []
    try:
        for task in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{task}/children") as file:
                children += map(int, file.read().split())
    except (FileNotFoundError, ProcessLookupError):
        return children
    return children


def usage_of(processes: Iterable[int]) -> Usage:
    """The sum over those of the processes that still exist."""
    tasks = memory = 0
    cpu = 0.0
    for process in processes:
        try:
            status = _fields(f"/proc/{process}/status")
            with open(f"/proc/{process}/stat") as file:
                # The name, in parentheses, may contain any character. The other fields begin
                # after the last parenthesis.
                times = file.read().rpartition(")")[2].split()[11:15]
        except (FileNotFoundError, ProcessLookupError):
            continue
        tasks += int(status.get("Threads", "1"))
        memory += sum(
            int(status.get(name, "0 kB").split()[0]) << 10
            for name in ("RssAnon", "RssShmem", "VmSwap")
        )
        cpu += sum(map(int, times)) / TICKS_PER_S
    return Usage(tasks, memory, cpu)


def tasks_of_user(user: int) -> int:
    """Processes and threads that a user has now."""
    count = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == user:
                count += int(_fields(f"/proc/{name}/status").get("Threads", "1"))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return count


def _fields(path: str) -> dict[str, str]:
    with open(path, errors="replace") as file:
        return {name: value.strip() for name, _, value in (line.partition(":") for line in file)}


def folder_exceeds(folder: str, limits: Limits) -> str | None:
    """The limit that a folder exceeds, or None. An unreadable folder counts as exceeding one."""
    count = size = 0
    waiting = [(folder, 0)]
    while waiting:
        path, depth = waiting.pop()
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    found = entry.stat(follow_symlinks=False)
                    count, size = count + 1, size + 512 * found.st_blocks
                    if count > limits.files or depth > DEEPEST:
                        return "files"
                    if stat.S_ISDIR(found.st_mode):
                        waiting.append((entry.path, depth + 1))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return "files"
    return "disk" if size > limits.disk_bytes else None


def deleted_exceed(process: int, limits: Limits) -> str | None:
    """ "disk" if deleted files that processes below `process` keep open exceed the limit."""
    sizes: dict[tuple[int, int], int] = {}
    for other in descendants(process):
        found = _open_files(other)
        if found is None:
            return "disk"  # it hides its open files
        for file in found:
            if stat.S_ISREG(file.st_mode) and file.st_nlink == 0:
                sizes[file.st_dev, file.st_ino] = 512 * file.st_blocks
    return "disk" if sum(sizes.values()) > limits.disk_bytes else None


def _open_files(process: int) -> list[os.stat_result] | None:
    """Status of each open file of a process. None if it cannot be read, as during execve."""
    for _ in range(LOOKS):
        try:
            return _open_files_now(process)
        except (FileNotFoundError, ProcessLookupError):
            return []
        except PermissionError:
            time.sleep(BETWEEN_LOOKS_S)
    return None


def _open_files_now(process: int) -> list[os.stat_result]:
    """Files of any live thread: the first may have ended, and all threads share them."""
    for task in os.listdir(f"/proc/{process}/task"):
        folder = f"/proc/{process}/task/{task}"
        try:
            names = os.listdir(f"{folder}/fd")
        except PermissionError:
            if "VmSize" not in _fields(f"{folder}/status"):
                continue  # the thread is ending, and has released its memory
            raise
        if names:
            return [found for name in names if (found := _stat(f"{folder}/fd/{name}"))]
    return []


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None
