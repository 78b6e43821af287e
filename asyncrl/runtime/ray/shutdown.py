"""Shutting down Ray while Python collects no garbage."""

from __future__ import annotations

import gc
import time

import ray

COLLECT_S = 10.0
"""Seconds to wait for a collection that another thread has started."""


def shut_down_ray() -> None:
    """`ray.shutdown`, during which Python collects no garbage.

    While Ray shuts down, it ends this process with exit code 1 as soon as a thread frees an
    ObjectRef. A finished Ray Data execution leaves hundreds of them in reference cycles. Python
    collects garbage in any thread that allocates, such as Serve's. A thread that frees the last
    reference to an ObjectRef itself still ends the process.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        _collect()
        ray.shutdown()
    finally:
        if enabled:
            gc.enable()


def _collect() -> None:
    """Collect all garbage. `gc.collect` returns at once while another thread collects."""
    end = time.monotonic() + COLLECT_S
    while time.monotonic() < end:
        before = gc.get_stats()[2]["collections"]
        gc.collect()
        if gc.get_stats()[2]["collections"] > before:
            return
        time.sleep(0.01)
