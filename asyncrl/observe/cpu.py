"""CPU time of a run's processes."""

from __future__ import annotations

from collections.abc import Mapping

import psutil

from asyncrl.observe.memory import descendants, process_name


def cpu_seconds(root: psutil.Process) -> dict[str, float]:
    """Name → CPU seconds so far of the processes of that name: `driver` for the root, the others
    as `process_name` names them. A process that has ended counts as part of its parent."""
    found: dict[str, float] = {}
    for process in descendants(root):
        try:
            times = process.cpu_times()
            name = "driver" if process == root else process_name(process)
        except psutil.Error:
            continue
        used = times.user + times.system + times.children_user + times.children_system
        found[name] = found.get(name, 0.0) + used
    return found


def cpu_seconds_between(
    earlier: Mapping[str, float], later: Mapping[str, float]
) -> dict[str, float]:
    """Name → CPU seconds between two calls of `cpu_seconds`. A process that ended in between moved
    to its parent's name, so a name can have less than 0. The sum is right."""
    return {name: later.get(name, 0.0) - earlier.get(name, 0.0) for name in {*earlier, *later}}
