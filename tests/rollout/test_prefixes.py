"""What a session's turns could find in a prefix cache."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.contracts.messages import Generated
from asyncrl.contracts.rows import Completion, VersionSpan
from asyncrl.rollout.prefixes import PrefixCounter

BLOCK = 4


def answered(ids: Sequence[int], version: int, cached: int, block: int = BLOCK) -> Generated:
    completion = Completion(
        tuple(ids),
        (0.0,) * len(ids),
        (VersionSpan(version, 0, len(ids)),) if ids else (),
        "stop",
    )
    return Generated((completion,), "a", 0.0, 1.0, cached_tokens=(cached,), cache_block=block)


def test_whole_blocks_of_earlier_turns_are_reusable() -> None:
    counter = PrefixCounter()
    first = list(range(10))
    assert counter.expected(first) == {}
    counter.count({}, first, answered([20, 21, 22], 5, 0))
    # 12 of the 13 tokens were read: the last one was only sampled.
    second = [*first, 20, 21, 22, 30]
    assert counter.expected(second) == {5: 12}
    assert counter.expected(second[:12]) == {5: 8}, "a prompt's last token is always computed"
    assert counter.expected([*first, 20, 99, 22, 30]) == {5: 8}
    assert counter.expected([99, *second]) == {5: 0}
    counter.count({5: 12}, second, answered([40], 5, 8))
    assert (counter.reusable, counter.cached) == (12, 8)


def test_a_version_reuses_only_its_own_turns() -> None:
    counter = PrefixCounter()
    prompt = list(range(9))
    for version in (1, 2, 3):
        expected = counter.expected(prompt)
        assert version not in expected
        counter.count(expected, prompt, answered([7], version, 8))
    assert (counter.reusable, counter.cached) == (0, 0)
    assert counter.expected(prompt) == {2: 8, 3: 8}, "older ones are forgotten"


def test_a_turn_beside_another_one_does_not_expect_its_blocks() -> None:
    counter = PrefixCounter()
    prompt = list(range(9))
    counter.count({}, [5] * 9, answered([7], 1, 0))
    expected = counter.expected(prompt)
    counter.count(counter.expected(prompt), prompt, answered([7], 1, 0))
    counter.count(expected, prompt, answered([8], 1, 8))
    assert (counter.reusable, counter.cached) == (0, 0)


def test_more_than_expected_counts_as_expected() -> None:
    """Under `recompute`, a turn may find the blocks of other sessions."""
    counter = PrefixCounter()
    prompt = list(range(9))
    counter.count({}, prompt, answered([7, 8, 9, 10], 1, 8))
    counter.count(counter.expected(prompt), prompt, answered([], 1, 8))
    assert counter.reusable == 0, "nothing was sampled"
    counter.count({1: 4}, prompt, answered([7], 1, 8))
    assert (counter.reusable, counter.cached) == (4, 4)


def test_an_engine_without_a_cache_has_nothing_to_reuse() -> None:
    counter = PrefixCounter()
    for _ in range(2):
        counter.count(counter.expected([1] * 9), [1] * 9, answered([7], 1, 0, block=0))
    assert (counter.reusable, counter.cached) == (0, 0)
