"""The check of token tables."""

import pyarrow as pa
import pytest

from asyncrl.contracts.offline_rows import (
    PREFERENCE_SCHEMA,
    REFERENCE,
    SFT_SCHEMA,
    UNPAIRED_SCHEMA,
    check_offline_table,
)

SFT = pa.table(
    {"input_ids": [[1, 2, 3], [4], []], "loss_mask": [[False, True, True], [False], []]},
    SFT_SCHEMA,
)
PAIRS = pa.table(
    {
        "chosen_ids": [[1, 2], [1, 3, 4]],
        "chosen_mask": [[False, True], [False, True, True]],
        "rejected_ids": [[1, 5], [1, 6]],
        "rejected_mask": [[False, True], [False, True]],
    },
    PREFERENCE_SCHEMA,
)
UNPAIRED = pa.table(
    {"input_ids": [[1, 2]], "loss_mask": [[False, True]], "label": [True]}, UNPAIRED_SCHEMA
)


def reference(table, name, values):
    return table.append_column(name, pa.array(values, REFERENCE))


@pytest.mark.parametrize(
    "table",
    [
        SFT,
        SFT.slice(1),
        PAIRS,
        UNPAIRED,
        reference(UNPAIRED, "reference", [[-0.5]]),
        reference(reference(PAIRS, "chosen_reference", [[-1], [-1, -2]]), "extra", [[], []]),
        pa.concat_tables([SFT, SFT]),
        SFT.slice(0, 0),
    ],
)
def test_token_rows_are_accepted(table):
    check_offline_table(table)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (SFT.select([0]), r"columns \['input_ids'\], which are no token rows"),
        (
            pa.table({"input_ids": [[1]], "loss_mask": [[0]]}),
            "column 'input_ids' has type list<item: int64>",
        ),
        (
            pa.table({"input_ids": [[1], None], "loss_mask": [[False], []]}, SFT_SCHEMA),
            "'input_ids' has type .* or nulls",
        ),
        (
            pa.table({"input_ids": [[1], [2]], "loss_mask": [[False], []]}, SFT_SCHEMA),
            "row 1: 'loss_mask' has 0 values for 1 tokens",
        ),
        (
            pa.table({"input_ids": [[], [2]], "loss_mask": [[], [True]]}, SFT_SCHEMA),
            "'loss_mask' marks a first token",
        ),
        (
            reference(PAIRS, "rejected_reference", [[-1], [-1, -2]]),
            "row 1: 'rejected_reference' has 2 values for 1 targets",
        ),
        (
            reference(PAIRS, "chosen_reference", [[-1], None]),
            "row 1: 'chosen_reference' has -1 values for 2 targets",
        ),
        (reference(UNPAIRED, "reference", [[]]), "'reference' has 0 values for 1 targets"),
    ],
)
def test_other_tables_are_refused(table, message):
    with pytest.raises(ValueError, match=message) as error:
        check_offline_table(table)
    assert "\n" not in str(error.value)
