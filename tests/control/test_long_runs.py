"""A run of 100,000 groups on fakes. The memory, files and time of a group do not grow during the
run."""

import asyncio
import gc
import os
import time
import tracemalloc
from itertools import pairwise
from pathlib import Path

import pyarrow.dataset  # noqa: F401  (here, because memory is measured)
import pytest

from asyncrl.contracts.state import State
from asyncrl.control.coordinator import Coordinator, Parts, Schedule
from asyncrl.control.staleness import Staleness
from asyncrl.rundir.outcomes import OutcomesWriter, read_outcomes
from asyncrl.testing import (
    FakeLearner,
    FakePrompts,
    FakeRecorder,
    FakeRollouts,
    FakeScores,
    FakeWeightSync,
    VirtualTimeLoop,
)

GROUPS_PER_STEP = 50


class OnDisk(FakeRecorder):
    """A recorder that keeps outcomes in files and not in memory."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.writer = OutcomesWriter(directory, 0)
        self.seen: list[tuple[int, int, float]] = []
        """Bytes allocated by Python, files, and CPU seconds, at each tenth of the run."""

    def record(self, event, step, version, metrics):
        if event == "step" and step % (self.steps // 10) == 0:
            self.rollouts.admitted.clear()  # only the fake keeps these
            self.rollouts.versions.clear()
            gc.collect()
            self.writer.flush()
            self.seen.append(
                (
                    tracemalloc.get_traced_memory()[0],
                    len(os.listdir(self.writer.directory)),
                    time.process_time(),
                )
            )

    def outcomes(self, outcomes, outstanding):
        self.writer.write(outcomes, outstanding)

    async def flushed(self):
        self.writer.flush()


class Forgetful(FakeLearner):
    """A learner that keeps no batches."""

    async def step(self, batch):
        result = await super().step(batch)
        self.batches.clear()
        return result


def train(directory: Path, groups: int) -> OnDisk:
    recorder = OnDisk(directory)
    recorder.steps = groups // GROUPS_PER_STEP
    rollouts = FakeRollouts(
        latency=lambda ordinal: 0.01 * (ordinal % 7),
        fails=lambda ordinal: "deadline" if ordinal % 97 == 0 else None,
    )
    recorder.rollouts = rollouts
    parts = Parts(
        FakePrompts(),
        rollouts,
        FakeScores(rollouts),
        Forgetful(GROUPS_PER_STEP, latency=0.1),
        FakeWeightSync(),
        recorder,
    )
    schedule = Schedule(recorder.steps, Staleness(2, GROUPS_PER_STEP, "wait"))
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(Coordinator(parts, schedule, State("run", 0, 0, 0, 0, ())).run())
    return recorder


@pytest.mark.parametrize(
    "groups",
    [pytest.param(5_000, marks=pytest.mark.slow), pytest.param(100_000, marks=pytest.mark.faults)],
)
def test_the_cost_of_a_group_does_not_grow(tmp_path, groups):
    train(tmp_path / "first", 1000)  # imports modules, before memory is measured
    tracemalloc.start()
    try:
        recorder = train(tmp_path / "outcomes", groups)
    finally:
        tracemalloc.stop()
    memory, files, seconds = zip(*recorder.seen, strict=True)
    lasted = [later - before for before, later in pairwise(seconds)]
    print(
        f"\n{groups:,} groups: memory {memory[1]:,} → {memory[-1]:,} bytes, at most {max(files)}"
        f" files, {lasted[0]:.2f} → {lasted[-1]:.2f} s for each tenth"
    )
    assert max(memory) < memory[1] + 100_000 + groups, (
        "more than a byte for each group, plus a constant for what is in flight"
    )
    assert max(files) <= 2 * 64
    outcomes = [
        row
        for path in sorted((tmp_path / "outcomes").iterdir())
        for row in read_outcomes(path)[0]["ordinal"].to_pylist()
    ]
    assert len(outcomes) == len(set(outcomes)) >= groups
