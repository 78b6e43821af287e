"""Errors with odd messages, such as invalid text or megabytes of model output. Such an error is one
group's failure, and its message must fit into the recorded columns."""

import pyarrow as pa
import pytest

from asyncrl.contracts.outcomes import UNFORESEEN, Outcome
from asyncrl.contracts.rows import SCORED_COLUMNS
from asyncrl.rundir.outcomes import OutcomesWriter, read_outcomes
from asyncrl.runtime.failures import unforeseen

ODD = ["half a pair \ud800", "\udcff\udcfe", "x" * 5_000_000, "null \0 and \x1b[31m"]


@pytest.mark.parametrize("message", ODD, ids=["half", "bytes", "long", "control"])
def test_an_unexpected_exception_fits_into_a_column_and_a_line(message):
    try:
        raise ValueError(message)
    except ValueError as error:
        recorded = unforeseen("group 3", error)
    first, _, stack = recorded.partition("\n")
    assert (
        first.startswith(f"{UNFORESEEN}group 3: ValueError: ")
        and "raise ValueError(message)" in stack
        and len(recorded) < 25_000
    )
    assert pa.array([recorded], SCORED_COLUMNS["failure"])[0].as_py() == recorded


@pytest.mark.parametrize("reason", ODD, ids=["half", "bytes", "long", "control"])
def test_an_outcome_is_written_with_any_reason(tmp_path, reason):
    writer = OutcomesWriter(tmp_path, 0)
    writer.write([Outcome(0, 5, "failed", reason, 1)])
    writer.flush()
    [path] = tmp_path.glob("*.parquet")
    [kept] = read_outcomes(path)[0].to_pylist()
    assert (
        kept["ordinal"] == 5
        and kept["reason"][:3] == reason[:3].encode("utf-8", "backslashreplace").decode()[:3]
        and len(kept["reason"]) < 2000
    )
