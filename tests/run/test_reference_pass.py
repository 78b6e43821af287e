"""The rows that the reference policy scores for KTO, with a reference that needs no process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from fake_actors import FakeActor

from asyncrl.contracts.offline_rows import UNPAIRED_SCHEMA
from asyncrl.data.token_file import open_token_file
from asyncrl.run.offline.reference_pass import score_rows
from asyncrl.runtime.files.arrow_files import write_batches


async def logprobs(rows: list[tuple[list[int], list[int]]]) -> list[np.ndarray]:
    return [-np.array(following, np.float32) for _, following in rows]


REFERENCE: Any = FakeActor(logprobs=logprobs)


@pytest.mark.parametrize("batch", [1, 3, 100])
async def test_ktos_baseline_gets_completions_of_other_prompts(tmp_path: Path, batch: int) -> None:
    """Rows 2k and 2k + 1 have the prompt k. The calls of the reference change nothing."""
    rows = [
        {
            "input_ids": [pair, 10 + pair, 50 + side],
            "loss_mask": [False, False, True],
            "label": not side,
        }
        for pair in range(20)
        for side in (0, 1)
    ]
    table = pa.Table.from_pylist(rows, UNPAIRED_SCHEMA)
    write_batches(tmp_path / "train.arrow", UNPAIRED_SCHEMA, table.to_batches())
    file = open_token_file(tmp_path / "train.arrow")
    assert file is not None
    scored = await score_rows(REFERENCE, file, tmp_path / "scored.arrow", batch, 3)
    found = scored.take(range(40)).to_pylist()
    for row in found:
        assert row["mismatched_ids"] == [*row["input_ids"][:2], 51], "of the pair before"
        assert row["mismatched_reference"] == [-51.0]
        assert row["reference"] == [-float(row["input_ids"][2])]
