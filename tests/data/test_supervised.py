"""Supervised rows: EOS is added before truncation, limits of prompt, target and both, and
refusals."""

import json
import shutil

import pytest
from transformers import AutoTokenizer

from asyncrl.config import ConfigError
from asyncrl.data.length_limits import Cuts, LengthReport
from asyncrl.data.supervised import read_supervised, supervised_rows
from asyncrl.preflight.specs import data_spec

EOS = 2
ROWS = [{"prompt": "12+3=", "answer": "15"}, {"prompt": "9999+1=", "answer": "10000"}]


def ids(text):
    """Token ids of the tiny model's character tokenizer."""
    characters = "0123456789+-*=() ?abcdefghijklmnopqrstuvwxyz.,:\n"
    return [4 + characters.index(character) for character in text]


@pytest.fixture
def supervised(prompt_config, tmp_path):
    """`supervised(rows, completion_policy, most, **data)`: the supervised rows of a file with these
    rows, and the report."""

    def read(rows, completion_policy="error", most=8, field="warm_start.data", model=None, **data):
        path = tmp_path / "supervised.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        packing = {"name": "bfd", "completion_policy": completion_policy}
        packing = "bfd_split" if completion_policy == "split" else packing
        sections = {
            "rollout": {"max_completion_length": most},
            "warm_start": {"data": str(path), "packing_strategy": packing},
            "eval": {"data": str(path)},
        }
        sections |= {"model": {"path": model}} if model else {}
        return read_supervised(data_spec(prompt_config(ROWS, sections, **data)), str(path), field)

    return read


def test_eos_ends_every_target_that_fits(supervised):
    rows, report = supervised(ROWS)
    assert rows == [(ids("12+3="), [*ids("15"), EOS]), (ids("9999+1="), [*ids("10000"), EOS])]
    assert report == LengthReport(2)


@pytest.mark.parametrize(("rendered", "end"), [(True, "<turn>"), (False, "<eos>")])
def test_targets_end_with_the_templates_end_of_turn(
    supervised, tiny_model, tmp_path, rendered, end
):
    """With only the tokenizer's EOS as a target, a chat model would learn an ending that its
    template never uses."""
    shutil.copytree(tiny_model, tmp_path / "chat")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "chat")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<turn>{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "chat")
    rows, _ = supervised(ROWS, apply_chat_template=rendered, model=str(tmp_path / "chat"))
    assert [target[-1] for _, target in rows] == [tokenizer.convert_tokens_to_ids(end)] * 2


def test_a_cut_target_has_no_eos(supervised):
    # Five digits fill the limit, so only the EOS does not fit.
    rows, report = supervised(ROWS, "truncate", most=5)
    assert [target for _, target in rows] == [[*ids("15"), EOS], ids("10000")]
    assert report == LengthReport(2, completion=Cuts(1, 1))


def test_prompt_and_total_length_are_limited(supervised):
    rows, report = supervised(
        ROWS,
        "truncate",
        3,
        max_prompt_length=6,
        prompt_policy="truncate",
        max_length=7,
        length_policy="truncate",
    )
    assert rows == [(ids("12+3="), ids("15")), (ids("999+1="), ids("1"))]
    assert report == LengthReport(2, Cuts(1, 1), Cuts(1, 3), Cuts(2, 3))
    rows, _ = supervised(
        ROWS,
        "truncate",
        3,
        max_prompt_length=6,
        prompt_policy="truncate",
        max_length=7,
        length_policy={"name": "truncate", "side": "keep_end"},
    )
    assert rows == [(ids("2+3="), [*ids("15"), EOS]), (ids("99+1=")[-4:], ids("100"))]


def test_split_keeps_long_targets_whole_and_refuses_long_held_out_ones(supervised):
    rows = [*ROWS, {"prompt": "1=", "answer": "1" * 10_000}]
    found, report = supervised(rows, "split", 6, max_length=20)
    assert [len(target) for _, target in found] == [3, 6, 10_001] and report == LengthReport(3)
    with pytest.raises(
        ConfigError,
        match=(
            r"eval.data = .*: the completion of row 2 has 10001 tokens, above"
            r" rollout.max_completion_length = 6"
        ),
    ):
        supervised(rows, "split", 6, "eval.data", max_length=20)


def test_held_out_rows_are_the_first_of_the_file(prompt_config, tmp_path):
    path = tmp_path / "supervised.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    sections = {"warm_start": {"data": str(path)}, "eval": {"data": str(path), "max_prompts": 1}}
    train, held_out = supervised_rows(data_spec(prompt_config(ROWS, sections)))
    assert [len(target) for _, target in train] == [3, 6] and held_out == train[:1]


def test_policy_drop_counts_each_reason(supervised):
    rows, report = supervised(
        [*ROWS, {"prompt": "1" * 17, "answer": "1"}], "drop", 5, prompt_policy="drop"
    )
    assert [prompt for prompt, _ in rows] == [ids("12+3=")]
    assert report == LengthReport(3, Cuts(dropped=1), Cuts(dropped=1))


def test_row_numbers_continue_over_blocks(supervised, monkeypatch):
    monkeypatch.setattr("asyncrl.data.supervised.ROWS_PER_CHECK", 2)
    rows, report = supervised([*ROWS, *ROWS[:1] * 3], "drop", 5)
    assert [prompt for prompt, _ in rows] == [ids("12+3=")] * 4 and report == LengthReport(
        5, completion=Cuts(dropped=1)
    )
    with pytest.raises(ConfigError, match="the completion of row 4 has 6 tokens"):
        supervised([*ROWS[:1] * 4, ROWS[1]], most=5)


def test_a_row_without_a_target_is_refused_and_an_empty_answer_is_not(supervised):
    rows, report = supervised(
        [*ROWS, {"prompt": "1+1=", "answer": None}, {"prompt": "1-1=", "answer": ""}]
    )
    assert rows[2:] == [(ids("1-1="), [EOS])] and report == LengthReport(4, no_completion=1)
    with pytest.raises(
        ConfigError,
        match=r"no row is left \(0 of 2 rows used; 2 rows refused: no completion token is left\)",
    ):
        supervised([{"prompt": "1+1=", "answer": None}] * 2)


@pytest.mark.parametrize(
    ("rows", "most", "message"),
    [
        (
            ROWS,
            5,
            (
                "warm_start.data = .*: the completion of row 1 has 6 tokens, above"
                " rollout.max_completion_length = 5;"
                " .*warm_start.packing_strategy.completion_policy: drop"
            ),
        ),
        (
            [*ROWS, {"prompt": "1" * 17, "answer": ""}],
            8,
            "the prompt of row 2 has 17 tokens, above data.max_prompt_length = 16",
        ),
        ([*ROWS, {"prompt": "", "answer": ""}], 8, "row 2 has an empty prompt"),
        (
            [{"prompt": "1+1="}],
            8,
            r"warm_start.target_column = 'answer' is not a column of warm_start.data",
        ),
    ],
)
def test_unusable_rows_are_refused(supervised, rows, most, message):
    with pytest.raises(ConfigError, match=message) as error:
        supervised(rows, most=most)
    assert "\n" not in str(error.value)
