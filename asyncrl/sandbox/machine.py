"""What this machine allows the process: processors, memory and processes. A container, a batch
system or systemd may allow less than the machine has."""

from __future__ import annotations

import contextlib
import math
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
"""Where the kernel shows control groups."""
OWN = Path("/proc/self/cgroup")
"""The control groups of this process. A line is ID:CONTROLLERS:PATH; version 2 has no
controllers."""
RESOURCE_CAPABILITIES = 1 << 24 | 1 << 21
"""CAP_SYS_RESOURCE and CAP_SYS_ADMIN, each of which lifts the limit on processes."""


@dataclass(frozen=True, slots=True)
class ProcessLimit:
    """A limit on processes. Each thread counts as one."""

    name: str
    most: int
    used: int

    @property
    def free(self) -> int:
        """How many can still start."""
        return max(0, self.most - self.used)


def usable_cpus() -> int:
    """The processors that this process may use: of its affinity, and of its control groups'
    quotas, rounded down. At least 1."""
    quotas = [quota for group in _groups("cpu") if (quota := _quota(group)) is not None]
    return max(1, math.floor(min([len(os.sched_getaffinity(0)), *quotas])))


def usable_memory() -> tuple[int, int]:
    """(Total, available) bytes of memory for this process: of the machine, or of the control group
    with the least. Memory of files that a group can drop is available."""
    machine = _fields(Path("/proc/meminfo"))  # in KiB
    total, available = machine["MemTotal"] << 10, machine["MemAvailable"] << 10
    for group in _groups("memory"):
        limit = _number(group, "memory.max", "memory.limit_in_bytes")
        used = _number(group, "memory.current", "memory.usage_in_bytes")
        if limit is None or limit >= total:
            continue
        total = min(total, limit)
        if used is not None:
            available = min(available, max(0, limit - used + _inactive_files(group)))
    return total, min(available, total)


def process_limit() -> ProcessLimit | None:
    """The limit under which the fewest processes can still start. None: there is no limit."""
    found = []
    for group in _groups("pids"):
        most, used = _number(group, "pids.max"), _number(group, "pids.current")
        if most is not None and used is not None:
            found.append(ProcessLimit(f"pids.max of the control group {group}", most, used))
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if most != resource.RLIM_INFINITY and not _exempt():
        found.append(ProcessLimit("`ulimit -u` of this user", most, _threads_of(os.getuid())))
    return min(found, key=lambda limit: limit.free, default=None)


def _groups(controller: str) -> Iterator[Path]:
    """The folders of this process's control groups, from its own to the root, in both versions.
    A container shows its own group at the root, and may name the path that the host sees."""
    try:
        lines = OWN.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        names = (controller, controllers) if controllers else ("unified", "")
        roots = [ROOT / name for name in names]
        root = next((one for one in roots if one.is_dir()), None)
        if root is None:
            continue
        own = root / path.lstrip("/")
        inside = ".." not in own.parts  # a group outside the part that this process sees
        for group in (own, *own.parents) if inside else (root,):
            if group.is_relative_to(root) and group.is_dir():
                yield group


def _quota(group: Path) -> float | None:
    """Processors that the group may use on average. None: as many as there are."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (group / "cpu.max").read_text().split()
        return int(quota) / int(period)  # `max` is no number
    allowed, each = _number(group, "cpu.cfs_quota_us"), _number(group, "cpu.cfs_period_us")
    return allowed / each if allowed and each and allowed > 0 else None


def _number(group: Path, *names: str) -> int | None:
    """The number in the first of these files that there is; None for `max` or without a file."""
    for name in names:
        with contextlib.suppress(OSError, ValueError):
            return int((group / name).read_text())
    return None


def _inactive_files(group: Path) -> int:
    """Bytes of files in memory that the kernel can drop. Version 1 counts those of groups below it
    under a name of their own."""
    with contextlib.suppress(OSError, ValueError):
        lines = (group / "memory.stat").read_text().splitlines()
        counts = dict(line.split() for line in lines)
        return int(counts.get("total_inactive_file", counts.get("inactive_file", 0)))
    return 0


def _exempt() -> bool:
    """Whether the kernel exempts this process from `ulimit -u`."""
    status = Path("/proc/self/status").read_text().splitlines()
    able = next((line.split()[1] for line in status if line.startswith("CapEff:")), "0")
    return os.getuid() == 0 or bool(int(able, 16) & RESOURCE_CAPABILITIES)


def _threads_of(user: int) -> int:
    """Threads of all processes of a user that this process sees."""
    count = 0
    for process in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError, KeyError):
            fields = _fields(process)
            count += fields["Threads"] if fields["Uid"] == user else 0
    return count


def _fields(file: Path) -> dict[str, int]:
    """The first number of each line `NAME: …`."""
    rows = (line.partition(":")[::2] for line in file.read_text().splitlines())
    words = ((name, text.split()) for name, text in rows)
    return {name: int(found[0]) for name, found in words if found and found[0].isdecimal()}
