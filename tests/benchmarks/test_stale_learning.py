"""The task and the figures of `benchmarks.stale_learning`."""

from __future__ import annotations

import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from asyncrl.config import load_config, load_offline
from benchmarks import countdown, stale_learning

SWITCH = countdown.SWITCH
START = SWITCH + 1
RIGHT = countdown.answer("bgCF", START)


@pytest.mark.parametrize(
    ("completion", "reward", "first_part", "last_part"),
    [
        (RIGHT, 1.0, 1.0, 1.0),
        (RIGHT.replace("b", "g"), 1 - 2 / START, 0.0, 1.0),
        (RIGHT.replace(f"{SWITCH}b", ""), 1 - 1 / START, 0.5, 1.0),
        (RIGHT.replace(f"{SWITCH}b", f"{SWITCH}g{SWITCH}b"), 1 - 2 / (START + 1), 0.5, 1.0),
        (RIGHT + "7C", START / (START + 1), 1.0, 1.0),
        ("", 0.0, 0.0, 0.0),
    ],
)
def test_the_reward_counts_each_number_once(
    completion: str, reward: float, first_part: float, last_part: float
) -> None:
    found = countdown.letters_right([completion], ["bgCF"], [START])
    assert found["first_part"] == [first_part] and found["last_part"] == [last_part]
    assert found["reward"] == pytest.approx([reward])


def test_a_short_answer_has_no_first_part_and_only_capitals() -> None:
    assert countdown.answer("bgCF", 3) == "3C2C1C"
    found = countdown.letters_right(["3C2F1C"], ["bgCF"], [3])
    assert found == {"reward": [2 / 3], "first_part": [None], "last_part": [2 / 3]}


def test_held_out_letters_are_new_and_the_warm_start_knows_no_rule(tmp_path: Path) -> None:
    countdown.make_data(tmp_path, seed=0)
    tables = {path.stem: pq.read_table(path).to_pylist() for path in tmp_path.glob("*.parquet")}
    letters = {name: {row["letters"] for row in rows} for name, rows in tables.items()}
    assert len(letters["all"]) == countdown.HELD_OUT_LETTERS
    assert letters["all"].isdisjoint(letters["train"] | letters["warm_start"])
    quarter = countdown.HELD_OUT_ROWS // 4
    starts = sorted(row["start"] for row in tables["all"])
    assert sorted(row["start"] for row in tables["short"]) == starts[:quarter]
    assert sorted(row["start"] for row in tables["long"]) == starts[-quarter:]
    found = countdown.letters_right(
        [row["answer"] for row in tables["warm_start"]],
        [row["letters"] for row in tables["warm_start"]],
        [row["start"] for row in tables["warm_start"]],
    )
    for part in found.values():
        values = [value for value in part if value is not None]
        assert sum(values) / len(values) == pytest.approx(0.5, abs=0.02)


def test_the_longest_answer_fits_into_both_configs() -> None:
    tokens = 2 * countdown.LONGEST + 1
    train = load_config(stale_learning.CONFIG, [])
    sft = load_offline(stale_learning.WARM_START, [])
    assert train.rollout.max_completion_length == tokens
    assert sft.data.max_length >= tokens + train.data.max_prompt_length
    assert train.model.path == str(sft.run_directory / "hf")
    assert set(train.eval.sets) == {"all", "short", "long"}


def test_the_masked_share_counts_tokens_not_steps() -> None:
    assert stale_learning.masked_share([90, 100], [0.0, 0.0]) == 0
    assert stale_learning.masked_share([900, 50], [0.0, 0.5]) == pytest.approx(0.05)


def test_quarters_leave_out_steps_without_a_value() -> None:
    values = [1, None, 2, 4, None, None, 5, 7]
    found = stale_learning.by_quarter(values)
    assert found[:2] == [1, 3] and math.isnan(found[2]) and found[3] == 6


def test_seconds_are_relative_to_wait_with_the_same_seed() -> None:
    wait = {0: {"s/step": 2.0, "all": 0.5}, 1: {"s/step": 4.0, "all": 0.7}}
    mask = {0: {"s/step": 1.0, "all": 0.4}, 1: {"s/step": 1.0, "all": 0.6}}
    rows = dict(stale_learning.rows_of(mask, wait))
    assert [rows[f"seed {seed}"]["of wait"] for seed in mask] == [0.5, 0.25]
    assert rows["mean"] == pytest.approx({"s/step": 1.0, "all": 0.5, "of wait": 0.375})
    assert rows["spread"] == pytest.approx({"s/step": 0.0, "all": 0.2, "of wait": 0.25})
    assert math.isnan(dict(stale_learning.rows_of(mask, {}))["seed 0"]["of wait"])
