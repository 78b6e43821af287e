"""How long one question to all replicas waits for whom. Replicas are stand-ins."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.contracts.errors import StaleReplicaError
from asyncrl.runtime.serve_calls import ask_all


def asked(replicas: list[tuple[float, Any]], **times: Any) -> tuple[list[Any], float]:
    """The answers of replicas that answer after so many seconds, and when they were there."""

    async def answer(after_s: float, what: Any) -> Any:
        await asyncio.sleep(after_s)
        if isinstance(what, BaseException):
            raise what
        return what

    class Call:
        async def _fetch_replica_results_async(self) -> list[Any]:
            return [SimpleNamespace(get_async=lambda one=one: answer(*one)) for one in replicas]

    async def ask() -> tuple[list[Any], float]:
        clock = asyncio.get_running_loop().time
        began = clock()
        answers = await ask_all(
            SimpleNamespace(broadcast=lambda method: Call()), "status", timeout_s=2.0, **times
        )
        return answers, clock() - began

    return asyncio.run(ask())


def test_after_the_grace_half_are_enough() -> None:
    answers, seconds = asked([(0.0, "a"), (60.0, "b")], grace_s=0.2)
    assert answers[0] == "a" and isinstance(answers[1], TimeoutError) and seconds < 1.5


@pytest.mark.parametrize("others", [1, 3])
def test_replicas_that_cannot_answer_make_nobody_give_up_the_one_that_will(others: int) -> None:
    """Its answer takes longer than the grace. It would be asked anew, and given up again, until the
    deadline of the run's check."""
    answers, _ = asked(
        [*[(0.0, StaleReplicaError("behind"))] * others, (0.6, "scored")], grace_s=0.2
    )
    assert answers[-1] == "scored" and all(
        isinstance(answer, StaleReplicaError) for answer in answers[:-1]
    )


def test_replicas_that_cannot_answer_are_no_part_of_the_half() -> None:
    answers, seconds = asked(
        [(0.0, StaleReplicaError("behind"))] * 2 + [(0.0, "a"), (60.0, "b")], grace_s=0.2
    )
    assert answers[2] == "a" and isinstance(answers[3], TimeoutError) and seconds < 1.5
