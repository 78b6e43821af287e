"""The coordinator and its staleness rule: plain asyncio over small protocols."""

from __future__ import annotations

from asyncrl.runtime.exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    Coordinator="coordinator",
    Parts="coordinator",
    Schedule="coordinator",
    Staleness="staleness",
)
