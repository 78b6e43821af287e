"""The learner's threads follow the cores of which other processes use little."""

import os
import time
from unittest.mock import create_autospec

import pytest
import torch
from recorded import learner_config, state_without_model

from asyncrl.learning.engine.threads import AGAIN, CpuTimes, Threads, cpu_times
from asyncrl.learning.packing.strategies import Packing
from asyncrl.learning.steps import passes
from asyncrl.models.micro_batches import token_example


@pytest.fixture(autouse=True)
def threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Node:
    """A node of two cores. `pass_time` says what they did."""

    def __init__(self) -> None:
        self.now = CpuTimes(100.0, 50.0, 7.0)

    def read(self) -> CpuTimes:
        return self.now

    def train(
        self, threads: Threads, seconds: float, idle: float, own: float, rate: float = 0.0
    ) -> None:
        """One micro-batch. Each further thread adds `rate` of the speed of the first."""
        self.pass_time(seconds, idle, own)
        threads.adapt(int(1000 * seconds * (1 + rate * (threads.count - 1))))

    def pass_time(self, seconds: float, idle: float, own: float) -> None:
        """`idle` and `own` are in cores."""
        now = self.now
        self.now = CpuTimes(now.clock + seconds, now.idle + idle * seconds, now.own + own * seconds)


def test_auto_takes_an_idle_core_and_gives_it_back():
    node = Node()
    threads = Threads("auto", 2, lambda: node.now)
    assert threads.count == torch.get_num_threads() == 1
    steps = [  # idle cores, own cores, threads afterwards
        (0.0, 1.0, 1),  # a generator works
        (1.0, 1.0, 2),  # it waits
        (0.3, 1.7, 2),  # two threads that wait for each other now and then
        (0.0, 1.1, 1),  # it works again
        (0.8, 1.0, 2),  # almost a core
        (0.0, 0.2, 1),  # other processes take both cores
    ]
    for idle, own, count in steps:
        node.train(threads, 0.5, idle, own, rate=0.7)
        assert threads.count == torch.get_num_threads() == count


@pytest.mark.parametrize(("rate", "count"), [(0.7, 2), (0.0, 1), (-0.3, 1)])
def test_auto_keeps_the_number_that_is_fastest(rate, count):
    node = Node()
    threads = Threads("auto", 2, lambda: node.now)
    used = []
    for _ in range(200):
        node.train(threads, 0.5, 2.0 - threads.count, threads.count, rate)
        used.append(threads.count)
    assert used[2:].count(count) >= 190, "the other number is tried now and then"
    assert set(used[10:]) == {1, 2}


def test_auto_uses_a_core_of_which_a_generator_needs_a_part():
    node = Node()
    threads = Threads("auto", 2, lambda: node.now)
    node.train(threads, 0.5, 0.2, 1.0, 0.7)
    assert threads.count == 1
    node.train(threads, 0.5, 0.3, 1.0, 0.7)
    assert threads.count == 2
    node.train(threads, 0.5, 0.0, 1.3, 0.7)
    assert threads.count == 2
    node.train(threads, 0.5, 0.0, 1.2, 0.7)
    assert threads.count == 1, "others use most of a core"


def test_trying_others_costs_little_on_many_cores():
    node = Node()
    threads = Threads("auto", 16, lambda: node.now)
    used = []
    for _ in range(300):
        node.train(threads, 0.5, 16.0 - threads.count, threads.count, 1.0)
        used.append(threads.count)
    assert used[:5] == [2, 4, 8, 16, 16]
    assert set(used[5:]) == {8, 16} and used[5:].count(16) >= 285


def test_a_disturbed_pass_does_not_decide_for_long():
    node = Node()
    threads = Threads("auto", 2, lambda: node.now)
    for _ in range(10):
        node.train(threads, 0.5, 2.0 - threads.count, threads.count, 0.4)
    assert threads.count == 2
    node.train(threads, 0.5, 0.0, 2.0, -0.9)
    used = []
    for _ in range(60):
        node.train(threads, 0.5, 2.0 - threads.count, threads.count, 0.4)
        used.append(threads.count)
    assert used[:AGAIN].count(2) <= 1, "the measurement counts"
    assert used[-20:].count(2) >= 18


def test_auto_waits_for_enough_time_and_never_passes_the_limit():
    node = Node()
    threads = Threads("auto", 2, lambda: node.now)
    node.train(threads, 0.19, 1.0, 1.0, 0.7)
    assert threads.count == 1
    node.train(threads, 0.02, 1.0, 1.0, 0.7)  # together 0.21 s
    assert threads.count == 2
    node.train(threads, 1.0, 30.0, 2.0, 0.7)
    assert threads.count == 2


def test_the_time_between_passes_does_not_count():
    """In it, the learner waits. Then it trains alone, then beside a generator."""
    node = Node()
    threads = Threads("auto", 2, lambda: node.now)
    for idle_in_pass, count in ((1.0, 2), (0.0, 1)):
        for _ in range(3):
            node.pass_time(5.0, 1.0 - idle_in_pass, 0.0)
            threads.begin()
            node.train(threads, 0.15, idle_in_pass, 1.0, 0.7)
        assert threads.count == count


def test_a_number_stays():
    node = Node()
    threads = Threads(3, 8, lambda: node.now)
    node.train(threads, 1.0, 5.0, 3.0)
    assert threads.count == torch.get_num_threads() == 3


def test_the_times_of_this_machine():
    """This process works, so its own time grows with the clock."""
    before = cpu_times()
    while time.process_time() < before.own + 0.05:
        sum(range(1000))
    now = cpu_times()
    assert now.own - before.own >= 0.05
    assert 0 <= now.idle - before.idle <= (now.clock - before.clock) * (os.cpu_count() or 1) + 0.1


EXAMPLES = [token_example(((5,), (6,) * following)) for following in (2, 3, 4)]
NOTHING = torch.zeros(0)


def test_a_forward_pass_is_not_measured(monkeypatch, tmp_path):
    state = state_without_model(learner_config(tmp_path))
    state.threads, state.engine = create_autospec(Threads, instance=True), lambda *_: (NOTHING,) * 3
    plan = Packing((((0,), (1,), (2,)),), 6, 6.0, 1.0, 0.0)
    monkeypatch.setattr(passes, "plan_micro_batches", lambda *arguments: plan)
    assert len(list(passes.forward_batches(state, EXAMPLES))) == 3
    assert not state.threads.mock_calls


def test_a_training_pass_begins_once_and_adapts_after_each_micro_batch(monkeypatch, tmp_path):
    calls = []

    class Engine:
        def set_gradient_accumulation_boundary(self, last): ...

        def __call__(self, *arguments):
            return (NOTHING,) * 3

        def backward(self, loss, scale_wrt_gas):
            calls.append("backward")

    class Noted(Threads):
        def begin(self):
            calls.append("begin")

        def adapt(self, tokens):
            calls.append(tokens)

    state = state_without_model(learner_config(tmp_path))
    state.threads, state.engine = Noted(1), Engine()
    plan = Packing((((0,), (1, 2)),), 6, 6.0, 1.0, 0.0)
    monkeypatch.setattr(passes, "StepSums", create_autospec(passes.StepSums))
    monkeypatch.setattr(passes, "plan_micro_batches", lambda *arguments: plan)
    monkeypatch.setattr(passes.zero, "gradients_finite", lambda engine: True)
    passes.backward(state, EXAMPLES, [1.0] * 3, lambda *arguments: (torch.zeros(()), {}))
    assert calls == ["begin", "backward", 2, "backward", 4], "a common prefix counts once"
