"""A message after a quiet time goes at once, and messages under load keep their distance."""

from fake_clock import FakeClock

from asyncrl.runtime import pace
from asyncrl.runtime.pace import Pace


def test_only_a_message_soon_after_another_waits(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(pace, "time", clock)
    paced = Pace(0.5)
    assert paced.left_s() == 0, "the first message"
    paced.sent()
    clock.s = 0.125
    assert paced.left_s() == 0.375
    clock.s = 0.5
    assert paced.left_s() == 0, "on time"
    clock.s = 9.0
    assert paced.left_s() == 0, "after a quiet time"
    paced.sent()
    assert paced.left_s() == 0.5
