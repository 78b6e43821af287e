"""How long a call to all replicas waits for each of them. Replicas are fakes."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
from fake_actors import FakeHandle, FakeReply

from asyncrl.contracts.errors import StaleReplicaError
from asyncrl.runtime.ray.serve_calls import ask_all


def call_all(replicas: list[tuple[float, Any]], **times: Any) -> tuple[list[Any], float]:
    """Call replicas, given as (seconds, result) each. Returns the results and the elapsed
    seconds."""

    async def answer(after_s: float, what: Any) -> Any:
        await asyncio.sleep(after_s)
        if isinstance(what, BaseException):
            raise what
        return what

    class Call:
        async def _fetch_replica_results_async(self) -> list[Any]:
            return [FakeReply(partial(answer, *replica)) for replica in replicas]

    async def ask() -> tuple[list[Any], float]:
        clock = asyncio.get_running_loop().time
        began = clock()
        handle: Any = FakeHandle(lambda method: Call())
        answers = await ask_all(handle, "status", timeout_s=2.0, **times)
        return answers, clock() - began

    return asyncio.run(ask())


def test_after_the_grace_period_half_are_enough() -> None:
    answers, seconds = call_all([(0.0, "a"), (60.0, "b")], grace_s=0.2)
    assert answers[0] == "a" and isinstance(answers[1], TimeoutError) and seconds < 1.5


@pytest.mark.parametrize("others", [1, 3])
def test_failed_replicas_do_not_end_the_wait_for_the_one_that_answers(others: int) -> None:
    """The answer takes longer than the grace period. Otherwise the caller would retry, and fail
    again, until the deadline of the run's check."""
    answers, _ = call_all(
        [*[(0.0, StaleReplicaError("behind"))] * others, (0.6, "scored")], grace_s=0.2
    )
    assert answers[-1] == "scored" and all(
        isinstance(answer, StaleReplicaError) for answer in answers[:-1]
    )


def test_failed_replicas_do_not_count_toward_half() -> None:
    answers, seconds = call_all(
        [(0.0, StaleReplicaError("behind"))] * 2 + [(0.0, "a"), (60.0, "b")], grace_s=0.2
    )
    assert answers[2] == "a" and isinstance(answers[3], TimeoutError) and seconds < 1.5
