"""Why sessions fail is recorded, also if no step ever comes."""

from __future__ import annotations

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
    return SessionCounts(ends, 0, {}, 0, 0, {}, 0.0, 0.0, failures=failures)


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


def task(number: int) -> str:
    """A reason with a name that no other number has."""
    name = "".join("ghijklmnop"[int(digit)] for digit in str(number))
    return f"env_error: task {name}"


@pytest.mark.parametrize("more", [0, 1, 9])
def test_reasons_that_all_differ_take_bounded_memory(more: int) -> None:
    failed = FailedSessions()
    for number in range(MOST_REASONS + more):
        failed.add(counts(0, {task(number): 1}))
        assert (
            len(failed._reasons) <= MOST_REASONS and failed._texts.keys() == failed._reasons.keys()
        )
    shown = failed.metrics()
    assert shown["failed"] == MOST_REASONS + more and shown["times"] == 1
    assert str(shown["reason"]).startswith("env_error: task ")


def test_a_frequent_reason_is_found_after_many_others() -> None:
    failed = FailedSessions()
    for number in range(20 * MOST_REASONS):
        failed.add(counts(0, {task(number): 1}))
    for _ in range(25 * MOST_REASONS):
        failed.add(counts(0, {BROKEN: 1}))
    for number in range(20 * MOST_REASONS):
        failed.add(counts(0, {task(number): 1}))
    found = failed.metrics()
    assert found["reason"] == BROKEN and isinstance(found["times"], int)
    assert 0 <= 25 * MOST_REASONS - found["times"] <= 65 * MOST_REASONS / (MOST_REASONS + 1)


def test_reasons_that_differ_by_paths_and_numbers_are_one() -> None:
    failed = FailedSessions()
    for number in range(3):
        failed.add(counts(0, {f"env_error: KeyError: {number}{number}": 2}))
        failed.add(
            counts(0, {f"env_error: OSError: '/tmp/session_a_{number}b/x/tmpab_cde9{number}.t'": 1})
        )
        failed.add(
            counts(0, {f"env_error: OSError: '/tmp/session_{number}xyzuvw/x/{number}9abcd.t'": 1})
        )
    assert failed.metrics() == {
        "sessions": 12,
        "failed": 12,
        "reason": "env_error: OSError: '/tmp/session_a_0b/x/tmpab_cde90.t'",
        "times": 6,
    }


def test_a_reason_is_one_line() -> None:
    failed = FailedSessions()
    failed.add(counts(0, {"env_error: SystemExit: red\nstep 9: all\r\n\u2028is well": 1}))
    assert failed.metrics()["reason"] == "env_error: SystemExit: red step 9: all is well"
    assert failed.why().endswith("(1 times) env_error: SystemExit: red step 9: all is well")


def test_they_are_recorded_before_a_step_if_most_fail() -> None:
    made, recorder = books()
    made.scored(scored(0, 0, {BROKEN: 4}))
    assert not records(recorder), "a step needs two groups"
    made.scored(scored(1, 1, {BROKEN: 2, KEY: 1}))
    assert records(recorder) == [{"sessions": 8, "failed": 7, "reason": BROKEN, "times": 6}]


async def test_they_are_recorded_with_a_step_and_at_the_end() -> None:
    made, recorder = books()
    for ordinal in range(3):
        made.scored(scored(ordinal, 3, {KEY: 1}))
    assert not records(recorder), "most did not fail"
    made.since_last_step()
    made.since_last_step()
    made.scored(scored(3, 1, {BROKEN: 3}))
    made.run_ended({})
    found = records(recorder)
    assert found == [
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


def unasked(ordinal: int, count: int, sessions: int = 4) -> Scored:
    """A group in which the model took no turn in so many sessions."""
    why = {"done: it asked the model for no turn": count} if count else {}
    of = SessionCounts({"done": sessions}, 0, {}, 0, 0, {}, 0.0, 0.0, failures=why, unasked=count)
    return Scored(ordinal, 0, None, 8, (), {}, sessions - count, 0, sessions=of)


def test_a_run_that_never_asks_the_model_ends_soon_and_says_so() -> None:
    made, recorder = books()
    with pytest.raises(RuntimeError, match="the model took no turn in any of 28 sessions") as ended:
        for ordinal in range(LOST_ROUNDS):
            made.scored(unasked(ordinal, 4))
            made.end(Outstanding(ordinal, 0), "dropped", "usable trajectories: 0")
    assert "(28 times) done: it asked the model for no turn: nothing is left" in str(ended.value)
    first, *_ = records(recorder)
    assert (first["failed"], first["sessions"]) == (8, 8)


def test_a_run_that_sometimes_asks_the_model_goes_on() -> None:
    made, _ = books()
    for ordinal in range(20):
        made.scored(unasked(ordinal, 4 if ordinal else 3))
        made.end(Outstanding(ordinal, 0), "dropped", "usable trajectories: 1")


def test_nothing_is_recorded_without_failures_or_sessions() -> None:
    made, recorder = books()
    for ordinal in range(4):
        made.scored(scored(ordinal, 4, {}))
        made.scored(Scored(9, 0, None, 8, (), {}, 2, 0))
    made.run_ended({})
    assert recorder.records == []
