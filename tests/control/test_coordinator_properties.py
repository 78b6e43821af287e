"""The coordinator on a virtual clock, in situations that Hypothesis draws: no group exceeds the
staleness bound, no deadlock occurs, and no slot is lost."""

import asyncio
import itertools
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from asyncrl.contracts.errors import EvaluationLostError
from asyncrl.contracts.state import State
from asyncrl.control.concurrency import Concurrency
from asyncrl.control.coordinator import Coordinator, Parts, Schedule
from asyncrl.control.staleness import Staleness
from asyncrl.testing import (
    FakeCheckpoints,
    FakeLearner,
    FakeLogprobCheck,
    FakePrompts,
    FakeRecorder,
    FakeReplicas,
    FakeRollouts,
    FakeScores,
    FakeWeightSync,
    VirtualTimeLoop,
)

EXAMPLES, MORE_EXAMPLES = 500, 2000
NEVER = 1e9
MOST_RUNNING = 6
TIMEOUT_S = 1e5
"""Virtual seconds. A run that takes longer never ends."""
LATENCIES = (0.0, 0.0, 0.01, 0.1, 1.0, 30.0)


def cycle(strategy):
    """A short list, used as a function. Index i has the value of item i modulo the length."""
    return st.lists(strategy, min_size=1, max_size=7)


@dataclass(frozen=True)
class World:
    """One drawn situation. Lists are repeated: an ordinal o has the item o modulo the length."""

    max_staleness: int
    groups: int
    steps: int
    on_stale: str
    over_sampling: int
    filter_zero_variance: bool
    replicas: int
    latency: list[float]
    tokens: list[int]
    """Completion tokens of a group."""
    score_latency: list[float]
    outcomes: list[str]
    learner_latency: float
    skipped: list[bool]
    push_latency: list[float]
    push_fails: list[bool]
    lags: list[bool]
    checkpoint_every: int
    concurrency: int
    """First limit on running groups; 0 = no limit."""
    kv_use: list[float]
    evaluate_every: int
    evaluation_s: list[float]
    evaluate_in_flight: bool
    check_every: int
    colocate: bool
    leaves_device: bool
    copies: list[bool]
    """Whether a scored group arrives a second time."""
    interrupted_after: list[float] = field(default_factory=list)
    """Virtual seconds of each attempt except the last. After each, the run resumes from its newest
    checkpoint."""


@st.composite
def worlds(draw):
    on_stale = draw(st.sampled_from(["wait", "wait", "drop", "mask"]))
    return World(
        max_staleness=draw(st.integers(0, 4)),
        groups=draw(st.integers(1, 4)),
        steps=draw(st.integers(1, 8)),
        on_stale=on_stale,
        over_sampling=draw(st.integers(0, 4)) if on_stale == "drop" else 0,
        filter_zero_variance=draw(st.booleans()),
        replicas=draw(st.integers(1, 3)),
        latency=draw(cycle(st.sampled_from(LATENCIES))),
        tokens=draw(cycle(st.integers(0, 1000))),
        score_latency=draw(cycle(st.sampled_from(LATENCIES))),
        # At least one usable group in each cycle, so that the run can end.
        outcomes=[
            "ok",
            *draw(
                st.lists(
                    st.sampled_from(
                        [
                            "ok",
                            "ok",
                            "ok",
                            "equal",
                            "unusable",
                            "unscored",
                            "fails",
                            "never",
                            "dies",
                        ]
                    ),
                    max_size=6,
                )
            ),
        ],
        learner_latency=draw(st.sampled_from(LATENCIES)),
        skipped=[False, *draw(st.lists(st.booleans(), max_size=2))],
        push_latency=draw(cycle(st.sampled_from(LATENCIES))),
        push_fails=draw(cycle(st.booleans())),
        lags=draw(cycle(st.booleans())),
        checkpoint_every=draw(st.integers(0, 3)),
        concurrency=draw(st.integers(0, 5)),
        evaluate_every=draw(st.integers(0, 3)),
        evaluation_s=draw(cycle(st.sampled_from(LATENCIES))),
        evaluate_in_flight=draw(st.booleans()),
        check_every=draw(st.integers(0, 3)),
        colocate=draw(st.booleans()),
        leaves_device=draw(st.booleans()),
        copies=draw(cycle(st.booleans())),
        kv_use=draw(cycle(st.sampled_from((0.3, 0.87, 0.99)))),
        interrupted_after=draw(st.lists(st.sampled_from((0.0, 0.5, 5.0, 50.0)), max_size=2)),
    )


class Rollouts(FakeRollouts):
    """Also checks the slots and acknowledgments, independently of the coordinator's own counts."""

    coordinator: Coordinator
    recorder: FakeRecorder
    weights: FakeWeightSync

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.generating: dict[int, int] = {}
        """Group that is being generated → its version."""

    def _serve(self, ordinal):
        replica, version = super()._serve(ordinal)
        self.generating[ordinal] = version
        newest, groups = self.coordinator.progress.version, self.coordinator.buffer.groups
        bound = self.coordinator.schedule.staleness.max_staleness
        # A group that was dropped is aborted a moment later.
        in_use = {used for group, used in self.generating.items() if group in groups}
        masks = self.coordinator.schedule.staleness.on_stale == "mask"  # refused with adapters
        assert masks or all(newest - bound <= used <= newest for used in in_use), (
            "more than max_staleness + 1 versions are in use, so adapters would wait for a place"
        )
        return replica, version

    async def _generate(self, ordinal):
        try:
            finished = await super()._generate(ordinal)
            await self.weights.awake.wait()  # a replica at rest ends nothing
            return finished
        finally:
            self.generating.pop(ordinal, None)

    async def rollout(self, prompt, committed):
        staleness, progress = self.coordinator.schedule.staleness, self.coordinator.progress
        assert self.weights.awake.is_set(), "a group was admitted in the learner's shift"
        outstanding = len(self.admitted) + 1 - sum(progress.ended.values())
        lag = progress.version - committed
        if staleness.on_stale == "drop":
            left = [
                group for group in self.coordinator.buffer.groups.values() if not group.training
            ]
            assert all(
                progress.version - group.oldest_version <= staleness.max_staleness for group in left
            ), "a group is too stale, but was not dropped"
        concurrency = self.coordinator.parts.concurrency
        assert (
            concurrency is None
            or self.coordinator.buffer.running <= concurrency.limit <= MOST_RUNNING
        )
        assert (
            outstanding
            <= (staleness.max_staleness + 1 - lag) * staleness.groups_per_step
            + staleness.over_sampling
        )
        return await super().rollout(prompt, committed)

    async def ack(self, ordinals):
        groups = self.coordinator.buffer.groups
        assert all(
            ordinal not in groups or groups[ordinal].scored is not None for ordinal in ordinals
        ), "a group was acknowledged before the buffer had it"
        await super().ack(ordinals)


class Scores(FakeScores):
    """Returns some groups twice. The second time, the group comes alone."""

    def __init__(self, *arguments, copies, **settings):
        super().__init__(*arguments, **settings)
        self.copies, self.second = copies, []

    async def next(self):
        if self.second:
            await asyncio.sleep(0.01)
            return [self.second.pop()]
        arrived = await super().next()
        self.second += [scored for scored in arrived if self.copies(scored.ordinal)]
        return arrived


class Weights(FakeWeightSync):
    """Checks that no version is pushed during an evaluation. The exceptions are an evaluation in
    flight, and one with a held replica, which `FakeReplicas` checks."""

    coordinator: Coordinator
    alone = False
    """Whether an evaluation is running that needs every replica to keep its version."""
    evaluating = False

    async def push(self, manifest):
        device = self.coordinator.parts.device
        assert device is None or not device.on_device
        assert not self.alone and self.awake.is_set() != self.coordinator.schedule.colocate
        report = await super().push(manifest)
        assert not self.alone and self.awake.is_set() != self.coordinator.schedule.colocate
        return report

    async def rest(self):
        assert self.coordinator.schedule.colocate and self.awake.is_set() and not self.evaluating
        await super().rest()

    async def wake(self):
        device = self.coordinator.parts.device
        assert not self.awake.is_set() and (device is None or not device.on_device)
        await super().wake()

    def evaluation(self, seconds):
        async def evaluate(version, replica):
            schedule, replicas = self.coordinator.schedule, self.replicas
            assert version == self.applied[-1] and not self.alone
            held = replicas.held
            assert replica == (None if held is None else f"fake {held}")
            able = sum(current == version for current in replicas.versions)
            spared = (
                able > 1
                and not schedule.colocate
                and version < schedule.max_steps
                and not schedule.evaluate_in_flight
                and not self.coordinator.evaluation_lost
            )
            assert spared == (held is not None), (
                "a replica was held although it was needed, or not held although it was free"
            )
            self.alone = held is None and not schedule.evaluate_in_flight
            self.evaluating = True
            assert self.awake.is_set()
            await asyncio.sleep(seconds(version))
            assert self.awake.is_set()
            self.alone = self.evaluating = False
            if held is not None and replicas.held is None:
                raise EvaluationLostError("it died")
            assert held is None or replicas.versions[held] == version
            return {"eval/accuracy": 0.5}

        return evaluate


class Learner(FakeLearner):
    """Also checks that it computes only while the replicas of the same devices rest."""

    def __init__(self, weights, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.weights = weights

    async def take_device(self):
        assert not self.on_device and not self.weights.awake.is_set()
        await super().take_device()

    async def _work(self):
        assert self.weights is None or not self.weights.awake.is_set()
        await super()._work()
        assert self.weights is None or not self.weights.awake.is_set()


def rewards(outcome):
    return {"equal": (1.0, 1.0), "unusable": (1.0,)}.get(outcome, (0.0, 1.0))


def attempt(world, state, restored=()):
    """Make a coordinator on fakes for this situation."""

    def outcome(ordinal):
        return world.outcomes[ordinal % len(world.outcomes)]

    replicas = FakeReplicas(world.replicas)
    rollouts = Rollouts(
        latency=lambda ordinal: (
            NEVER if outcome(ordinal) == "never" else world.latency[ordinal % len(world.latency)]
        ),
        fails=lambda ordinal: "failed" if outcome(ordinal) == "fails" else None,
        dies=lambda ordinal: outcome(ordinal) == "dies",
        deadline_s=100.0,
        tokens=lambda ordinal: world.tokens[ordinal % len(world.tokens)],
        kv_use=lambda ordinal: world.kv_use[ordinal % len(world.kv_use)],
        replicas=replicas,
        updates_in_flight=world.on_stale == "mask",
    )
    scores = Scores(
        rollouts,
        latency=lambda ordinal: world.score_latency[ordinal % len(world.score_latency)],
        score=lambda ordinal: rewards(outcome(ordinal)),
        fails=lambda ordinal: "reward raised" if outcome(ordinal) == "unscored" else None,
        copies=lambda ordinal: world.copies[ordinal % len(world.copies)],
    )
    weights = Weights(
        latency=lambda version: world.push_latency[version % len(world.push_latency)],
        fails=lambda version, tries: (
            tries == 1 and world.push_fails[version % len(world.push_fails)]
        ),
        replicas=replicas,
        lags=lambda replica, version: world.lags[(replica + version) % len(world.lags)],
    )
    learner = Learner(
        weights if world.colocate else None,
        world.groups,
        latency=world.learner_latency,
        skips=lambda step: world.skipped[step % len(world.skipped)],
        version=state.version,
        max_staleness=world.max_staleness,
    )
    learner.on_device = not (world.colocate and world.leaves_device)
    parts = Parts(
        prompts=FakePrompts(
            state.frontier, [*state.finished_above, *(scored.ordinal for scored in restored)]
        ),
        rollouts=rollouts,
        scores=scores,
        learner=learner,
        weights=weights,
        recorder=FakeRecorder(),
        checkpoints=FakeCheckpoints(),
        evaluate=weights.evaluation(
            lambda version: world.evaluation_s[version % len(world.evaluation_s)]
        ),
        check=FakeLogprobCheck(),
        concurrency=Concurrency(world.concurrency, MOST_RUNNING) if world.concurrency else None,
        device=None if learner.on_device else learner,
    )
    staleness = Staleness(world.max_staleness, world.groups, world.on_stale, world.over_sampling)
    schedule = Schedule(
        world.steps,
        staleness,
        max_skipped_steps=10,
        filter_zero_variance=world.filter_zero_variance,
        checkpoint_every=world.checkpoint_every,
        check_every=world.check_every,
        evaluate_every=world.evaluate_every,
        evaluate_in_flight=world.evaluate_in_flight,
        colocate=world.colocate,
    )
    rollouts.weights = weights
    rollouts.coordinator, rollouts.recorder = (
        Coordinator(parts, schedule, state, restored),
        parts.recorder,
    )
    weights.coordinator = rollouts.coordinator
    return rollouts.coordinator


def run(coordinator, seconds=TIMEOUT_S):
    """Run to the end, or interrupt after `seconds` virtual seconds. Returns whether the run reached
    the end."""

    async def bounded():
        try:
            async with asyncio.timeout(seconds):
                await coordinator.run()
                return True
        except TimeoutError:
            return False

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(bounded())


def check_attempt(coordinator, first):
    """Check an attempt that has ended or was interrupted. `first` is the state that it started
    from."""
    restored = {ordinal for _, ordinal in first.waiting}
    outcomes = coordinator.parts.recorder.all_outcomes
    rollouts = coordinator.parts.rollouts
    counts = Counter(ended.outcome for ended in outcomes)
    left = (
        ordinal
        for ordinal in itertools.count(first.frontier)
        if ordinal not in {*first.finished_above, *restored}
    )
    to_do = [*restored, *itertools.islice(left, len(outcomes) - len(restored))]
    assert sorted(ended.ordinal for ended in outcomes) == sorted(to_do), (
        "an admitted group has no outcome or two, or ordinals were skipped"
    )
    made_before = {
        (ended.attempt, ended.ordinal) for ended in outcomes if ended.attempt != first.attempt
    }
    assert made_before == {*first.waiting} and not restored & {*rollouts.admitted}, (
        "a group from the checkpoint was generated again, or lost its attempt"
    )
    assert rollouts.admitted == sorted(rollouts.admitted) and {*rollouts.admitted} <= {
        ended.ordinal for ended in outcomes
    }
    assert counts["waiting"] == len(coordinator.buffer)
    assert all(
        0 <= ended.staleness <= coordinator.schedule.staleness.max_staleness
        for ended in outcomes
        if ended.outcome == "trained"
    )
    bound = coordinator.schedule.staleness.max_staleness
    for ended in outcomes:
        versions = rollouts.versions.get(ended.ordinal)
        if versions is None or ended.attempt != first.attempt:
            continue
        if ended.outcome == "trained":
            at = ended.trained_at_version
            fresh = [version for version in versions if at - version <= bound]
            assert ended.staleness == at - min(fresh)
            masked = coordinator.schedule.staleness.on_stale == "mask"
            assert masked or len(fresh) == len(versions)
        elif ended.reason == "stale":
            at = max(
                (
                    version
                    for event, step, version, _ in coordinator.parts.recorder.records
                    if event == "step" and step <= ended.step
                ),
                default=first.version,
            )
            assert at - versions[-1] > bound
    finished = (
        {ended.ordinal for ended in outcomes if ended.outcome != "waiting"}
        | set(range(first.frontier))
        | set(first.finished_above)
    )
    frontier = coordinator.state().frontier
    assert set(range(frontier)) <= finished and frontier not in finished
    assert set(coordinator.state().finished_above) == {
        ordinal for ordinal in finished if ordinal >= frontier
    }
    assert coordinator.parts.weights.applied == sorted(set(coordinator.parts.weights.applied))
    assert coordinator.parts.weights.replicas.held is None, "a replica was not released"


def bounded(examples):
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


@bounded(EXAMPLES)
@given(worlds())
def test_every_situation(world):
    check_situation(world)


@pytest.mark.slow
@bounded(MORE_EXAMPLES)
@given(worlds())
def test_more_situations(world):
    check_situation(world)


def check_situation(world):
    state, restored = State("run", 0, 0, 0, 0, ()), []
    for seconds in world.interrupted_after:
        coordinator = attempt(world, state, restored)
        ended = run(coordinator, seconds)
        check_attempt(coordinator, state)
        if ended:
            break
        checkpoints = coordinator.parts.checkpoints
        state, restored = (
            (checkpoints.states[-1], checkpoints.waiting[-1])
            if checkpoints.states
            else (state, restored)
        )
        state = replace(state, attempt=state.attempt + 1)
    coordinator = attempt(world, state, restored)
    assert run(coordinator)
    check_attempt(coordinator, state)

    progress, outcomes = (
        coordinator.progress,
        Counter(ended.outcome for ended in coordinator.parts.recorder.all_outcomes),
    )
    assert progress.version == progress.committed == world.steps
    evaluated = [
        version
        for event, _, version, _ in coordinator.parts.recorder.records
        if event == "evaluation"
    ]
    assert evaluated == sorted(set(evaluated)) and evaluated[-1] == world.steps
    assert coordinator.parts.check.generator_side[0] == state.version
    assert outcomes["trained"] == (world.steps - state.version) * world.groups
    if world.on_stale != "drop":
        reasons = {
            ended.reason
            for ended in coordinator.parts.recorder.all_outcomes
            if ended.outcome == "dropped"
        }
        assert reasons <= {
            "reward raised",
            "usable trajectories: 1, fewer than 2; masked: none",
            *(["stale"] if world.on_stale == "mask" else []),
        }, "`wait` dropped a group that could be trained"
    lengths = {
        ended.ordinal: ended.completion_tokens for ended in coordinator.parts.recorder.all_outcomes
    }
    assert all(
        length is None or length == world.tokens[ordinal % len(world.tokens)]
        for ordinal, length in lengths.items()
    )
    trained = [
        ended for ended in coordinator.parts.recorder.all_outcomes if ended.outcome == "trained"
    ]
    assert progress.trained_tokens == sum(
        world.tokens[ended.ordinal % len(world.tokens)] for ended in trained
    )
    equal = [
        ended
        for ended in coordinator.parts.recorder.all_outcomes
        if world.outcomes[ended.ordinal % len(world.outcomes)] == "equal"
    ]
    assert world.filter_zero_variance or not outcomes["filtered"]
    assert not world.filter_zero_variance or all(
        ended.outcome in ("filtered", "waiting", "dropped") for ended in equal
    )
