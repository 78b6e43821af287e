"""When the reference policy takes a version, on fakes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.contracts.messages import Scored
from asyncrl.contracts.protocols import Learner, Scores
from asyncrl.contracts.state import State
from asyncrl.control.coordinator import Coordinator, Parts, Schedule
from asyncrl.control.staleness import Staleness
from asyncrl.testing import (
    FakeCheckpoints,
    FakeLearner,
    FakePrompts,
    FakeRecorder,
    FakeReferencePolicy,
    FakeRollouts,
    FakeScores,
    FakeWeightSync,
    VirtualTimeLoop,
)

GROUPS = 4
NEW = State("run", 0, 0, 0, 0, ())


class Compared(FakeScores):
    """Scores that note the reference policy's version."""

    def __init__(self, rollouts: FakeRollouts, reference: FakeReferencePolicy, first: int) -> None:
        super().__init__(rollouts)
        self.reference, self.first = reference, first

    async def next(self) -> list[Scored]:
        found = await super().next()
        version = max(self.reference.versions, default=self.first)
        return [replace(scored, reference_version=version) for scored in found]


class Checked(FakeCheckpoints):
    """Notes the reference policy's version that each checkpoint finds."""

    def __init__(self, reference: FakeReferencePolicy, first: int) -> None:
        super().__init__()
        self.reference, self.first = reference, first
        self.found: list[tuple[int, int]] = []

    async def write(
        self, state: State, waiting: Sequence[Scored], learner: Learner, scores: Scores
    ) -> Path:
        version = max(self.reference.versions, default=self.first)
        self.found.append((state.version, version))
        return await super().write(state, waiting, learner, scores)


def trained(
    steps: int, every: int, max_staleness: int = 2, first: int = 0, seed: int = 0
) -> tuple[Coordinator, FakeReferencePolicy, Checked]:
    random_ = random.Random(seed)
    state = replace(NEW, version=first, steps_attempted=first)
    reference = FakeReferencePolicy(lambda _: random_.choice([0.0, 0.02]))
    checkpoints = Checked(reference, first // every * every if every else 0)
    rollouts = FakeRollouts(latency=lambda _: random_.choice([0, 0.001, 0.01]))
    parts = Parts(
        prompts=FakePrompts(),
        rollouts=rollouts,
        scores=Compared(rollouts, reference, checkpoints.first),
        learner=FakeLearner(GROUPS, latency=0.001, version=first),
        weights=FakeWeightSync(latency=lambda _: random_.choice([0, 0.03])),
        recorder=FakeRecorder(),
        checkpoints=checkpoints,
        reference=reference,
    )
    schedule = Schedule(
        steps, Staleness(max_staleness, GROUPS), checkpoint_every=1, refresh_every=every
    )
    coordinator = Coordinator(parts, schedule, state)
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(coordinator.run())
    return coordinator, reference, checkpoints


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("max_staleness", [0, 2, 4])
def test_the_reference_takes_each_due_version_and_no_other(max_staleness: int, seed: int) -> None:
    """Even while the version before is in publication. Checkpoints find it, and no token of a
    version is compared with an older reference than that version's."""
    coordinator, reference, checkpoints = trained(13, 3, max_staleness, seed=seed)
    assert reference.versions == [3, 6, 9, 12]
    weights, learner = coordinator.parts.weights, coordinator.parts.learner
    assert isinstance(weights, FakeWeightSync) and isinstance(learner, FakeLearner)
    assert set(reference.versions) <= set(weights.applied)
    assert checkpoints.found == [(version, version // 3 * 3) for version in range(1, 14)]
    assert len(learner.batches) == 13
    for version, batch in enumerate(learner.batches):
        for scored in batch:
            assert scored.reference_version is not None
            oldest = scored.oldest_version // 3 * 3
            assert oldest <= scored.reference_version <= version
            assert max_staleness or scored.reference_version == version // 3 * 3


def test_a_resumed_attempt_takes_the_next_due_version() -> None:
    assert trained(9, 3, first=6)[1].versions == [9]
    assert trained(9, 3, first=7)[1].versions == [9]


def test_a_frozen_reference_takes_none() -> None:
    assert trained(6, 0)[1].versions == []


def test_the_refresh_and_the_age_are_recorded() -> None:
    recorder = trained(7, 3, max_staleness=0)[0].parts.recorder
    assert isinstance(recorder, FakeRecorder)
    gathers = {
        version: "reference/refresh_s" in metrics
        for event, _, version, metrics in recorder.records
        if event == "gather"
    }
    assert [version for version, refreshed in gathers.items() if refreshed] == [3, 6]
    ages = [
        metrics["reference/age_mean"]
        for event, _, _, metrics in recorder.records
        if event == "step"
    ]
    assert ages == [0, 1, 2, 0, 1, 2, 0]
