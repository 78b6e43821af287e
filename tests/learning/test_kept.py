"""Which batches are kept, and who is to blame for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from asyncrl.learning.kept import KEPT, NormWatch, culprit, keep_batch


@pytest.mark.parametrize("count", [1, 2, 3, 64, 100])
def test_bisection_finds_any_single_culprit_for_the_price_of_about_one_pass(count: int) -> None:
    for guilty in range(count):
        looked: list[int] = []

        def bad(indices: Sequence[int], guilty: int = guilty, looked: list[int] = looked) -> bool:
            looked.append(len(indices))
            return guilty in indices

        assert culprit(count, bad) == guilty
        assert len(looked) <= math.ceil(math.log2(count)) + 1 and sum(looked) <= count + 1


def test_bisection_blames_the_first_of_two_and_nobody_where_it_takes_two() -> None:
    assert culprit(8, lambda indices: bool({2, 6} & set(indices))) == 2
    assert culprit(8, lambda indices: {2, 6} <= set(indices)) is None
    assert culprit(0, lambda indices: True) is None


def test_a_norm_is_compared_with_the_median_of_those_before_it() -> None:
    watch = NormWatch()
    assert [watch.ratio(norm) for norm in (1.0, 50.0, 2.0, 2.0, 2.0, 2.0, 2.0, 3.0)] == [1.0] * 8
    assert watch.ratio(20.0) == 10.0
    for _ in range(32):
        watch.ratio(4.0)
    assert watch.ratio(20.0) == 5.0
    watch.forget()
    assert watch.ratio(1e6) == 1.0


def test_batches_are_kept_whole_under_names_of_their_own_and_not_without_end(tmp_path: Path) -> None:
    tables = [pa.table({"ordinal": [3], "reward": [[1.0, 0.0]]}), pa.table({"ordinal": [4], "reward": [[0.5, 0.0]], "hint": ["only here"]})]
    names = [path.name for path in (keep_batch(tmp_path / "kept", 7, "nonfinite", tables) for _ in range(3)) if path]
    assert names == ["version_000007_nonfinite.parquet", "version_000007_nonfinite_1.parquet", "version_000007_nonfinite_2.parquet"]
    assert pyarrow.parquet.read_table(tmp_path / "kept" / names[2])["ordinal"].to_pylist() == [3, 4]
    for version in range(KEPT - 3):
        assert keep_batch(tmp_path / "kept", 100 + version, "spike", tables)
    assert keep_batch(tmp_path / "kept", 999, "spike", tables) is None
    assert len(list((tmp_path / "kept").iterdir())) == KEPT, "no half-written file is left"
