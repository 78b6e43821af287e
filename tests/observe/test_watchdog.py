"""The watchdog names each stage that hangs, and no stage that is only slow."""

import asyncio
from functools import partial

import pytest
from small_config import small_config

from asyncrl.contracts.state import State
from asyncrl.control.coordinator import Coordinator, Parts, Schedule
from asyncrl.control.staleness import Staleness
from asyncrl.observe.live import Live
from asyncrl.observe.watchdog import Watchdog, current_stage, marks
from asyncrl.preflight.specs import observe_spec
from asyncrl.run.attempt import Attempt
from asyncrl.testing import (
    FakeLearner,
    FakePrompts,
    FakeRecorder,
    FakeRollouts,
    FakeScores,
    FakeWeightSync,
    VirtualTimeLoop,
)

FOREVER = 1e9


class NoPrompts(FakePrompts):
    async def next(self):
        await asyncio.sleep(FOREVER)


FREE = Schedule(10**6, Staleness(1, 4))
SHIFTS = Schedule(10**6, Staleness(0, 4), colocate=True)


class Shifts(FakeWeightSync):
    """Hangs at the rest or the wake of this number."""

    def __init__(self, rest=None, wake=None):
        super().__init__()
        self.hangs = {"rest": rest, "wake": wake}
        self.calls = {"rest": 0, "wake": 0}

    async def _call(self, name):
        self.calls[name] += 1
        if self.calls[name] == self.hangs[name]:
            await asyncio.sleep(FOREVER)

    async def rest(self):
        await self._call("rest")
        await super().rest()

    async def wake(self):
        await self._call("wake")
        await super().wake()


class OnDevice(FakeLearner):
    """Hangs when it takes or leaves the device for this time."""

    def __init__(self, take=None, leave=None):
        super().__init__(4)
        self.on_device = False
        self.hangs = {"take": take, "leave": leave}
        self.calls = {"take": 0, "leave": 0}

    async def _call(self, name):
        self.calls[name] += 1
        if self.calls[name] == self.hangs[name]:
            await asyncio.sleep(FOREVER)

    async def take_device(self):
        await self._call("take")
        await super().take_device()

    async def leave_device(self):
        await self._call("leave")
        await super().leave_device()


class CheckInShift:
    """A log-prob check that computes in a shift of the learner."""

    async def at_gather(self, version):
        return None

    async def after_commit(self, version, learner_shift):
        async with learner_shift():
            return {}


def watched(
    stall_s=60.0,
    seconds=200.0,
    describe=None,
    prompts=None,
    evaluate=None,
    check=None,
    schedule=FREE,
    **parts,
):
    """The watchdog's reports in this many virtual seconds of a run."""
    reports = []

    async def nothing(stage):
        return None, f"asked {stage}"

    async def both():
        rollouts = parts.get("rollouts") or FakeRollouts()
        scores = parts["scores"](rollouts) if "scores" in parts else FakeScores(rollouts)
        learner, weights = (
            parts.get("learner") or FakeLearner(4),
            parts.get("weights") or FakeWeightSync(),
        )
        all_parts = Parts(
            prompts or FakePrompts(),
            rollouts,
            scores,
            learner,
            weights,
            FakeRecorder(),
            evaluate=evaluate,
            check=check,
            device=learner if isinstance(learner, OnDevice) else None,
        )
        coordinator = Coordinator(all_parts, schedule, State("run", 0, 0, 0, 0, ()))
        loop = asyncio.get_running_loop()
        progress, stage = partial(marks, coordinator), partial(current_stage, coordinator)
        watchdog = Watchdog(
            progress,
            stage,
            stall_s,
            describe or nothing,
            lambda stage, seconds, workers: reports.append((stage, seconds, workers)),
            loop.time,
        )
        running = asyncio.create_task(coordinator.run())
        async with watchdog.watching():
            await asyncio.sleep(seconds)
        running.cancel()
        await scores.close()
        await asyncio.gather(running, *scores._tasks, return_exceptions=True)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(both())
    return reports


async def evaluate_forever(version, replica):
    await asyncio.sleep(FOREVER)
    return {}


@pytest.mark.parametrize(
    ("stage", "waits_for", "parts"),
    [
        ("learning", "a step on 4 groups at version 0", {"learner": FakeLearner(4, latency=0.0)}),
        (
            "generation",
            "groups that are being generated",
            {"rollouts": FakeRollouts(latency=lambda _: FOREVER)},
        ),
        (
            "scoring",
            "the rewards of 8 groups",
            {"scores": lambda rollouts: FakeScores(rollouts, latency=lambda _: FOREVER)},
        ),
        (
            "publishing",
            "the replicas to apply version 0",
            {"weights": FakeWeightSync(latency=lambda _: FOREVER)},
        ),
        ("prompts", "no prompt arrives", {"prompts": NoPrompts()}),
        (
            "evaluation",
            "held-out prompts at version 0",
            {"evaluate": evaluate_forever, "rollouts": FakeRollouts(latency=lambda _: FOREVER)},
        ),
        (
            "generation",
            "the replicas to rest",
            {"weights": Shifts(rest=1), "schedule": SHIFTS},
        ),
        (
            "generation",
            "the replicas to wake",
            {"weights": Shifts(wake=1), "schedule": SHIFTS},
        ),
        *(
            (
                "learning",
                waits_for,
                {
                    "learner": OnDevice(**{call: number}),
                    "schedule": SHIFTS,
                    "check": CheckInShift(),
                },
            )
            for call, waits_for in (
                ("take", "the ranks to load their states onto the GPU"),
                ("leave", "the ranks to leave the GPU"),
            )
            for number in (1, 2, 3)
        ),
    ],
)
def test_the_stage_that_hangs_is_named(stage, waits_for, parts):
    if waits_for.startswith("a step on"):

        class Stuck(FakeLearner):
            async def step(self, batch):
                await asyncio.sleep(FOREVER)

        parts = {"learner": Stuck(4)}
    reports = watched(**parts)
    assert [stalled.name for stalled, _, _ in reports] == [stage] * len(reports) and 2 <= len(
        reports
    ) <= 3
    assert waits_for in reports[0][0].waits_for and reports[0][2] == f"asked {stage}"
    assert 60 <= reports[0][1] <= 70 and 120 <= reports[1][1] <= 140


def test_a_slow_run_is_not_reported():
    assert (
        watched(
            seconds=3000,
            rollouts=FakeRollouts(latency=lambda _: 50.0),
            learner=FakeLearner(4, latency=40.0),
        )
        == []
    )


def test_completions_that_grow_are_progress():
    tokens = iter(range(100))

    async def counted(stage):
        return next(tokens), "tokens flow"

    assert (
        watched(seconds=1000, rollouts=FakeRollouts(latency=lambda _: 900.0), describe=counted)
        == []
    )


async def test_a_learner_that_works_alone_is_watched_too(tmp_path):
    """The learner works alone before and after training: loading, warm start, saving."""
    reported = asyncio.Event()
    config = small_config(observe={"stall_s": 0.2})
    recorder, live = FakeRecorder(), Live(observe_spec(config), 0.0)
    live.phase("warm start")
    live.note = lambda text: reported.set()

    class Directory:
        state = State("r", 0, version=2, steps_attempted=3, frontier=0, finished_above=())

    class Learner:
        answered = 0

        async def describe(self):
            return None, "rank 0: all_reduce"

    attempt = object.__new__(Attempt)
    attempt.config, attempt.live, attempt.recorder = config, live, recorder
    attempt.coordinator, attempt.directory = None, Directory()
    learner = Learner()
    async with asyncio.timeout(20), attempt.watched(learner):
        for _ in range(20):
            learner.answered += 1
            await asyncio.sleep(0.05)
        assert recorder.records == []
        await reported.wait()
    event, step, version, record = recorder.records[0]
    assert (event, step, version, record["stage"], record["workers"]) == (
        "stall",
        3,
        2,
        "learning",
        "rank 0: all_reduce",
    )
    assert (
        record["waits_for"] == "an answer of the learner's ranks, after 20 calls; phase: warm start"
        and record["stall_s"] >= 0.2
    )


def test_workers_that_do_not_answer_or_are_dead():
    async def silent(stage):
        await asyncio.sleep(FOREVER)

    async def dead(stage):
        raise ConnectionError("gone\nfor good")

    stuck = {"rollouts": FakeRollouts(latency=lambda _: FOREVER)}
    assert "did not answer within 10 s" in watched(describe=silent, **stuck)[0][2]
    assert (
        watched(describe=dead, **stuck)[0][2]
        == "its workers cannot be asked: ConnectionError: gone"
    )
