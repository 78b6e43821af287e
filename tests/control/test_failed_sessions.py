"""Why sessions fail is recorded, also if no step ever comes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from asyncrl.contracts.messages import Scored, SessionCounts
from asyncrl.contracts.state import State
from asyncrl.control.bookkeeping import LOST_ROUNDS, Bookkeeping
from asyncrl.control.buffer import Outstanding
from asyncrl.control.failed_sessions import MOST_REASONS, FailedSessions
from asyncrl.testing import FakeRecorder

BROKEN, KEY = "env_error: RuntimeError: no database", "env_error: KeyError: 'answer'"


def counts(done: int, failures: Mapping[str, int]) -> SessionCounts:
    ends = {"done": done, "env_error": sum(failures.values())}
    return SessionCounts(ends, 0, 0, 0, 0, {}, 0.0, 0.0, failures=failures)


def scored(ordinal: int, done: int, failures: Mapping[str, int]) -> Scored:
    return Scored(ordinal, 0, None, 8, (), {}, done, 0, sessions=counts(done, failures))


def books(groups_per_step: int = 2) -> tuple[Bookkeeping, FakeRecorder]:
    recorder = FakeRecorder()
    return Bookkeeping(recorder, State("r", 0, 0, 0, 0, ()), groups_per_step, 0), recorder


def records(recorder: FakeRecorder) -> list[dict[str, object]]:
    return [metrics for event, _, _, metrics in recorder.records if event == "failed_sessions"]


def test_the_most_frequent_reason_counts() -> None:
    failed = FailedSessions()
    assert failed.metrics() == {} and not failed.mostly
    failed.add(counts(3, {BROKEN: 1}))
    assert not failed.mostly
    failed.add(counts(0, {BROKEN: 1, KEY: 3}))
    assert failed.mostly
    assert failed.metrics() == {"sessions": 8, "failed": 5, "reason": KEY, "times": 3}


def test_reasons_that_all_differ_take_bounded_memory() -> None:
    failed = FailedSessions()
    for number in range(MOST_REASONS + 9):
        failed.add(counts(0, {f"env_error: task {number}": 1}))
    assert failed.metrics()["failed"] == MOST_REASONS + 9
    assert len(failed._reasons) == MOST_REASONS


def test_they_are_recorded_before_a_step_if_most_fail() -> None:
    made, recorder = books()
    made.scored(scored(0, 0, {BROKEN: 4}))
    assert not records(recorder), "a step needs two groups"
    made.scored(scored(1, 1, {BROKEN: 2, KEY: 1}))
    assert records(recorder) == [{"sessions": 8, "failed": 7, "reason": BROKEN, "times": 6}]


def test_they_are_recorded_with_a_step_and_at_the_end() -> None:
    async def scenario() -> list[dict[str, object]]:
        made, recorder = books()
        for ordinal in range(3):
            made.scored(scored(ordinal, 3, {KEY: 1}))
        assert not records(recorder), "most did not fail"
        made.since_last_step()
        made.since_last_step()
        made.scored(scored(3, 1, {BROKEN: 3}))
        made.run_ended({})
        return records(recorder)

    assert asyncio.run(scenario()) == [
        {"sessions": 12, "failed": 3, "reason": KEY, "times": 3},
        {"sessions": 4, "failed": 3, "reason": BROKEN, "times": 3},
    ]


def test_a_run_without_steps_ends_with_the_most_frequent_reason() -> None:
    made, _ = books(groups_per_step=1)
    with pytest.raises(RuntimeError, match="nothing is left to train on") as ended:
        for ordinal in range(LOST_ROUNDS + 1):
            made.scored(scored(ordinal, 1, {BROKEN: 2, KEY: 1}))
            made.end(Outstanding(ordinal, 0), "dropped", "usable trajectories: 1")
    count = 4 * (LOST_ROUNDS + 1)
    assert f"{count * 3 // 4} of {count} sessions failed, most often ({count // 2} times)" in str(
        ended.value
    )
    assert BROKEN in str(ended.value) and KEY not in str(ended.value)


def test_nothing_is_recorded_without_failures_or_sessions() -> None:
    made, recorder = books()
    for ordinal in range(4):
        made.scored(scored(ordinal, 4, {}))
        made.scored(Scored(9, 0, None, 8, (), {}, 2, 0))
    made.run_ended({})
    assert recorder.records == []
