"""Ranks of a test that hang are named with their stacks."""

from __future__ import annotations

import time
from multiprocessing.connection import wait

import plain_ranks
import pytest


def sleep_on_rank_1(rank: int, world_size: int) -> int:
    if rank == 1:
        time.sleep(1000)
    return rank


def test_a_rank_that_hangs_is_named_with_its_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first answer takes a start. The ranks have joined by then, and the other one sleeps.
    waits = iter([60.0, 1.0])
    monkeypatch.setattr(plain_ranks, "wait", lambda pipes, _: wait(pipes, next(waits)))
    with pytest.raises(AssertionError, match=r"^ranks \[1\] did not answer") as error:
        plain_ranks.on_ranks(2, sleep_on_rank_1)
    assert "in sleep_on_rank_1" in str(error.value)
