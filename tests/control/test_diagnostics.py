"""A batch of two groups, by hand."""

import pytest

from asyncrl.control.diagnostics import batch_metrics
from asyncrl.control.protocols import Scored


def test_hand_computed():
    first = Scored(0, 3, None, 8, (0.0, 1.0), {"a": 0.5}, 2, 1, newest=4)
    second = Scored(1, 5, None, 6, (1.0, 1.0, 1.0), {"a": 1.0, "b": 2.0}, 3, 0, newest=5, masked={"bad_logprob": 1})
    metrics = batch_metrics([first, second], version=5, max_staleness=2)
    assert metrics["staleness/histogram"] == [1, 0, 1]
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (1.0, 2)
    assert (metrics["staleness/in_flight_mean"], metrics["staleness/in_buffer_mean"]) == (0.5, 0.5)
    assert metrics["reward/mean"] == pytest.approx(0.8) and metrics["reward/zero_variance_ratio"] == 0.5
    assert (metrics["reward/a"], metrics["reward/b"]) == (0.75, 2.0)
    assert metrics["rollout/completion_tokens"] == pytest.approx(14 / 6) and metrics["rollout/truncated_ratio"] == pytest.approx(1 / 6)
    assert metrics["rollout/bad_logprob_ratio"] == pytest.approx(1 / 6)
