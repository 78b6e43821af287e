"""Observing a run: live table, metric sinks, alarms, watchdog, memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.runtime.exports import lazy_exports

if TYPE_CHECKING:
    from asyncrl.observe.cpu import (
        cpu_seconds as cpu_seconds,
        cpu_seconds_between as cpu_seconds_between,
    )
    from asyncrl.observe.memory import (
        MemoryPeak as MemoryPeak,
        MemorySampler as MemorySampler,
        descendants as descendants,
        process_name as process_name,
    )

__getattr__ = lazy_exports(
    __name__,
    cpu_seconds="cpu",
    cpu_seconds_between="cpu",
    descendants="memory",
    MemoryPeak="memory",
    MemorySampler="memory",
    process_name="memory",
)
