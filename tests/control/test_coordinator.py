"""The whole control flow, on fakes."""

import asyncio
import hashlib
import random
from collections import Counter
from dataclasses import replace

import pytest

from asyncrl.contracts.errors import (
    EvaluationLostError,
    PartDiedError,
    RolloutFailedError,
    RunStoppedError,
)
from asyncrl.contracts.messages import Scored, ScoredBaseline
from asyncrl.contracts.outcomes import WAYS_OUT
from asyncrl.contracts.state import State
from asyncrl.control.buffer import Frontier
from asyncrl.control.coordinator import Coordinator, Parts, Schedule
from asyncrl.control.staleness import Staleness
from asyncrl.rundir.checkpoint import CheckpointStore
from asyncrl.runtime.files.shared import size_and_checksum
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

NEW = State("run", 0, 0, 0, 0, ())


def make(
    steps=6,
    max_staleness=2,
    groups=4,
    state=NEW,
    *,
    rollouts=None,
    learner=None,
    weights=None,
    scores=None,
    recorder=None,
    restored=(),
    on_stale="wait",
    **settings,
):
    rollouts = rollouts or FakeRollouts()
    parts = Parts(
        prompts=FakePrompts(
            state.frontier, [*state.finished_above, *(scored.ordinal for scored in restored)]
        ),
        rollouts=rollouts,
        scores=scores(rollouts) if scores else FakeScores(rollouts),
        learner=learner or FakeLearner(groups, version=state.version),
        weights=weights or FakeWeightSync(),
        recorder=recorder or FakeRecorder(),
        **{
            name: value
            for name, value in settings.items()
            if name in ("checkpoints", "evaluate", "check", "device")
        },
    )
    options = {
        name: value
        for name, value in settings.items()
        if name not in ("checkpoints", "evaluate", "check", "device")
    }
    return Coordinator(
        parts,
        Schedule(steps, Staleness(max_staleness, groups, on_stale), **options),
        state,
        restored,
    )


def run(coordinator):
    async def bounded():
        return await asyncio.wait_for(coordinator.run(), 20)

    return asyncio.run(bounded())


def test_trains_to_the_last_version_and_commits_it():
    coordinator = make(steps=6)
    progress = run(coordinator)
    assert (progress.version, progress.committed, progress.phase) == (6, 6, "done")
    assert progress.ended == {"trained": 24}
    assert coordinator.parts.weights.applied[0] == 0 and coordinator.parts.weights.applied[-1] == 6
    assert len(coordinator.buffer) == 0 and coordinator.buffer.frontier.lowest == 24
    assert [ended.ordinal for ended in coordinator.parts.recorder.all_outcomes] == sorted(range(24))


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4])
def test_bound_holds_under_random_latencies(max_staleness):
    random_ = random.Random(max_staleness)
    coordinator = make(
        steps=30,
        max_staleness=max_staleness,
        rollouts=FakeRollouts(latency=lambda _: random_.choice([0, 0, 0.001, 0.01])),
        learner=FakeLearner(4, latency=0.001),
        weights=FakeWeightSync(latency=lambda _: random_.choice([0, 0.005])),
    )
    run(coordinator)
    trained = coordinator.parts.recorder.all_outcomes
    assert len(trained) == 120 and max(ended.staleness for ended in trained) <= max_staleness
    assert len({ended.ordinal for ended in trained}) == 120


def test_staleness_zero_is_synchronous():
    coordinator = make(steps=5, max_staleness=0)
    run(coordinator)
    assert coordinator.parts.weights.applied == [0, 1, 2, 3, 4, 5]
    assert [
        [scored.ordinal for scored in batch] for batch in coordinator.parts.learner.batches
    ] == [list(range(i, i + 4)) for i in range(0, 20, 4)]
    assert all(ended.staleness == 0 for ended in coordinator.parts.recorder.all_outcomes)


@pytest.mark.parametrize("seed", range(5))
def test_staleness_zero_trains_the_same_batches_for_any_latencies(seed):
    random_ = random.Random(seed)
    coordinator = make(
        steps=12,
        max_staleness=0,
        rollouts=FakeRollouts(latency=lambda _: random_.random()),
        scores=lambda rollouts: FakeScores(rollouts, latency=lambda _: random_.random()),
        learner=FakeLearner(4, latency=random_.random()),
        weights=FakeWeightSync(latency=lambda _: random_.random()),
    )
    on_virtual_time(coordinator)
    batches = [
        [(scored.ordinal, scored.oldest_version, scored.rewards) for scored in batch]
        for batch in coordinator.parts.learner.batches
    ]
    assert batches == [
        [(4 * step + place, step, (0.0, 1.0)) for place in range(4)] for step in range(12)
    ]


def on_virtual_time(coordinator):
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(coordinator.run())


def under_drop(staleness, **parts):
    coordinator = make(
        max_staleness=staleness.max_staleness, learner=FakeLearner(4, latency=0.1), **parts
    )
    coordinator.schedule = replace(coordinator.schedule, staleness=staleness)
    coordinator.buffer.staleness = staleness
    return coordinator


def test_over_sampling_admits_more_groups_and_trains_the_fastest():
    class Counting(FakeRollouts):
        most = 0

        async def rollout(self, prompt, committed):
            self.most = max(self.most, len(coordinator.buffer))
            return await super().rollout(prompt, committed)

    rollouts = Counting(latency=lambda ordinal: 100.0 if ordinal % 3 == 0 else 1.0)
    coordinator = under_drop(Staleness(0, 4, "drop", over_sampling=3), steps=5, rollouts=rollouts)
    progress = on_virtual_time(coordinator)
    assert progress.ended["trained"] == 20 and progress.ended["dropped"] > 0 and rollouts.most == 7
    assert not any(
        ended.ordinal % 3 == 0
        for ended in coordinator.parts.recorder.all_outcomes
        if ended.outcome == "trained"
    )


def test_a_dropped_rollout_is_cancelled_and_everything_scored_is_acknowledged():
    class CountedSession(FakeRollouts):
        cancelled = 0

        async def rollout(self, prompt, committed):
            try:
                return await super().rollout(prompt, committed)
            except asyncio.CancelledError:
                self.cancelled += prompt.ordinal not in coordinator.buffer
                raise

    rollouts = CountedSession(latency=lambda ordinal: 1e6 if ordinal % 4 == 3 else 1.0)
    coordinator = under_drop(Staleness(1, 4, "drop"), steps=10, rollouts=rollouts)
    progress = on_virtual_time(coordinator)
    assert rollouts.cancelled == progress.ended["dropped"] > 0
    waiting = {
        ended.ordinal
        for ended in coordinator.parts.recorder.all_outcomes
        if ended.outcome == "waiting"
    }
    assert rollouts.unacked <= waiting


def test_a_group_that_was_scored_before_its_retry_failed_is_trained():
    class Lost(FakeRollouts):
        """Group 1's worker dies after its group is taken for scoring, and the retry fails."""

        async def rollout(self, prompt, committed):
            finished = await super().rollout(prompt, committed)
            if prompt.ordinal == 1:
                await asyncio.sleep(0.5)
                raise RolloutFailedError("the retry was too late")
            return finished

    coordinator = make(
        steps=2, max_staleness=0, rollouts=Lost(), learner=FakeLearner(4, latency=1.0)
    )
    assert on_virtual_time(coordinator).ended == {"trained": 8}


def test_a_second_copy_of_a_scored_group_changes_nothing():
    class Twice(FakeRollouts):
        """Group 1's worker seems dead after its group is taken for scoring. The group is generated
        again, with newer weights and more tokens."""

        async def rollout(self, prompt, committed):
            finished = await super().rollout(prompt, committed)
            if prompt.ordinal == 1:
                await asyncio.sleep(0.5)
                return replace(finished, oldest_version=finished.oldest_version + 1, tokens=99)
            return finished

    coordinator = make(
        steps=2, max_staleness=1, rollouts=Twice(), learner=FakeLearner(4, latency=1.0)
    )
    assert on_virtual_time(coordinator).ended == {"trained": 8}
    assert {
        ended.completion_tokens
        for ended in coordinator.parts.recorder.all_outcomes
        if ended.outcome == "trained"
    } == {4}


def test_a_run_without_groups_to_train_on_ends_with_an_error():
    coordinator = make(
        scores=lambda rollouts: FakeScores(rollouts, score=lambda ordinal: (1.0, 1.0)),
        filter_zero_variance=True,
    )
    with pytest.raises(
        RuntimeError, match=r"no step since 401 groups ended \(401 filtered; last: zero variance\)"
    ):
        on_virtual_time(coordinator)
    assert len(coordinator.parts.recorder.all_outcomes) >= 401


def test_a_group_that_the_users_filter_rejects_is_filtered_and_replaced():
    coordinator = make(
        scores=lambda rollouts: FakeScores(
            rollouts, fails=lambda ordinal: "filtered: m:f returned False" if ordinal == 1 else None
        )
    )
    progress = on_virtual_time(coordinator)
    assert progress.ended["filtered"] == 1 and "dropped" not in progress.ended
    assert {
        ended.reason
        for ended in coordinator.parts.recorder.all_outcomes
        if ended.outcome == "filtered"
    } == {"m:f returned False"}


def test_groups_of_one_with_baselines_have_one_outcome_each():
    """The baseline's tokens count as generated, and not as trained or lost. A group without its
    reward is dropped with the reason. Only an equal reward of the baseline makes a group
    useless."""

    class WithBaselines(FakeRollouts):
        async def _generate(self, ordinal):
            return replace(await super()._generate(ordinal), baseline_tokens=3)

    class Greedy(FakeScores):
        async def next(self):
            return [
                replace(one, baseline=ScoredBaseline(of_greedy(one.ordinal), 3, False))
                for one in await super().next()
            ]

    def of_greedy(ordinal):
        return None if ordinal % 5 == 0 else 1.0 if ordinal % 5 == 1 else 0.0

    coordinator = make(
        steps=10,
        rollouts=WithBaselines(),
        scores=lambda rollouts: Greedy(
            rollouts,
            score=lambda ordinal: (1.0,),
            fails=lambda ordinal: "no baseline: it failed" if ordinal % 5 == 0 else None,
        ),
        least_usable=1,
        filter_zero_variance=True,
    )
    progress = on_virtual_time(coordinator)
    ended = coordinator.parts.recorder.all_outcomes
    known = {0: "dropped", 1: "filtered"}
    assert {(one.ordinal % 5, one.outcome) for one in ended if one.outcome != "waiting"} == {
        (rest, known.get(rest, "trained")) for rest in range(5)
    }
    assert (
        len({one.ordinal for one in ended})
        == len(ended)
        == len(coordinator.parts.rollouts.admitted)
    )
    assert progress.trained_tokens == 4 * 40
    generated = sum(one.completion_tokens is not None for one in ended)
    assert progress.generated_tokens == 7 * generated
    assert progress.wasted_tokens == 4 * (progress.ended["dropped"] + progress.ended["filtered"])
    reasons = {one.reason for one in ended if one.outcome == "dropped"}
    assert reasons == {"no baseline: it failed"}


def test_wait_loses_no_slow_group():
    slow = {3, 17}
    coordinator = make(
        steps=20, rollouts=FakeRollouts(latency=lambda ordinal: 0.2 if ordinal in slow else 0.0)
    )
    progress = run(coordinator)
    assert progress.ended == {"trained": 80}
    assert slow <= {ended.ordinal for ended in coordinator.parts.recorder.all_outcomes}


def test_failed_dropped_and_skipped_groups_free_their_slots():
    coordinator = make(
        steps=10,
        rollouts=FakeRollouts(fails=lambda ordinal: "deadline" if ordinal % 7 == 0 else None),
        scores=lambda rollouts: FakeScores(
            rollouts,
            score=lambda ordinal: (1.0,) if ordinal % 5 == 0 else (0.0, 1.0),
            fails=lambda ordinal: "reward raised" if ordinal % 11 == 0 else None,
        ),
        learner=FakeLearner(4, skips=lambda step: step in (2, 5)),
    )
    progress = run(coordinator)
    assert progress.version == 10 and progress.attempted == 12
    assert progress.ended["trained"] == 40 and progress.ended["skipped"] == 8
    assert progress.ended["failed"] > 0 and progress.ended["dropped"] > 0
    ordinals = [ended.ordinal for ended in coordinator.parts.recorder.all_outcomes]
    assert len(ordinals) == len(set(ordinals)) == sum(progress.ended.values())
    assert sorted(ordinals) == sorted(coordinator.parts.rollouts.admitted)


def test_a_group_lost_with_its_worker_fails_and_frees_its_slot():
    class Losing(FakeScores):
        async def _score(self, finished):
            if finished.ordinal % 5:
                await super()._score(finished)
            else:
                self._done.put_nowait(
                    Scored(
                        finished.ordinal,
                        0,
                        None,
                        0,
                        (),
                        {},
                        usable=0,
                        truncated=0,
                        failure="lost",
                        lost=True,
                    )
                )

    coordinator = make(steps=10, scores=Losing)
    progress = run(coordinator)
    lost = [ended for ended in coordinator.parts.recorder.all_outcomes if ended.outcome == "failed"]
    assert progress.ended["trained"] == 40 and len(lost) >= 8
    assert {(ended.ordinal % 5, ended.reason, ended.completion_tokens) for ended in lost} == {
        (0, "lost", 4)
    }


async def test_groups_open_when_the_run_is_interrupted_are_waiting():
    coordinator = make(
        steps=1000,
        rollouts=FakeRollouts(
            latency=lambda ordinal: 0.001 * (ordinal % 5) if ordinal < 20 else 1e6
        ),
    )

    running = asyncio.create_task(coordinator.run())
    while coordinator.progress.version < 5 or not len(coordinator.buffer):  # noqa: ASYNC110
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    outcomes = coordinator.parts.recorder.all_outcomes
    assert sorted(ended.ordinal for ended in outcomes) == sorted(
        coordinator.parts.rollouts.admitted
    )
    assert {ended.outcome for ended in outcomes} == {"trained", "waiting"}
    # A resume does not count these outcomes. It generates the groups again.
    assert coordinator.state().frontier == min(
        ended.ordinal for ended in outcomes if ended.outcome == "waiting"
    )


def test_a_reward_part_is_averaged_over_the_groups_that_have_it():
    class Scores(FakeScores):
        async def next(self):
            groups = await super().next()
            return [
                replace(
                    group,
                    reward_parts={"even": float(group.ordinal)} if group.ordinal % 2 == 0 else {},
                )
                for group in groups
            ]

    coordinator = make(steps=1, max_staleness=0, scores=Scores)
    run(coordinator)
    [metrics] = [
        metrics for kind, _, _, metrics in coordinator.parts.recorder.records if kind == "step"
    ]
    assert metrics["reward/even"] == 1.0


@pytest.mark.parametrize(("reason", "way_out"), WAYS_OUT.items())
def test_skipped_steps_in_a_row_end_the_run_with_their_reason(reason, way_out):
    coordinator = make(
        learner=FakeLearner(4, skips=lambda step: step >= 1, reason=reason), max_skipped_steps=3
    )
    with pytest.raises(
        RuntimeError, match=f"^3 steps in a row were skipped, the last: {reason}; {way_out}$"
    ):
        run(coordinator)
    skipped = {
        ended.reason
        for ended in coordinator.parts.recorder.all_outcomes
        if ended.outcome == "skipped"
    }
    assert skipped == {reason}


def test_slow_publication_passes_versions_over():
    coordinator = make(
        steps=12,
        max_staleness=4,
        weights=FakeWeightSync(latency=lambda _: 0.02),
        learner=FakeLearner(4, latency=0.003),
    )
    run(coordinator)
    applied = coordinator.parts.weights.applied
    assert applied == sorted(applied) and applied[-1] == 12 and len(applied) < 13
    passed = sum(
        metrics["weights/versions_passed_over"]
        for kind, _, _, metrics in coordinator.parts.recorder.records
        if kind == "gather"
    )
    assert passed == 13 - len(applied)


def test_a_failed_push_is_retried_once():
    coordinator = make(
        weights=FakeWeightSync(fails=lambda version, number: version == 0 and number == 1)
    )
    assert run(coordinator).version == 6


def test_a_push_that_fails_again_ends_the_run_with_its_cause():
    with pytest.raises(RuntimeError, match="version 0 could not be published"):
        run(make(weights=FakeWeightSync(fails=lambda version, number: version == 0)))


def test_evaluates_before_after_and_in_between_at_one_version():
    seen = []

    async def evaluate(version, replica):
        before = coordinator.progress.committed
        await asyncio.sleep(0.005)
        assert coordinator.progress.committed == before == version
        seen.append(version)
        return {"eval/accuracy": 0.5}

    coordinator = make(steps=12, evaluate=evaluate, evaluate_every=4)
    progress = run(coordinator)
    assert seen[0] == 0 and seen[-1] == 12 and len(seen) >= 3 and progress.accuracy == 0.5


class Counting(FakeLearner):
    """A learner that counts the seconds in which it works."""

    worked = 0.0

    async def _work(self):
        await super()._work()
        self.worked += self.latency


def evaluated(replicas, seconds=100.0, **settings):
    """Run with an evaluation of `seconds` virtual seconds at the start, in the middle and at the
    end.

    Returns the coordinator, and for each evaluation its version, its replica, and the seconds in
    which the learner was idle."""
    seen, learner, fake = [], Counting(4, latency=0.5, max_staleness=2), FakeReplicas(replicas)

    async def evaluate(version, replica):
        worked = learner.worked
        await asyncio.sleep(seconds)
        seen.append((version, replica, seconds - (learner.worked - worked)))
        return {"eval/accuracy": 0.5}

    coordinator = make(
        steps=400,
        max_staleness=2,
        rollouts=FakeRollouts(latency=lambda _: 0.2, replicas=fake),
        learner=learner,
        weights=FakeWeightSync(latency=lambda _: 0.1, replicas=fake),
        evaluate=evaluate,
        evaluate_every=200,
        **settings,
    )
    on_virtual_time(coordinator)
    return coordinator, seen


@pytest.mark.parametrize("replicas", [2, 3])
def test_an_evaluation_on_one_of_several_replicas_does_not_delay_the_learner(replicas):
    coordinator, seen = evaluated(replicas)
    assert seen[0][:2] == (0, f"fake {replicas - 1}") and seen[-1][:2] == (400, None)
    assert len(seen) == 3 and all(replica is not None for version, replica, _ in seen[:-1])
    waited = [seconds for _, _, seconds in seen[:-1]]
    assert all(seconds <= 0.05 * 100 for seconds in waited), waited
    assert coordinator.parts.weights.replicas.held is None


def test_an_evaluation_on_the_only_replica_blocks_publishing():
    _, seen = evaluated(1)
    assert [replica for _, replica, _ in seen] == [None] * 3
    assert all(seconds > 0.9 * 100 for _, _, seconds in seen[:-1])


def test_an_evaluation_in_flight_blocks_nothing():
    coordinator, seen = evaluated(1, evaluate_in_flight=True)
    assert [replica for _, replica, _ in seen] == [None] * 3
    assert all(seconds <= 0.05 * 100 for _, _, seconds in seen[:-1])
    assert coordinator.progress.committed == 400


def test_the_replica_of_a_failed_evaluation_is_released():
    async def evaluate(version, replica):
        raise RuntimeError("a reward failed")

    replicas = FakeReplicas(2)
    coordinator = make(
        weights=FakeWeightSync(replicas=replicas),
        rollouts=FakeRollouts(replicas=replicas),
        evaluate=evaluate,
    )
    with pytest.raises(RuntimeError, match="a reward failed"):
        run(coordinator)
    assert replicas.held is None


def test_an_evaluation_that_loses_its_replica_is_repeated_on_all_replicas():
    seen = []

    async def evaluate(version, replica):
        seen.append((version, replica))
        await asyncio.sleep(3.0)
        if replica is not None and len(seen) == 1:
            raise EvaluationLostError("its engine died")
        return {"eval/accuracy": 0.5}

    replicas = FakeReplicas(2)
    parts = {
        "weights": FakeWeightSync(replicas=replicas),
        "rollouts": FakeRollouts(replicas=replicas),
        "learner": FakeLearner(4, latency=0.5),
    }
    coordinator = make(steps=40, evaluate=evaluate, evaluate_every=20, **parts)
    on_virtual_time(coordinator)
    assert (
        seen[0] == (0, "fake 1")
        and seen[1][0] > 0
        and seen[1][1] is None
        and seen[2][1] == "fake 1"
        and seen[-1] == (40, None)
    )
    [lost] = [
        record for record in coordinator.parts.recorder.records if record[0] == "evaluation_lost"
    ]
    assert lost[2:] == (0, {"reason": "its engine died"})
    evaluated = [
        version
        for event, _, version, _ in coordinator.parts.recorder.records
        if event == "evaluation"
    ]
    assert evaluated == [version for version, _ in seen[1:]]


def test_a_running_evaluation_is_due_in_a_checkpoint():
    async def evaluate(version, replica):
        await asyncio.sleep(1.0 if version == 3 else 0.0)
        return {}

    checkpoints, replicas = FakeCheckpoints(), FakeReplicas(2)
    learner = FakeLearner(4, latency=0.2)
    parts = {
        "weights": FakeWeightSync(replicas=replicas),
        "rollouts": FakeRollouts(replicas=replicas),
        "learner": learner,
    }
    coordinator = make(
        steps=12,
        evaluate=evaluate,
        evaluate_every=3,
        checkpoints=checkpoints,
        checkpoint_every=1,
        **parts,
    )
    on_virtual_time(coordinator)
    due = {state.version: state.evaluations_due for state in checkpoints.states}
    assert 3 in due[5] and 3 not in due[11]


def test_log_probs_are_checked_at_the_same_version_on_both_sides():
    check = FakeLogprobCheck()
    run(make(steps=9, max_staleness=0, check=check, check_every=3))
    assert check.learner_side == check.generator_side == [0, 3, 6, 9]


def test_a_failed_self_test_ends_the_run_before_a_step():
    coordinator = make(check=FakeLogprobCheck(fails_at=0))
    with pytest.raises(RuntimeError, match="log-probs differ"):
        run(coordinator)
    assert coordinator.parts.learner.batches == []


def test_an_error_in_a_rollout_ends_the_run_with_its_cause():
    class Broken(FakeRollouts):
        async def rollout(self, prompt, committed):
            raise ValueError("broken worker")

    with pytest.raises(ValueError, match="broken worker"):
        run(make(rollouts=Broken()))


def test_a_rank_that_dies_while_the_learner_waits_ends_the_run():
    """Without its watch, the run would wait for groups and for a push that never ends."""
    learner = FakeLearner(4)

    class Never(FakeWeightSync):
        async def push(self, manifest):
            learner.death.set_exception(PartDiedError("learner rank 0 died"))
            await asyncio.Event().wait()

    coordinator = make(learner=learner, weights=Never())
    with pytest.raises(PartDiedError, match="learner rank 0 died"):
        on_virtual_time(coordinator)


def test_a_resume_continues_from_the_frontier(tmp_path):
    first = make(steps=4, checkpoints=CheckpointStore(tmp_path, keep=2), checkpoint_every=2)
    run(first)
    path, state, _ = CheckpointStore(tmp_path, keep=2).find()
    assert (path.name, state.version, state.frontier, state.finished_above) == (
        "step_000004",
        4,
        16,
        (),
    )
    second = make(steps=7, state=state)
    progress = run(second)
    assert progress.version == 7 and [
        ended.ordinal for ended in second.parts.recorder.all_outcomes
    ] == list(range(16, 28))
    assert second.parts.weights.applied[0] == 4


def stopped(coordinator, when):
    """Run until `when()` is true, then stop. Returns the seconds that the stop took."""

    async def stopping():
        task = asyncio.ensure_future(coordinator.run())
        clock = asyncio.get_running_loop().time
        while not when():  # noqa: ASYNC110 (the clock is virtual)
            await asyncio.sleep(0.05)
        began = clock()
        assert coordinator.stop()
        with pytest.raises(RunStoppedError):
            await task
        return clock() - began

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(stopping())


def test_a_stop_finishes_the_step_and_writes_a_checkpoint():
    checkpoints, learner = FakeCheckpoints(), FakeLearner(4, latency=1.0)
    coordinator = make(steps=50, learner=learner, checkpoints=checkpoints)
    took = stopped(
        coordinator,
        lambda: coordinator.progress.version == 12 and coordinator.buffer.training,
    )
    assert took <= 1.0 and [state.version for state in checkpoints.states] == [13]
    assert coordinator.parts.recorder.all_outcomes[-1].outcome == "waiting"


def test_a_stop_does_not_wait_for_the_next_batch_or_an_evaluation():
    """An hour passes until the next group, and an evaluation takes an hour."""
    for colocate in (False, True):
        checkpoints, began = FakeCheckpoints(), []

        async def evaluate(version, replica, began=began):
            began.append(version)
            await asyncio.sleep(3600 if version else 0)
            return {"eval/accuracy": 0.0}

        coordinator = make(
            steps=50,
            max_staleness=0,
            rollouts=FakeRollouts(latency=lambda ordinal: 3600 if ordinal >= 12 else 0.1),
            checkpoints=checkpoints,
            evaluate=evaluate,
            evaluate_every=2,
            colocate=colocate,
        )
        took = stopped(coordinator, lambda began=began: began[-1:] == [2])
        assert took < 1 and [state.version for state in checkpoints.states] == [2]
        assert checkpoints.states[0].evaluations_due == (2,)


def test_a_stop_has_nothing_to_save_before_the_first_step_and_after_a_checkpoint():
    checkpoints = FakeCheckpoints()
    coordinator = make(steps=3, checkpoints=checkpoints, checkpoint_every=1)
    assert not coordinator.stop() and not coordinator.stopping
    run(coordinator)
    assert not coordinator.stop()
    assert [state.version for state in checkpoints.states] == [1, 2, 3]


def scored(ordinal, oldest_version):
    return Scored(ordinal, oldest_version, oldest_version, 4, (0.0, 1.0), {}, 2, 0, oldest_version)


def test_restored_groups_are_trained_first_and_keep_their_attempt():
    state = State("run", 3, 5, 5, 20, (21,), waiting=((1, 20), (2, 24)))
    coordinator = make(steps=6, groups=2, state=state, restored=[scored(20, 3), scored(24, 4)])
    run(coordinator)
    assert [[group.ordinal for group in batch] for batch in coordinator.parts.learner.batches] == [
        [20, 24]
    ]
    trained = [
        ended for ended in coordinator.parts.recorder.all_outcomes if ended.outcome == "trained"
    ]
    assert [(ended.attempt, ended.ordinal, ended.staleness) for ended in trained] == [
        (1, 20, 2),
        (2, 24, 1),
    ]
    assert (
        coordinator.parts.rollouts.admitted[:2]
        == [22, 23][: len(coordinator.parts.rollouts.admitted)]
    )


def test_restored_groups_are_trained_after_the_first_log_prob_check():
    class RecordsBatches(FakeLogprobCheck):
        async def after_commit(self, version, learner_shift):
            await asyncio.sleep(0.01)
            checked.append((version, len(coordinator.parts.learner.batches)))
            return await super().after_commit(version, learner_shift)

    checked = []
    state = State("run", 1, 5, 5, 20, (), waiting=((0, 20), (0, 21)))
    coordinator = make(
        steps=7,
        groups=2,
        state=state,
        restored=[scored(20, 4), scored(21, 4)],
        check=RecordsBatches(),
    )
    run(coordinator)
    assert checked[0] == (5, 0) and len(coordinator.parts.learner.batches) == 2


@pytest.mark.parametrize(("max_staleness", "groups"), [(0, 2), (1, 2), (1, 1), (4, 1)])
def test_a_smaller_bound_or_batch_drops_restored_groups_that_expire(max_staleness, groups):
    oldest_version = [1, 2, 2, 3, 3, 3, 4, 4, 5, 5]
    restored = [scored(ordinal, version) for ordinal, version in enumerate(oldest_version)]
    state = State(
        "run", 1, 5, 5, 0, (), waiting=tuple((0, ordinal) for ordinal in range(len(oldest_version)))
    )
    coordinator = make(
        steps=12, max_staleness=max_staleness, groups=groups, state=state, restored=restored
    )
    assert run(coordinator).version == 12
    dropped = {
        ended.ordinal
        for ended in coordinator.parts.recorder.all_outcomes
        if ended.outcome == "dropped"
    }
    assert {
        ordinal for ordinal, version in enumerate(oldest_version) if 5 - version > max_staleness
    } <= dropped


def test_the_next_attempt_runs_an_evaluation_that_was_due():
    async def evaluate(version, replica):
        return {"eval/accuracy": 0.5}

    state = State("run", 1, 4, 4, 16, (), evaluations_due=(), last_marked=3)
    coordinator = make(steps=7, state=state, evaluate=evaluate, evaluate_every=4)
    run(coordinator)
    assert [
        version
        for event, _, version, _ in coordinator.parts.recorder.records
        if event == "evaluation"
    ] == [4, 7]


class Weights(FakeLearner):
    """A learner whose weights are a chain of hashes. They are equal only after the same batches in
    the same order."""

    def __init__(self, *arguments, weights="", **settings):
        super().__init__(*arguments, **settings)
        self.weights = weights

    async def step(self, batch):
        result = await super().step(batch)
        if result.applied:
            groups = [(group.ordinal, group.rewards, group.tokens) for group in batch]
            self.weights = hashlib.sha256(f"{self.weights} {groups}".encode()).hexdigest()
        return result

    async def save(self, directory):
        (directory / "weights").write_text(self.weights)
        return {
            **await super().save(directory),
            "weights": size_and_checksum(directory / "weights"),
        }


@pytest.mark.parametrize("stops", [False, True], ids=["killed", "stopped"])
@pytest.mark.parametrize(
    ("max_staleness", "on_stale", "moments"), [(0, "wait", 20), (2, "wait", 20), (1, "drop", 20)]
)
def test_a_run_killed_at_random_moments_ends_with_the_same_weights(
    tmp_path, monkeypatch, max_staleness, on_stale, moments, stops
):
    """At staleness 0, seed and data determine every batch, so the weights equal those of an
    uninterrupted run. At larger staleness, each ordinal still has exactly one outcome among those
    that count. A run that is stopped has lost no step."""

    async def at_once(function, *arguments):
        return function(*arguments)

    # The virtual clock does not see threads.
    monkeypatch.setattr(asyncio, "to_thread", at_once)
    moments -= 8 * stops  # a stop repeats no step, so the run ends earlier
    steps, random_ = 110, random.Random(1)
    latency = [random_.random() for _ in range(97)]

    def attempt(state, restored, weights):
        rollouts = FakeRollouts(
            latency=lambda ordinal: latency[ordinal % 97],
            fails=lambda ordinal: "broken" if ordinal % 13 == 5 else None,
        )
        learner = Weights(
            4, latency=0.3, version=state.version, skips=lambda step: False, weights=weights
        )
        checkpoints = CheckpointStore(tmp_path / "checkpoints", keep=2)
        parts = {
            "rollouts": rollouts,
            "learner": learner,
            "restored": restored,
            "checkpoints": checkpoints,
        }
        return make(
            steps,
            max_staleness,
            4,
            state,
            **parts,
            on_stale=on_stale,
            checkpoint_every=50 if stops else 1 + random_.randrange(3),
        )

    def finish(coordinator, after=None):
        """Run to the end, or kill the run after `after` virtual seconds, so that it writes nothing
        more. Returns whether it reached the end."""

        async def killed():
            task = asyncio.ensure_future(coordinator.run())
            await asyncio.wait([task], timeout=after)
            if task.done():
                task.result()
                return True
            if stops and coordinator.stop():
                with pytest.raises(RunStoppedError):
                    await task
                assert coordinator.parts.checkpoints.find()[1].version == (
                    coordinator.progress.version
                )
                return False
            coordinator.parts.recorder.outcomes = lambda *_: None
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return False

        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            return runner.run(killed())

    unbroken = attempt(NEW, [], "")
    unbroken.parts.checkpoints = None
    assert finish(unbroken)

    outcomes, killed, coordinator = {}, 0, attempt(NEW, [], "")
    while not finish(coordinator, random_.uniform(1.5, 6) if killed < moments else None):
        killed += 1
        path, state, warnings = (
            coordinator.parts.checkpoints.find()
            if (tmp_path / "checkpoints").exists()
            else (None, NEW, [])
        )
        assert not warnings
        for ended in coordinator.parts.recorder.all_outcomes:
            finished = ended.ordinal < state.frontier or ended.ordinal in state.finished_above
            if finished and ended.outcome != "waiting":
                assert ended.ordinal not in outcomes
                outcomes[ended.ordinal] = ended.outcome
        assert set(range(state.frontier)) | {*state.finished_above} == {*outcomes}
        waiting = (
            asyncio.run(coordinator.parts.scores.load(path / "buffer.parquet"))
            if state.waiting
            else []
        )
        coordinator = attempt(
            replace(state, attempt=killed),
            waiting,
            (path / "learner" / "weights").read_text() if path else "",
        )
    assert killed >= moments, "the run was over before it was killed often enough"
    for ended in coordinator.parts.recorder.all_outcomes:
        if ended.outcome != "waiting":
            assert ended.ordinal not in outcomes
            outcomes[ended.ordinal] = ended.outcome
    assert Counter(outcomes.values())["trained"] == 4 * steps
    if max_staleness == 0:
        assert coordinator.parts.learner.weights == unbroken.parts.learner.weights


def test_an_unexpected_exception_ends_one_group_and_its_stack_is_kept():
    odd = {
        3: "not foreseen: group 3: KeyError: 'x'\nTraceback\n  line 1",
        5: "not foreseen: group 5: OSError: y\nTraceback",
    }
    rollouts = FakeRollouts(fails=odd.get)
    coordinator = make(rollouts=rollouts, max_errors=2)
    run(coordinator)
    recorder = coordinator.parts.recorder
    assert (
        coordinator.progress.errors == 2
        and coordinator.progress.version == coordinator.schedule.max_steps
    )
    errors = [metrics for event, _, _, metrics in recorder.records if event == "error"]
    assert [error["reason"] for error in errors] == [
        "not foreseen: group 3: KeyError: 'x'",
        "not foreseen: group 5: OSError: y",
    ]
    assert errors[0]["stack"] == "Traceback\n  line 1"
    outcomes = {ended.ordinal: (ended.outcome, ended.reason) for ended in recorder.all_outcomes}
    assert outcomes[3] == ("failed", "not foreseen: group 3: KeyError: 'x'")


def test_too_many_unexpected_exceptions_end_the_run_with_the_last_one():
    rollouts = FakeRollouts(
        fails=lambda ordinal: (
            f"not foreseen: group {ordinal}: KeyError: 'x'\nTraceback" if ordinal % 2 else None
        )
    )
    with pytest.raises(
        RuntimeError,
        match=(
            r"errors = 3, above rollout.max_errors = 2; the last: not foreseen: group \d: KeyError:"
            r" 'x'; its stack is in"
        ),
    ):
        run(make(rollouts=rollouts, max_errors=2))


def test_an_unexpected_exception_in_scoring_is_counted():
    reason = "not foreseen: the reference policy failed: ValueError: z\nTraceback"
    coordinator = make(
        scores=lambda rollouts: FakeScores(
            rollouts, fails=lambda ordinal: reason if ordinal == 4 else None
        ),
        max_errors=1,
    )
    run(coordinator)
    assert coordinator.progress.errors == 1 and coordinator.progress.ended["failed"] == 1


def test_a_step_is_recorded_after_its_outcomes_are_on_the_disk():
    """Otherwise, a driver that is killed in between would leave a step without trained groups."""

    class Slow(FakeRecorder):
        def __init__(self):
            super().__init__()
            self.on_disk = 0

        async def flushed(self):
            given = len(self.all_outcomes)
            await asyncio.sleep(0.01)
            self.on_disk = given

        def record(self, event, step, version, metrics):
            super().record(event, step, version, metrics)
            if event == "step":
                assert self.on_disk >= 4 * step

    coordinator = make(steps=5, recorder=Slow())
    run(coordinator)
    assert [event for event, *_ in coordinator.parts.recorder.records].count("step") == 5


def test_the_metrics_of_the_turns_hold_the_seconds_of_the_device():
    class OnDevice(FakeLearner):
        async def take_device(self):
            await asyncio.sleep(5)
            await super().take_device()

    class Shifts(FakeWeightSync):
        async def rest(self):
            await asyncio.sleep(2)
            await super().rest()

        async def wake(self):
            await asyncio.sleep(1)
            await super().wake()

    learner = OnDevice(4, latency=3.0)
    learner.on_device = False
    parts = {"learner": learner, "device": learner, "weights": Shifts(latency=lambda _: 20.0)}
    coordinator = make(
        steps=3, max_staleness=0, colocate=True, check=FakeLogprobCheck(), check_every=2, **parts
    )
    on_virtual_time(coordinator)
    steps = [row for event, *_, row in coordinator.parts.recorder.records if event == "step"]
    shifts = [(row["time/rest_s"], row["time/wake_s"]) for row in steps]
    assert shifts == [(pytest.approx(2 + 5), pytest.approx(3 + 1))] * 3


def test_a_rollout_that_its_station_cancels_is_one_groups_failure():
    """A canceled task would keep the group's slot forever."""

    class Cancels(FakeRollouts):
        async def rollout(self, prompt, committed):
            if prompt.ordinal == 3:
                raise asyncio.CancelledError
            return await super().rollout(prompt, committed)

    coordinator = make(steps=3, rollouts=Cancels())
    assert run(coordinator).version == 3 and coordinator.progress.errors == 1
    outcomes = {
        ended.ordinal: (ended.outcome, ended.reason)
        for ended in coordinator.parts.recorder.all_outcomes
    }
    assert outcomes[3] == ("failed", "not foreseen: group 3: CancelledError: ")


def test_a_loop_that_a_station_cancels_is_an_error_and_not_an_interruption():
    class Cancels(FakeWeightSync):
        async def push(self, manifest):
            raise asyncio.CancelledError

    with pytest.raises(
        RuntimeError,
        match="the publishing loop ended: a part of the run canceled what it waited for",
    ):
        run(make(weights=Cancels()))


def test_prompts_seen_grow_with_the_outcomes_and_go_on_after_a_resume():
    coordinator = make(steps=4)
    run(coordinator)
    seen = [
        metrics["data/prompts_seen"]
        for kind, _, _, metrics in coordinator.parts.recorder.records
        if kind == "step"
    ]
    assert seen == sorted(seen) and seen[0] == 4 * 1 and seen[-1] == 4 * 4
    frontier = Frontier(7, (9, 11))
    frontier.finish(7)
    assert (frontier.lowest, frontier.count) == (8, 10)
