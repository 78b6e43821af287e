"""Observing a run: live table, metric sinks, alarms, watchdog, memory."""

from __future__ import annotations

from asyncrl.runtime.exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    MemoryPeak="memory",
    MemorySampler="memory",
    descendants="memory",
    process_name="memory",
)
