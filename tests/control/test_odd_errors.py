"""What an error says may be no text at all, or a megabyte of it: a model wrote it. It is one
group's failure, and must fit where failures are kept."""

import pyarrow as pa
import pytest

from asyncrl.contracts.outcomes import UNFORESEEN, Outcome
from asyncrl.contracts.rows import SCORED_COLUMNS
from asyncrl.rundir.outcomes import OutcomesWriter, read_outcomes
from asyncrl.runtime.failures import unforeseen

ODD = ["half a pair \ud800", "\udcff\udcfe", "x" * 5_000_000, "null \0 and \x1b[31m"]


@pytest.mark.parametrize("message", ODD, ids=["half", "bytes", "long", "control"])
def test_what_nobody_foresaw_fits_a_column_and_a_line(message):
    try:
        raise ValueError(message)
    except ValueError as error:
        said = unforeseen("group 3", error)
    first, _, stack = said.partition("\n")
    assert (
        first.startswith(f"{UNFORESEEN}group 3: ValueError: ")
        and "raise ValueError(message)" in stack
        and len(said) < 25_000
    )
    assert pa.array([said], SCORED_COLUMNS["failure"])[0].as_py() == said


@pytest.mark.parametrize("reason", ODD, ids=["half", "bytes", "long", "control"])
def test_an_outcome_is_written_whatever_its_reason_says(tmp_path, reason):
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
