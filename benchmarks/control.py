"""Measures the coordinator alone: CPU time and memory of a group. The shipped fakes stand for
engines and learner.

    python -m benchmarks.control [--plot FILE]

Time is virtual, so latencies cost nothing. The CPU time is that of coordinator, buffer, books and
fakes. Every run has a bound of 2 versions. Its batch is a third of the outstanding groups.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

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


def a_run(
    outstanding: int, seed: int, least_groups: int = LEAST_GROUPS
) -> tuple[Callable[[], None], int]:
    """A run with this many outstanding groups, and how many groups it trains."""
    batch = max(1, outstanding // (MAX_STALENESS + 1))
    steps = max(LEAST_STEPS, least_groups // batch)
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

    def run() -> None:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(coordinator.run())

    return run, steps * batch


def seconds_per_group(outstanding: int, seed: int) -> float:
    """CPU seconds of a group in a run with this many outstanding groups."""
    run, groups = a_run(outstanding, seed)
    gc.collect()
    began = time.process_time()
    run()
    return (time.process_time() - began) / groups


def calls_per_group(outstanding: int, least_groups: int) -> float:
    """Python functions that control and the fakes call for a group."""
    run, groups = a_run(outstanding, 0, least_groups)
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls / groups


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


def main(arguments: list[str]) -> int:
    """Measure and print. The exit code is 0 if every bar is met."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.control")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args(arguments)
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
    if options.plot is not None:
        from benchmarks.plots import Axes, draw_lines

        axes = Axes(
            "CPU time of a group in control", "outstanding groups", "µs of CPU a group", True
        )
        points = [(float(outstanding), 1e6 * used) for outstanding, used in found.items()]
        most = 1e6 / LEAST_GROUPS_PER_S
        draw_lines(options.plot, axes, {"control, with fakes": points}, ("bar", most))
    met = slowest >= LEAST_GROUPS_PER_S and spread <= MOST_SPREAD and size <= MOST_BYTES
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
