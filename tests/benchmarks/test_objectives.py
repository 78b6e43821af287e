"""The comparison of SFT and DPO with TRL: its rows and arithmetic, and a smoke test."""

from __future__ import annotations

import pytest

from asyncrl.contracts.offline_rows import check_offline_table
from benchmarks import objectives
from benchmarks.objective_passes import Task, offline_config, weighted_mean


@pytest.mark.parametrize("make", [objectives.sft_rows, objectives.pairs])
def test_rows_can_be_trained_and_have_a_long_tail(make) -> None:
    table = make(192, 4096)
    check_offline_table(table)
    lengths = sorted(len(row) for row in table[table.column_names[0]])
    assert 55 < lengths[96] < 75
    assert lengths[0] > objectives.PROMPT and 300 < lengths[-1] <= objectives.LONGEST


def test_the_sides_of_a_pair_share_their_prompt() -> None:
    for row in objectives.pairs(8, 100).to_pylist():
        sides = row["chosen_ids"], row["rejected_ids"]
        assert sides[0][: objectives.PROMPT] == sides[1][: objectives.PROMPT]
        assert sides[0] != sides[1]


@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_the_settings_of_a_task_are_valid(objective: str) -> None:
    config = offline_config(Task(objective, "/bench", 8, 512, 4096, 1, "cpu"))
    assert config.objective.name == objective and config.batch_size == 8


def test_every_second_round_has_the_reverse_order() -> None:
    entries = [objectives.Entry(name, None, "train") for name in "abc"]  # type: ignore[arg-type]
    orders = [[one.name for one in objectives.in_turn(entries, number)] for number in range(3)]
    assert orders == [["a", "b", "c"], ["c", "b", "a"], ["a", "b", "c"]]


def test_a_ratio_pairs_the_passes_of_a_round() -> None:
    # Both become slower in the second round. The ratio of the medians would be 1.25.
    seconds = [(2.0, 1.0), (6.0, 3.0), (4.0, 4.0)]
    found = [{"bare": {"seconds": one}, "ours": {"seconds": other}} for one, other in seconds]
    ratios = objectives.ratios(found, "bare", "ours")
    assert ratios == [2.0, 2.0, 1.0]
    assert objectives.shown(ratios) == "2.000 (1.000 to 2.000)"


def test_the_loss_of_a_pass_is_a_mean_over_its_targets() -> None:
    assert weighted_mean([(1.0, 3.0), (5.0, 1.0)]) == 2.0


@pytest.mark.faults
def test_quick_measures_both_objectives(capsys: pytest.CaptureFixture[str]) -> None:
    assert objectives.main(["--quick"]) == 0  # exits if the losses of the contestants differ
    shown = capsys.readouterr().out
    for part in ("sft: ", "dpo: ", "bare loop", "reference pass: ", "no bar was checked"):
        assert part in shown
