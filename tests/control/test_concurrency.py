"""The adaptive limit on running groups: its decisions on hand-computed numbers, and its throughput
compared with the best fixed limit."""

import asyncio
import math
import random
from dataclasses import replace

import pytest

from asyncrl.contracts.messages import EngineLoad
from asyncrl.contracts.state import State
from asyncrl.control.concurrency import Concurrency, first_limit
from asyncrl.control.coordinator import Coordinator, Parts, Schedule
from asyncrl.control.staleness import Staleness
from asyncrl.testing import (
    FakeEngine,
    FakeLearner,
    FakePrompts,
    FakeRecorder,
    FakeRollouts,
    FakeScores,
    FakeWeightSync,
    VirtualTimeLoop,
)


def load(kv_use=0.5, waiting=0, preemptions=0, replica="one"):
    return EngineLoad(replica, kv_use, waiting, preemptions)


def test_grows_by_one_for_each_group_until_an_engine_was_full_and_then_slowly():
    concurrency = Concurrency(4, 100)
    concurrency.observe(load(), running=4)
    assert concurrency.limit == 5
    concurrency.observe(load(0.95), running=5)
    assert (concurrency.limit, concurrency.may_run(4)) == (4, False)
    for _ in range(4):
        concurrency.observe(load(), running=4)
    assert concurrency.limit == pytest.approx(
        4 + 1 / 4 + 1 / 4.25 + 1 / 4.485 + 1 / 4.708, rel=1e-3
    )
    assert concurrency.decisions == {"grow": 5, "trim": 1}


def test_does_not_grow_below_the_limit_or_between_the_thresholds():
    concurrency = Concurrency(4, 100)
    concurrency.observe(load(), running=3)
    concurrency.observe(load(0.87), running=4)
    assert concurrency.limit == 4


def test_a_queue_is_trimmed_and_a_preemption_cuts_once_for_those_that_ran():
    concurrency = Concurrency(20, 100)
    concurrency.observe(load(waiting=1), running=20)
    assert concurrency.limit == 19
    concurrency.observe(load(preemptions=3), running=20)
    assert concurrency.limit == 18
    concurrency.observe(load(preemptions=5), running=19)
    assert (concurrency.limit, concurrency.preemptions) == (18, 5)
    for _ in range(19):
        concurrency.observe(load(0.87, preemptions=5), running=18)
    concurrency.observe(load(preemptions=6), running=18)
    assert concurrency.limit == pytest.approx(16.2)


def test_losses_are_summed_over_engines_including_replaced_ones():
    concurrency = Concurrency(20, 100)
    concurrency.observe(EngineLoad("one", 0.87, 0, 3, (0, 0, 2)), running=20)
    concurrency.observe(EngineLoad("two", 0.87, 0, 0, (1,)), running=18)
    concurrency.observe(EngineLoad("two", 0.5, 1, 0, (1, 4)), running=18)
    metrics = concurrency.metrics()
    assert (
        metrics["control/preemptions"],
        metrics["control/kv_use"],
        metrics["control/engine_waiting"],
    ) == (3, 0.5, 1)
    assert (metrics["control/aborted_completions"], metrics["control/aborted_by_length"]) == (
        7,
        [1, 4, 2],
    )
    assert concurrency.decisions == {"cut": 1, "trim": 1}


def test_the_limit_stays_between_one_and_the_maximum():
    concurrency = Concurrency(3, 4)
    for _ in range(10):
        concurrency.observe(load(), running=int(concurrency.limit))
    assert concurrency.limit == 4
    for _ in range(10):
        concurrency.observe(load(0.99), running=int(concurrency.limit))
    assert concurrency.limit == 1


SAMPLES, PROMPT, MEAN, LONGEST = 4, 16, 64, 256
GROUPS_PER_STEP, STEPS = 16, 60


def lengths(seed, spread, drift=0.0):
    """Log-normal lengths. The mean grows by the factor 1 + `drift` from the first group to the
    last."""

    def length(ordinal, index):
        mean = MEAN * (1 + drift * ordinal / (GROUPS_PER_STEP * STEPS))
        drawn = random.Random(f"{seed}/{ordinal}/{index}").lognormvariate(
            math.log(mean) - spread**2 / 2, spread
        )
        return max(1, min(int(drawn), LONGEST))

    return length


def train(concurrency, lengths, kv_tokens):
    """Return tokens per virtual second, preemptions per group, and the records."""
    engine = FakeEngine(lengths, SAMPLES, kv_tokens, PROMPT)
    recorder = FakeRecorder()
    parts = Parts(
        FakePrompts(),
        engine,
        FakeScores(engine),
        FakeLearner(GROUPS_PER_STEP),
        FakeWeightSync(replicas=engine.replicas),
        recorder,
    )
    parts.concurrency = concurrency
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(
            Coordinator(
                parts, Schedule(STEPS, Staleness(7, GROUPS_PER_STEP)), State("run", 0, 0, 0, 0, ())
            ).run()
        )
        return (
            engine.generated_tokens / runner.get_loop().time(),
            engine.preemptions / len(engine.admitted),
            recorder.records,
        )


@pytest.mark.parametrize(
    ("kv_tokens", "spread", "drift"),
    [
        (4096, 0.3, 0.0),
        pytest.param(8192, 1.0, 0.0, marks=pytest.mark.slow),
        pytest.param(8192, 0.6, 0.0, marks=pytest.mark.faults),
        pytest.param(8192, 0.6, 1.0, marks=pytest.mark.slow),
    ],
)
def test_as_good_as_the_best_fixed_limit(kv_tokens, spread, drift):
    """The adaptive limit reaches 95% of the best fixed limit's throughput, with at most 0.05
    preemptions for each group. This includes the start of the run."""
    most = Staleness(7, GROUPS_PER_STEP).max_staleness * GROUPS_PER_STEP
    made = lengths(0, spread, drift)
    sweep = {
        limit: train(Concurrency(limit, limit, adaptive=False), made, kv_tokens)[:2]
        for limit in [*range(6, 72 * kv_tokens // 8192, 3), most]
    }
    best = max(sweep, key=lambda limit: sweep[limit][0])
    throughput, preemptions, records = train(
        Concurrency(first_limit(kv_tokens, 1000, SAMPLES, PROMPT + LONGEST), most), made, kv_tokens
    )
    found = (
        f"{throughput / sweep[best][0]:.3f} of the best fixed limit's ({best}), {preemptions:.3f}"
        " preemptions per group"
    )
    print(
        found,
        f"(best fixed: {sweep[best][1]:.2f}; no limit: {sweep[most][0] / sweep[best][0]:.3f},"
        f" {sweep[most][1]:.2f})",
    )
    assert sweep[most][0] < 0.9 * sweep[best][0], "the engine has no cliff"
    assert throughput >= 0.95 * sweep[best][0] and preemptions <= 0.05, found
    last = [metrics for event, _, _, metrics in records if event == "step"][-1]
    assert last["control/concurrency"] <= most and last["control/concurrency_trim"] > 0


def test_engine_load_during_an_evaluation_does_not_move_the_limit():
    """The evaluation fills the engine's queue, which groups that finish at the same time report."""

    class Busy(FakeRollouts):
        evaluating = False

        async def _generate(self, ordinal):
            finished = await super()._generate(ordinal)
            return replace(finished, load=EngineLoad("fake", 0.5, 100 if self.evaluating else 0, 0))

    rollouts = Busy(latency=lambda ordinal: 1.0)

    async def evaluate(version, replica):
        rollouts.evaluating = True
        await asyncio.sleep(20.0)
        rollouts.evaluating = False
        return {}

    parts = Parts(
        FakePrompts(),
        rollouts,
        FakeScores(rollouts),
        FakeLearner(4, latency=0.1),
        FakeWeightSync(),
        FakeRecorder(),
        evaluate=evaluate,
    )
    parts.concurrency = Concurrency(2, 12)
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(
            Coordinator(
                parts, Schedule(30, Staleness(2, 4), evaluate_every=5), State("run", 0, 0, 0, 0, ())
            ).run()
        )
    assert parts.concurrency.decisions["trim"] == 0 and parts.concurrency.limit > 8
