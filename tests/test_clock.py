"""Times of one process stay in order when somebody sets the machine's clock."""

import time

import pytest

from asyncrl.clock import SteadyClock
from asyncrl.observe.metrics import MetricsWriter, read_metrics


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0])
def test_a_step_of_the_wall_clock_moves_nothing(monkeypatch, tmp_path, step_s):
    set_clock, true = 0.0, time.time
    monkeypatch.setattr(time, "time", lambda: true() + set_clock)
    clock = SteadyClock()
    with MetricsWriter(tmp_path) as writer:
        before = clock()
        writer.write("step", 1, 1, {})
        set_clock = step_s
        after = clock()
        writer.write("step", 2, 2, {})
    first, second = (record["time"] for record in read_metrics(tmp_path))
    assert 0 <= after - before < 60 and 0 <= second - first < 60
    assert abs(first - true()) < 60
