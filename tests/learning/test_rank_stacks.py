"""Ranks of a test that hang are named with their stacks."""

from __future__ import annotations

import time

import plain_ranks
import pytest


def sleep_on_rank_1(rank: int, world_size: int) -> int:
    if rank == 1:
        time.sleep(1000)
    return rank


def test_a_rank_that_hangs_is_named_with_its_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_ranks, "TIMEOUT_S", 60.0)
    ranks = plain_ranks.on_ranks(2, max)
    assert ranks == [2, 2], "started once, so a start is quick"
    monkeypatch.setattr(plain_ranks, "TIMEOUT_S", 10.0)
    with pytest.raises(AssertionError, match=r"^ranks \[1\] did not answer") as error:
        plain_ranks.on_ranks(2, sleep_on_rank_1)
    assert "in sleep_on_rank_1" in str(error.value)
