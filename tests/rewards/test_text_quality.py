"""Detects gibberish and leaves normal text alone."""

import random

import numpy as np
import pytest

from asyncrl.rewards.text_quality import LOOP_NGRAM, LOOP_TOKENS, looping, unprintable


def has_loop(ids):
    [found] = looping(np.array(ids, dtype=np.int32), np.array([0, len(ids)]))
    return bool(found)


@pytest.mark.parametrize("ngram", [1, 2, 7, 8, 9, 31, LOOP_NGRAM])
def test_a_loop_is_found_wherever_it_is_and_only_when_it_is_long_enough(ngram):
    pattern, before, after = list(range(100, 100 + ngram)), list(range(50)), list(range(200, 250))
    enough = max(4 * ngram, LOOP_TOKENS)
    stretch = (pattern * (enough // ngram + 1))[:enough]
    assert (
        has_loop(stretch)
        and has_loop(before + stretch)
        and has_loop(stretch + after)
        and has_loop(before + stretch + after)
    )
    assert not has_loop(before + stretch[:-1] + after)


def test_no_loop() -> None:
    assert (
        not has_loop([])
        and not has_loop([7] * (LOOP_TOKENS - 1))
        and not has_loop(list(range(LOOP_NGRAM + 1)) * 8)
    )
    generator = random.Random(0)
    assert not any(has_loop([generator.randrange(10) for _ in range(500)]) for _ in range(20))


def test_against_a_plain_search() -> None:
    def plain(ids):
        return any(
            ids[start : start + span] == (ids[start : start + n] * span)[:span]
            for n in range(1, LOOP_NGRAM + 1)
            for span in [max(4 * n, LOOP_TOKENS)]
            for start in range(len(ids) - span + 1)
        )

    generator = random.Random(1)
    found = 0
    for _ in range(150):
        n = generator.randrange(1, 20)
        ids = [generator.randrange(3) for _ in range(n)] * generator.randrange(2, 8) + [
            generator.randrange(3) for _ in range(generator.randrange(40))
        ]
        found += plain(ids)
        assert has_loop(ids) == plain(ids), ids
    assert 20 < found < 130


def test_a_loop_does_not_reach_into_the_next_completion() -> None:
    """Many completions at once give what each gives alone."""
    generator = random.Random(2)
    completions = [[7] * 20, [7] * 31, [], [7] * 32, [], [7], [1, 2] * 15, [1, 2] * 16, [1, 2]]
    completions += [
        [generator.randrange(2) for _ in range(generator.randrange(4))] * generator.randrange(40)
        for _ in range(100)
    ]
    starts = np.cumsum([0, *map(len, completions)])
    together = looping(
        np.array([token for ids in completions for token in ids], dtype=np.int32), starts
    )
    assert together.tolist() == [has_loop(ids) for ids in completions]
    assert together.tolist()[:9] == [False, False, False, True, False, False, False, True, False]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("plain\n\ttext\r\n", 0),
        ("héllo, 世界 🙂 ½\u00a0€\u200d", 0),
        ("a\x00b\x1b", 2),
        ("\ufffd\ufffdx", 2),
        ("\ue000\U000e0080", 2),
        ("\ud800", 1),
    ],
)
def test_unprintable_characters_are_counted(text, count):
    assert unprintable(text) == count
