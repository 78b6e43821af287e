"""The audit counts the tokens of the pairs that the learner trains."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from scored_groups import scored_group
from small_config import small_config
from unread_books import unread_books

from asyncrl.learning.steps.online_preference import pairs_table
from asyncrl.preflight.specs import learner_spec
from asyncrl.run.audit.books import OutcomeRow
from asyncrl.run.audit.trained_tokens import trained_tokens
from asyncrl.rundir.audited_rows import read_rows
from asyncrl.runtime.files.parquet import write_table

AT = 5


def groups() -> list[pa.Table]:
    """Groups in the order of a batch: the oldest version first, then by ordinal."""
    versions = {ordinal: [[2 + (ordinal % 3)], [5], [4, 5]] for ordinal in range(8)}
    drawn = random.Random(0)
    made = [
        scored_group(
            ordinal,
            tuple(drawn.choice([0.0, 0.3, 1.0, None]) for _ in range(3)),
            versions=versions[ordinal],
            reasons=drawn.choices(["stop", "length", "repetition"], k=3),
        )
        for ordinal in range(8)
    ]
    return sorted(made, key=lambda table: (2 + table["ordinal"][0].as_py() % 3, 0))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    "preference",
    [
        {},
        {"pairs": {"missing_eos_penalty": 0.5}},
        {"pairs": {"name": "margin", "max_pairs": 2, "min_margin": 0.3}},
        {"pairs": {"name": "margin", "missing_eos_penalty": 0.2}},
    ],
)
def test_the_audit_makes_the_learners_choice(
    tmp_path: Path, preference: dict[str, Any], shuffle: bool
) -> None:
    reward = {"functions": {"f": {"function": "m:f"}}, "shuffle": shuffle}
    config = small_config(algorithm={"preference": preference}, reward=reward, seed=3)
    batch = groups()
    pairs, _ = pairs_table(batch, learner_spec(config), AT)
    trained = sum(
        sum(mask) for side in ("chosen", "rejected") for mask in pairs[f"{side}_mask"].to_pylist()
    )
    write_table(pa.concat_tables(batch), tmp_path / "groups.parquet")
    rows = read_rows(tmp_path / "groups.parquet")
    random.Random(1).shuffle(rows)  # books have no order
    outcome = cast("OutcomeRow", {"trained_at_version": AT})
    books = unread_books(config, oldest_allowed=lambda _: None)
    assert trained_tokens(books, [(outcome, row) for row in rows]) == trained > 0
    every = sum(sum(row.losses) for row in rows)
    assert trained != every
    books = unread_books(small_config(), oldest_allowed=lambda _: None)
    assert trained_tokens(books, [(outcome, row) for row in rows]) == every
