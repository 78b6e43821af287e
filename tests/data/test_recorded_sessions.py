"""Sessions that a run recorded, as rows of SFT, DPO and KTO: exactly the sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from chat_families import CHATML
from scripted_sessions import Script, Turn, record
from small_config import offline_spec

from asyncrl.config import ConfigError
from asyncrl.contracts.offline_rows import check_offline_table
from asyncrl.data.offline_report import OfflineReport
from asyncrl.data.offline_rows import write_offline_rows
from asyncrl.rewards.files import write_groups
from asyncrl.runtime.files.arrow_files import map_table

LONG = Script(("ask", "ask higher", "ask lower"), ("5", "8", "7"), 1.0)
SHORT = Script(("ask", "ask higher"), ("1", "2"), 0.25)
CHOICES = Script(("two", "ask why"), ("4", "6", "so"), 0.5)
BRANCHED = Script(("ask", "ask higher", "forget again", "ask lower"), ("5", "8", "9", "7"), 2.0)
FAILED = Script(("ask", "ask higher"), ("5", "8"), 9.0, "env_error")

Read = Callable[..., tuple[list[dict[str, Any]], OfflineReport, list[list[Turn]]]]


@pytest.fixture
def recorded(chat_model: Callable[[str], str], tmp_path: Path) -> Read:
    """`recorded(scripts, objective, change, **fields)`: the rows and the report of one group of
    sessions, and the turns that were sampled in each session."""

    def read(
        scripts: Sequence[Script],
        objective: Any = "sft",
        change: Callable[[pa.Table], pa.Table] = lambda table: table,
        **fields: Any,
    ) -> tuple[list[dict[str, Any]], OfflineReport, list[list[Turn]]]:
        model = chat_model(CHATML)
        table, turns = record(model, 3, scripts, {"level": 1})
        write_groups(tmp_path / "groups" / "attempt_0001-00000000.parquet", [change(table)])
        spec = offline_spec(model, **fields)
        folder = str(tmp_path / "groups")
        report = write_offline_rows(tmp_path / "t.arrow", spec, folder, "data.train", objective)
        made = map_table(tmp_path / "t.arrow")
        check_offline_table(made)
        return made.to_pylist(), report, turns

    return read


def targets(row: dict[str, Any], ids: str = "input_ids", mask: str = "loss_mask") -> list[int]:
    return [token for token, trained in zip(row[ids], row[mask], strict=True) if trained]


def said(turns: Sequence[Turn]) -> list[int]:
    return [token for turn in turns for token in turn.tokens]


def expected_mask(turns: Sequence[Turn]) -> list[bool]:
    """Of a chain of turns: each turn's tokens are targets, at the place where it was sampled."""
    mask = np.zeros(len(turns[-1].before) + len(turns[-1].tokens), bool)
    for turn in turns:
        mask[len(turn.before) : len(turn.before) + len(turn.tokens)] = True
    return mask.tolist()


def assert_chain(row: dict[str, Any], turns: Sequence[Turn]) -> None:
    """The row has exactly the tokens of the last request and its answer, and trains all turns."""
    assert row["input_ids"] == [*turns[-1].before, *turns[-1].tokens]
    assert row["loss_mask"] == expected_mask(turns)
    assert targets(row) == said(turns)


def test_the_best_session_is_trained_on_the_tokens_that_it_sampled(recorded: Read) -> None:
    (row,), report, turns = recorded([SHORT, LONG, FAILED])
    assert_chain(row, turns[1])
    assert report.forms == ("recorded groups",) and report.targets == len(said(turns[1]))
    assert [part.split("⟧")[0] for part in report.first[0].split("⟦")[1:]] == [
        "5<|im_end|>",
        "8<|im_end|>",
        "7<|im_end|>",
    ]


def test_a_session_with_several_rows_trains_each_token_once(recorded: Read) -> None:
    rows, report, (turns,) = recorded([BRANCHED])
    assert len(rows) == 2 and report.rows == 2
    assert_chain(rows[0], turns[:2])
    assert_chain(rows[1], turns[2:])
    assert sorted(targets(rows[0]) + targets(rows[1])) == sorted(said(turns))


def test_a_choice_that_its_agent_did_not_take_is_no_target(recorded: Read) -> None:
    (row,), _, (turns,) = recorded([CHOICES])
    taken, left, last = turns
    assert_chain(row, [taken, last])
    assert taken.before == left.before and taken.tokens != left.tokens


def test_all_sessions_above_a_reward_are_trained(recorded: Read) -> None:
    rows, _, turns = recorded([LONG, SHORT, CHOICES, BRANCHED, FAILED], least_reward=0.5)
    assert len(rows) == 4
    assert_chain(rows[0], turns[0])
    assert_chain(rows[1], [turns[2][0], turns[2][2]])
    assert_chain(rows[2], turns[3][:2])
    assert_chain(rows[3], turns[3][2:])


@pytest.mark.parametrize("objective", ["dpo", "reward_model"])
def test_the_best_session_is_preferred_to_the_worst(recorded: Read, objective: str) -> None:
    (row,), _, turns = recorded([SHORT, LONG, CHOICES, FAILED], objective)
    for side, chain in (("chosen", turns[1]), ("rejected", turns[0])):
        found = {"input_ids": row[f"{side}_ids"], "loss_mask": row[f"{side}_mask"]}
        assert_chain(found, chain)
    prompt = turns[0][0].before
    assert tuple(row["chosen_ids"][: len(prompt)]) == prompt == turns[1][0].before


def test_kto_labels_the_best_and_the_worst_session(recorded: Read) -> None:
    (good, bad), _, turns = recorded([SHORT, LONG], "kto")
    assert good["label"] and not bad["label"]
    assert_chain(good, turns[1])
    assert_chain(bad, turns[0])


def test_truncated_pairs_keep_the_prompt_that_they_share(recorded: Read) -> None:
    _, _, turns = recorded([SHORT, LONG], "dpo")
    first = turns[0][0].before
    limit = len(first) + 1
    (row,), report, _ = recorded([SHORT, LONG], "dpo", max_length=limit, length_policy="truncate")
    assert row["chosen_ids"] == [*first, turns[1][0].tokens[0]] and report.cuts.rows == 1


@pytest.mark.parametrize(
    ("scripts", "reason", "message"),
    [
        ([SHORT, BRANCHED], "branched", "compares whole sessions .session 1 has 2 rows."),
        (
            [SHORT, Script(("ask",), ("7",), 1.0, prompt="another")],
            "not_a_prefix", "its sides have different prompts",
        ),
        ([LONG, Script(LONG.steps, LONG.answers, 0.0)], "equal", "both sides are equal"),
    ],
)  # fmt: skip
def test_sessions_that_cannot_be_compared_are_refused_or_left_out(
    recorded: Read, scripts: Sequence[Script], reason: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"row 0: .*{message}.*set data.malformed: drop"):
        recorded(scripts, "dpo")
    with pytest.raises(ConfigError, match=r"no row is left .*1 dropped because"):
        recorded(scripts, "dpo", malformed="drop")
    rows, _, _ = recorded(scripts)  # SFT takes them
    assert rows, reason


def changed(name: str, value: Callable[[Any], Any]) -> Callable[[pa.Table], pa.Table]:
    """A change of one column of the only row."""

    def change(table: pa.Table) -> pa.Table:
        place, field = table.column_names.index(name), table.schema.field(name)
        (row,) = table[name].to_pylist()
        return table.set_column(place, field, pa.array([value(row)], field.type))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed("turn_tokens", lambda row: [*row[:-1], row[-1] - 1]), "recorded turns do not fit"),
        (changed("turn_trajectory", lambda row: [7, *row[1:]]), "a turn belongs to trajectory 7"),
        (changed("turn_parent", lambda row: [5, *row[1:]]), "turn 0 continues turn 5"),
        (changed("turn_context", lambda row: [None, *row[1:]]), "recorded turns do not fit"),
        (changed("turn_context", lambda row: [[10**6], *row[1:]]), "has the id 1000000"),
        (changed("turn_status", lambda row: ["odd"] * len(row)), "status 'odd' is not one of"),
        (changed("turn_status", lambda row: ["orphan"] * len(row)), "no token to train"),
        (changed("turn_status", lambda row: None), "a value is missing"),
    ],
)  # fmt: skip
def test_damaged_sessions_are_refused(
    recorded: Read, change: Callable[[pa.Table], pa.Table], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        recorded([LONG, SHORT], change=change)


def test_a_file_without_some_columns_of_turns_is_refused(recorded: Read) -> None:
    with pytest.raises(ConfigError, match=r"groups of sessions without the columns \['turn_par"):
        recorded([LONG], change=lambda table: table.drop_columns(["turn_parent"]))
    with pytest.raises(ConfigError, match="a run writes"):
        recorded(
            [LONG],
            change=lambda table: table.set_column(
                table.column_names.index("turn_tokens"),
                "turn_tokens",
                table["turn_tokens"].cast(pa.list_(pa.int64())),
            ),
        )


def test_sessions_of_another_tokenizer_are_refused(recorded: Read) -> None:
    other = changed("completion_text", lambda row: ["no such text"] * len(row))
    with pytest.raises(ConfigError, match="another tokenizer made the recorded tokens"):
        recorded([LONG], change=other)
