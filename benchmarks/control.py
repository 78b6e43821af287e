"""Measures the coordinator alone: CPU time and memory of a group. The shipped fakes stand for
engines and learner.

    python -m benchmarks.control

Time is virtual, so latencies cost nothing. The CPU time is that of coordinator, buffer, books and
fakes. Every run has a bound of 2 versions. Its batch is a third of the outstanding groups.
"""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import time
import tracemalloc

from asyncrl.contracts import Scored, State
from asyncrl.control import Buffer, Concurrency, Coordinator, Frontier, Parts, Schedule, Staleness
from asyncrl.testing import (
    FakeLearner,
    FakePrompts,
    FakeRecorder,
    FakeRollouts,
    FakeScores,
    FakeWeightSync,
    VirtualTimeLoop,
)

MAX_STALENESS, QUEUE = 2, 8
OUTSTANDING = (10, 100, 1000, 10_000, 50_000)
LEAST_GROUPS, LEAST_STEPS, REPEATS = 6000, 3 * (MAX_STALENESS + 1), 3
LEAST_GROUPS_PER_S, MOST_SPREAD, MOST_BYTES = 2000, 1.5, 2048


class CountingRecorder(FakeRecorder):
    """Keeps nothing, so that the figures are those of control."""

    def record(self, *event: object) -> None: ...

    def outcomes(self, *outcomes: object) -> None: ...


def seconds_per_group(outstanding: int, seed: int) -> float:
    """CPU seconds of a group in a run with this many outstanding groups."""
    batch = max(1, outstanding // (MAX_STALENESS + 1))
    steps = max(LEAST_STEPS, LEAST_GROUPS // batch)
    latencies = random.Random(seed)
    rollouts = FakeRollouts(latency=lambda _: latencies.expovariate(1))
    scores = FakeScores(rollouts, latency=lambda _: latencies.uniform(0, 0.02))
    parts = Parts(
        FakePrompts(),
        rollouts,
        scores,
        FakeLearner(batch, latency=0.1),
        FakeWeightSync(),
        CountingRecorder(),
        concurrency=Concurrency(outstanding, outstanding, QUEUE),
    )
    schedule = Schedule(steps, Staleness(MAX_STALENESS, batch))
    coordinator = Coordinator(parts, schedule, State("run", 0, 0, 0, 0, ()))
    gc.collect()
    began = time.process_time()
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(coordinator.run())
    return (time.process_time() - began) / (steps * batch)


def bytes_per_group(groups: int) -> float:
    """Memory of a ready group in the buffer, without its summary (`Scored`) and its row."""
    data = [Scored(ordinal, 0, None, 4, (0.0, 1.0), {}, 2, 0) for ordinal in range(groups)]
    tracemalloc.start()
    try:
        buffer = Buffer(Staleness(0, groups), Frontier())
        for scored in data:
            buffer.admit(scored.ordinal, 0)
            buffer.add_scored(scored)
        return tracemalloc.get_traced_memory()[0] / groups
    finally:
        tracemalloc.stop()


def main() -> int:
    """Measure and print. The exit code is 0 if every bar is met."""
    seconds_per_group(OUTSTANDING[0], 0)  # imports, and the first calls of everything
    found: dict[int, float] = {}
    for outstanding in OUTSTANDING:
        runs = [seconds_per_group(outstanding, seed) for seed in range(REPEATS)]
        found[outstanding] = sorted(runs)[REPEATS // 2]
        first = found[OUTSTANDING[0]]
        print(
            f"{outstanding:6d} outstanding: {1e6 * found[outstanding]:6.0f} µs of CPU a group,"
            f" {1 / found[outstanding]:6.0f} groups/s, {found[outstanding] / first:5.2f} x"
            f" {OUTSTANDING[0]} outstanding",
            flush=True,
        )
    size = bytes_per_group(OUTSTANDING[-1])
    slowest, spread = 1 / max(found.values()), max(found.values()) / min(found.values())
    print(f"memory of a buffered group without its data: {size:.0f} bytes")
    print(
        f"bars: at least {LEAST_GROUPS_PER_S} groups/s ({slowest:.0f}), slowest over fastest at"
        f" most {MOST_SPREAD} ({spread:.2f}), at most {MOST_BYTES} bytes a group ({size:.0f})"
    )
    met = slowest >= LEAST_GROUPS_PER_S and spread <= MOST_SPREAD and size <= MOST_BYTES
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
