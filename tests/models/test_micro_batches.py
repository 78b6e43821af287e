"""Micro-batches of pairs: which trajectories belong together, and the weights of their tokens in
each component of the loss."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl.models.micro_batches import (
    ALONE,
    Example,
    micro_batch,
    packing_units,
    plain_example,
    token_example,
)


def example(length: int, unit: int = ALONE, chosen: bool | None = None, **changes) -> Example:
    """A row of this many tokens, of which all but the first are targets. Rows of different lengths
    begin differently."""
    row = plain_example(np.arange(length, 2 * length), 1, np.ones(length - 1, dtype=bool))
    return replace(row, unit=unit, chosen=chosen, **changes)


EXAMPLES = [
    example(4, 0, True),
    example(6, 0, False),
    example(9),
    example(5, 3, True),
    example(3, 3, False),
]


def test_examples_of_one_unit_are_found() -> None:
    assert packing_units(EXAMPLES) == [(0, 1), (2,), (3, 4)]
    assert packing_units(EXAMPLES[2:3]) is None and packing_units([]) is None


def test_a_micro_batch_knows_the_sides_of_its_pairs() -> None:
    batch = micro_batch(EXAMPLES, range(5), "cpu")
    assert batch.order == (2, 1, 3, 0, 4), "longest first"
    assert batch.pairs == ((3, 1), (2, 4))
    assert [batch.chosen[side] for side, _ in batch.pairs] == [True, True]
    assert micro_batch(EXAMPLES, [2], "cpu").pairs == ()
    assert micro_batch(EXAMPLES, [], "cpu").pairs == ()


def test_a_pair_that_was_split_is_an_error() -> None:
    with pytest.raises(KeyError):
        _ = micro_batch(EXAMPLES, [0, 2], "cpu").pairs


def test_components_and_slopes_follow_their_tokens() -> None:
    weights = np.array([0.5, 0.0, 0.25], dtype=np.float32)
    rows = [
        example(4, components={"ce": weights}, slope=-0.5),
        example(6),
    ]
    batch = micro_batch(rows, [0, 1], "cpu")
    assert batch.components.keys() == {"ce"}
    torch.testing.assert_close(batch.components["ce"], torch.tensor([0.0] * 5 + [0.5, 0.0, 0.25]))
    assert batch.slopes is not None and batch.slopes.tolist() == [0.0] * 5 + [-0.5] * 3
    plain = micro_batch([token_example(((1,), (2, 3)))], [0], "cpu")
    assert plain.components == {} and plain.slopes is None


def test_a_share_of_a_row_keeps_its_pairs() -> None:
    batch = micro_batch(EXAMPLES, range(5), "cpu")
    share, _ = batch.share(0, 5)
    assert share.pairs == batch.pairs
    small = micro_batch(EXAMPLES, [4, 3], "cpu").at_least(20)
    assert small.pairs == ((0, 1),) and len(small.segments.lengths) == 3
