"""The coordinator and its staleness rule: plain asyncio over small protocols."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.runtime.exports import lazy_exports

if TYPE_CHECKING:
    from asyncrl.control.buffer import Buffer as Buffer, Frontier as Frontier
    from asyncrl.control.concurrency import Concurrency as Concurrency
    from asyncrl.control.coordinator import (
        Coordinator as Coordinator,
        Parts as Parts,
        Schedule as Schedule,
    )
    from asyncrl.control.staleness import Staleness as Staleness

__getattr__ = lazy_exports(
    __name__,
    Buffer="buffer",
    Concurrency="concurrency",
    Coordinator="coordinator",
    Frontier="buffer",
    Parts="coordinator",
    Schedule="coordinator",
    Staleness="staleness",
)
