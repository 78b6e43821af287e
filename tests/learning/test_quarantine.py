"""Which batches are kept, and which trajectory is named as the cause."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from recorded import learner_config, recorded_group, state_without_model

from asyncrl.contracts.group_table import groups_to_table
from asyncrl.contracts.outcomes import NOTHING_TO_LEARN
from asyncrl.learning.steps.policy_step import policy_step
from asyncrl.learning.steps.quarantine import KEPT, NormWatch, culprit, keep_batch


@pytest.mark.parametrize("count", [1, 2, 3, 64, 100])
def test_bisection_finds_a_single_culprit_at_the_cost_of_about_one_pass(count: int) -> None:
    for guilty in range(count):
        call_sizes: list[int] = []

        def bad(
            indices: Sequence[int], guilty: int = guilty, call_sizes: list[int] = call_sizes
        ) -> bool:
            call_sizes.append(len(indices))
            return guilty in indices

        assert culprit(count, bad) == guilty
        assert len(call_sizes) <= math.ceil(math.log2(count)) + 1 and sum(call_sizes) <= count + 1


def test_bisection_finds_the_first_of_two_and_none_if_both_are_needed() -> None:
    assert culprit(8, lambda indices: bool({2, 6} & set(indices))) == 2
    assert culprit(8, lambda indices: {2, 6} <= set(indices)) is None
    assert culprit(0, lambda indices: True) is None


def test_a_norm_is_compared_with_the_median_of_the_previous_ones() -> None:
    watch = NormWatch()
    assert [watch.ratio(norm) for norm in (1.0, 50.0, 2.0, 2.0, 2.0, 2.0, 2.0, 3.0)] == [1.0] * 8
    assert watch.ratio(20.0) == 10.0
    for _ in range(32):
        watch.ratio(4.0)
    assert watch.ratio(20.0) == 5.0
    watch.forget()
    assert watch.ratio(1e6) == 1.0


def kept_name(message: str) -> str:
    assert message.startswith("its batch is ")
    return Path(message.removeprefix("its batch is ")).name


TABLES = [
    pa.table({"ordinal": [3], "reward": [[1.0, 0.0]]}),
    pa.table({"ordinal": [4], "reward": [[0.5, 0.0]], "hint": ["only here"]}),
]


def test_batches_are_kept_under_unique_names_up_to_a_limit(
    tmp_path: Path,
) -> None:
    names = [
        kept_name(keep_batch(tmp_path / "kept", "version_000007", "nonfinite", TABLES))
        for _ in range(3)
    ]
    assert names == [
        "version_000007_nonfinite.parquet",
        "version_000007_nonfinite_1.parquet",
        "version_000007_nonfinite_2.parquet",
    ]
    assert pyarrow.parquet.read_table(tmp_path / "kept" / names[2])["ordinal"].to_pylist() == [3, 4]
    for version in range(KEPT):
        assert kept_name(keep_batch(tmp_path / "kept", f"version_{version:06d}", "spike", TABLES))
    assert (
        keep_batch(tmp_path / "kept", "version_000999", "spike", TABLES)
        == f"its batch was not kept: {KEPT} such batches exist already"
    )
    assert kept_name(keep_batch(tmp_path / "kept", "version_000999", "nonfinite", TABLES)), (
        "spikes leave room for the batch that ends a run"
    )
    assert len(list((tmp_path / "kept").iterdir())) == KEPT + 4, "no half-written file is left"


def test_a_batch_that_cannot_be_written_is_reported_without_raising(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("a file where the folder should be")
    assert re.match(
        r"its batch could not be kept in .*kept: .*is a file, not a directory",
        keep_batch(tmp_path / "kept", "version_000001", "spike", TABLES),
    )
    unlike = [pa.table({"ordinal": [3]}), pa.table({"ordinal": ["three"]})]
    message = keep_batch(tmp_path / "other", "version_000001", "spike", unlike)
    assert message.startswith("its batch could not be kept in ") and "\n" not in message


def test_a_batch_without_a_loss_token_is_skipped_and_kept(tmp_path: Path) -> None:
    group = recorded_group(5)
    masked = replace(
        group,
        trajectories=tuple(
            replace(member, loss_mask=(0,) * len(member.loss_mask)) for member in group.trajectories
        ),
    )
    state = state_without_model(learner_config(tmp_path / "model"))
    result = policy_step(state, [groups_to_table([masked])])
    assert not result.applied and result.reason == NOTHING_TO_LEARN
    path = tmp_path / "runs" / "learner-test" / "kept" / "version_000000_empty.parquet"
    assert result.note == f"{NOTHING_TO_LEARN}; its batch is {path}" and path.exists()
