"""Bucket layouts, computed by hand."""

from __future__ import annotations

import pytest

from asyncrl.contracts.messages import TensorEntry
from asyncrl.weights.layout import plan_buckets


def test_parameters_are_aligned_and_never_split() -> None:
    entries, sizes = plan_buckets(
        [
            ("a", (3,), "float32"),
            ("b", (5, 5), "float32"),
            ("c", (7,), "bfloat16"),
            ("d", (16,), "float32"),
        ],
        200,
    )
    assert entries == (
        TensorEntry("a", (3,), "float32", 0, 0, 12),
        TensorEntry("b", (5, 5), "float32", 0, 64, 100),
        TensorEntry("c", (7,), "bfloat16", 1, 0, 14),
        TensorEntry("d", (16,), "float32", 1, 64, 64),
    )
    assert sizes == (164, 128)


def test_a_bucket_grows_to_the_largest_parameter() -> None:
    entries, sizes = plan_buckets(
        [("a", (3,), "float32"), ("b", (100,), "float32"), ("c", (1,), "float32")], 64
    )
    assert [entry.bucket for entry in entries] == [0, 1, 2]
    assert sizes == (12, 400, 4)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([], "at least one"),
        ([("a", (1,), "int4")], "dtype 'int4'"),
        ([("a", (1,), "float32"), ("a", (2,), "float32")], "'a' is listed twice"),
    ],
)
def test_a_bad_list_of_parameters_raises(
    shapes: list[tuple[str, tuple[int, ...], str]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan_buckets(shapes, 64)
