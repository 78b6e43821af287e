"""A message after a quiet time goes at once, and messages under load keep their distance."""

from types import SimpleNamespace

from asyncrl.runtime import pace
from asyncrl.runtime.pace import Pace


def test_only_a_message_soon_after_another_waits(monkeypatch):
    clock = SimpleNamespace(s=0.0)
    monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=lambda: clock.s))
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
