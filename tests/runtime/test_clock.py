"""Timestamps of a process stay in order when the machine's clock is set."""

import time

import pytest

from asyncrl.rundir.metrics import MetricsWriter, read_metrics
from asyncrl.runtime.clock import steady_time


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0])
def test_setting_the_clock_does_not_move_timestamps(monkeypatch, tmp_path, step_s):
    true = time.time
    before = steady_time()
    with MetricsWriter(tmp_path) as writer:
        writer.write("step", 1, 1, {})
    monkeypatch.setattr(time, "time", lambda: true() + step_s)
    after = steady_time()
    with MetricsWriter(tmp_path, attempt=1) as writer:
        writer.write("step", 2, 2, {})
    first, second = (record["time"] for record in read_metrics(tmp_path))
    assert 0 <= after - before < 60 and 0 <= second - first < 60
    assert abs(first - true()) < 60
