"""The order of a mixture: requested shares, no repeats before every row of a source has appeared,
and permanent ordinals."""

from collections import Counter

import numpy as np
import pytest

from asyncrl.data.mixture import Order, ordinal_to_row


def drawn(order, ordinals):
    """(Source, row in it) of each ordinal."""
    ends = np.cumsum(order.rows)
    rows = [order.epoch_and_row(ordinal)[1] for ordinal in ordinals]
    sources = np.searchsorted(ends, rows, side="right")
    return [
        (int(source), int(row - (ends - order.rows)[source]))
        for source, row in zip(sources, rows, strict=True)
    ]


def test_without_weights_all_sources_form_one_dataset():
    order = Order((7, 3), None, seed=5)
    assert [order.epoch_and_row(ordinal) for ordinal in range(25)] == [
        ordinal_to_row(ordinal, 10, 5) for ordinal in range(25)
    ]
    assert order.shares == (0.7, 0.3)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    ("rows", "weights"),
    [
        ((100, 10), (0.5, 0.5)),
        ((3, 5000, 40), (1, 2, 7)),
        ((1, 1), (1, 10_000)),
        ((900, 300), (3, 1)),
    ],
)
def test_shares_follow_the_weights_and_no_row_repeats_before_all_have_appeared(
    rows, weights, shuffle
):
    order = Order(rows, weights, 3, shuffle)
    count = 2 * order.epoch + 17
    places = drawn(order, range(count))
    whole = Counter(source for source, _ in places[: order.epoch])
    for source, share in enumerate(np.array(weights) / sum(weights)):
        assert (
            whole[source] == order.counts[source]
            and abs(whole[source] / order.epoch - share) <= 1 / order.epoch
        )
        theirs = [row for one, row in places if one == source]
        for start in range(0, len(theirs), rows[source]):
            part = theirs[start : start + rows[source]]
            assert len(set(part)) == len(part)
            assert shuffle or part == list(range(len(part)))
    assert sum(order.counts) == order.epoch


def test_any_ordinal_can_be_computed_first():
    """A resume starts at its frontier, and a new process knows no earlier ordinals."""
    forward = [Order((50, 20), (1, 4), 9).epoch_and_row(ordinal) for ordinal in range(3000)]
    backward = [
        Order((50, 20), (1, 4), 9).epoch_and_row(ordinal) for ordinal in reversed(range(2900, 3000))
    ]
    assert forward[2900:] == backward[::-1]
    assert [epoch for epoch, _ in forward] == [ordinal // 1000 for ordinal in range(3000)]


def test_seeds_and_epochs_differ_and_sources_are_mixed_within_an_epoch():
    order, other = Order((50, 20), (1, 1), 9), Order((50, 20), (1, 1), 10)
    first = drawn(order, range(1000))
    assert first != drawn(other, range(1000)) and first != drawn(order, range(1000, 2000))
    for shuffle in (True, False):
        sources = [source for source, _ in drawn(Order((50, 20), (1, 1), 9, shuffle), range(1000))]
        assert all(30 <= sum(sources[start : start + 100]) <= 70 for start in range(0, 1000, 100))


def test_an_order_does_not_change_from_release_to_release():
    """Checkpoints depend on it."""
    assert [Order((5, 3), (1, 1), 0).epoch_and_row(ordinal)[1] for ordinal in range(12)] == [
        2,
        0,
        4,
        3,
        6,
        7,
        1,
        5,
        5,
        2,
        7,
        6,
    ]
