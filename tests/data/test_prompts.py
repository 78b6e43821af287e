"""Prompts, read and checked before a run."""

import shutil

import pyarrow as pa
import pyarrow.parquet
import pytest

from asyncrl.config import Config, ConfigError
from asyncrl.data.length_limits import Cuts, LengthReport
from asyncrl.data.mixture import ordinal_to_row
from asyncrl.data.prompts import check_prompts, first_prompt, first_prompts, read_prompts
from asyncrl.data.rendering import render_table, with_ordinals
from asyncrl.preflight.specs import data_spec

ROWS = [{"prompt": f"{index}+1=", "answer": str(index + 1), "level": index} for index in range(10)]


def test_an_ordinal_means_one_row_and_each_epoch_has_every_row_once():
    places = [ordinal_to_row(ordinal, 10, seed=3) for ordinal in range(30)]
    assert places == [ordinal_to_row(ordinal, 10, seed=3) for ordinal in range(30)]
    assert [epoch for epoch, _ in places] == [0] * 10 + [1] * 10 + [2] * 10
    orders = [[row for _, row in places[at : at + 10]] for at in (0, 10, 20)]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert orders[0] != orders[1] != orders[2]
    assert [ordinal_to_row(ordinal, 10, 3, shuffle=False)[1] for ordinal in range(12)] == [
        *range(10),
        0,
        1,
    ]


def test_the_report_has_first_prompt_and_columns(prompt_config):
    report = check_prompts(data_spec(prompt_config(ROWS)))
    assert (report.rows, report.truncation, report.longest, report.kept) == (
        10,
        LengthReport(10),
        4,
        None,
    )
    assert report.first_text == "0+1=" and len(report.first_ids) == 4
    assert report.columns == ("answer", "level")


def test_a_struct_without_a_value_in_any_row_is_read(prompt_config, tmp_path):
    table = pa.Table.from_pylist([{**row, "info": {"a": {"b": None}}} for row in ROWS])
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet")
    spec = data_spec(prompt_config(ROWS, train=str(tmp_path / "train.parquet")))
    assert first_prompt(spec, check_prompts(spec)).columns.keys() == {"answer", "level", "info"}


@pytest.mark.parametrize(
    ("rows", "data", "message"),
    [
        ([], {}, "has no rows"),
        (ROWS, {"train": "missing.parquet"}, r"data.train = '.*missing.parquet': no such file"),
        (
            ROWS,
            {"prompt_column": "text"},
            r"data.prompt_column = 'text' is not a column of .*\['prompt', 'answer', 'level'\]",
        ),
        (
            [{"prompt": "1+1=", "reward": 1.0}],
            {},
            r"columns \['reward'\], which asyncrl uses itself; rename them",
        ),
        (
            [*ROWS, {"prompt": "1" * 17, "answer": "", "level": 0}],
            {},
            "row 10 has 17 tokens, above data.max_prompt_length = 16.*prompt_policy: drop",
        ),
        (
            [*ROWS, {"prompt": "1" * 9}],
            {"max_length": 9},
            (
                "prompt and first generated token of row 10 together have 10 tokens, above"
                " data.max_length = 9"
            ),
        ),
        (
            [{"prompt": "1" * 17}],
            {"prompt_policy": "drop"},
            r"no prompt is left \(0 of 1 row used; max_prompt_length: 1 row dropped\)",
        ),
        (
            [{"prompt": "1" * 9}],
            {"max_length": 9, "length_policy": "truncate"},
            (
                r"no prompt is left \(0 of 1 row used; 1 row refused: no completion token is"
                r" left\); raise the limit, or set data.length_policy.side: keep_end, which"
            ),
        ),
        (
            [*ROWS, {"prompt": "1" * 9}],
            {"max_length": 9},
            "set data.length_policy: drop, or truncate with data.length_policy.side: keep_end$",
        ),
        (
            [{"prompt": "1"}, {"prompt": ""}, {"prompt": ""}],
            {},
            "row 1 has an empty prompt \\(one of 2 such rows\\)",
        ),
        ([{"prompt": 12}], {}, "the prompt is '12'; give a string, or a list of messages"),
        (ROWS, {"apply_chat_template": True}, "no chat template"),
    ],
)
def test_unusable_prompts_are_refused(prompt_config, rows, data, message):
    config = prompt_config(rows, **data)
    with pytest.raises(ConfigError, match=message) as raised:
        check_prompts(data_spec(config))
    assert "\n" not in str(raised.value)


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if"
    " add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize(
    ("rows", "apply"),
    [([{"prompt": "1+2="}], True), ([{"prompt": [{"role": "user", "content": "1+2="}]}], False)],
    ids=["strings when asked", "messages always"],
)
def test_chat_templates_are_rendered(prompt_config, tiny_model, tmp_path, rows, apply):
    model = shutil.copytree(tiny_model, tmp_path / "chat")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    config = prompt_config(rows, apply_chat_template=apply, max_prompt_length=64)
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"path": str(model)})}
    )
    report = check_prompts(data_spec(config))
    assert report.first_text == "<bos>user: 1+2=\nassistant: "
    # One BOS, from the template, and then one token per character.
    assert (
        report.first_ids[0] == 1
        and report.first_ids.count(1) == 1
        and len(report.first_ids) == 1 + len("user: 1+2=\nassistant: ")
    )


def test_a_file_that_is_neither_parquet_nor_jsonl(prompt_config, tmp_path):
    (tmp_path / "broken.parquet").write_text("no parquet")
    with pytest.raises(ConfigError, match="cannot be read as Parquet"):
        check_prompts(data_spec(prompt_config(ROWS, train=str(tmp_path / "broken.parquet"))))


def test_policy_drop_counts_long_prompts(prompt_config):
    config = prompt_config([{"prompt": "1" * 17}, *ROWS], prompt_policy="drop")
    report = check_prompts(data_spec(config))
    assert (report.rows, report.truncation, report.kept) == (
        10,
        LengthReport(11, prompt=Cuts(dropped=1)),
        tuple(range(1, 11)),
    )
    assert report.first_text == "0+1="
    assert [prompt.text for prompt in read_prompts(config.data.train, data_spec(config), 2)] == [
        "0+1=",
        "1+1=",
    ]


def test_the_first_prompts_are_those_of_the_check(prompt_config, monkeypatch):
    """Dropped rows are passed over, and only a few rows are rendered."""
    rows = [{"prompt": "1" * (30 if index in (0, 3) else index + 1)} for index in range(10)]
    config = prompt_config(rows, prompt_policy="drop", max_prompt_length=20)
    spec = data_spec(config)
    assert first_prompts(spec, 3) == read_prompts(config.data.train, spec, 3)
    assert [prompt.ordinal for prompt in first_prompts(spec, 3)] == [1, 2, 4]
    assert len(first_prompts(spec, 99)) == 8
    monkeypatch.setattr("asyncrl.data.prompts.ROWS_PER_CHECK", 1)
    with pytest.raises(ConfigError, match="no prompt of the first 1 rows is left"):
        first_prompts(spec, 3)
    with pytest.raises(ConfigError, match="row 0 has an empty prompt"):
        first_prompts(data_spec(prompt_config([{"prompt": ""}])), 1)


def test_row_numbers_continue_over_the_blocks_of_the_check(prompt_config, monkeypatch):
    monkeypatch.setattr("asyncrl.data.prompts.ROWS_PER_CHECK", 4)
    rows = [*ROWS[:6], {"prompt": "1" * 17}, *ROWS[6:]]
    report = check_prompts(data_spec(prompt_config(rows, prompt_policy="drop")))
    assert (report.kept, report.truncation) == (
        (*range(6), *range(7, 11)),
        LengthReport(11, Cuts(dropped=1)),
    )
    with pytest.raises(ConfigError, match="the prompt of row 6 has 17 tokens"):
        check_prompts(data_spec(prompt_config(rows)))
    with pytest.raises(ConfigError, match="row 9 has an empty prompt"):
        check_prompts(data_spec(prompt_config([*ROWS[:9], {"prompt": ""}])))


def test_policy_truncate_keeps_the_end_of_tokens_and_text(prompt_config):
    config = prompt_config(
        [{"prompt": "7" * 15 + "1+2=", "answer": "3"}, *ROWS], prompt_policy="truncate"
    )
    report = check_prompts(data_spec(config))
    assert (report.rows, report.truncation, report.kept, report.longest) == (
        11,
        LengthReport(11, Cuts(1, 3)),
        None,
        16,
    )
    first, second = read_prompts(config.data.train, data_spec(config), 2)
    assert (
        first.text == report.first_text == "7" * 12 + "1+2="
        and first.token_ids == report.first_ids
        and len(first.token_ids) == 16
    )
    assert second.text == "0+1=" and first.columns["answer"] == "3"


def test_a_cut_rendered_prompt_keeps_the_assistant_turn(prompt_config, tiny_model, tmp_path):
    model = shutil.copytree(tiny_model, tmp_path / "chat")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    config = prompt_config([{"prompt": "1+2="}], apply_chat_template=True, prompt_policy="truncate")
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"path": str(model)})}
    )
    assert check_prompts(data_spec(config)).first_text == "<bos>user: 1+2=\nassistant: "[-16:]


@pytest.mark.parametrize(
    ("data", "kept", "longest", "truncation"),
    [
        (
            {"length_policy": {"name": "truncate", "side": "keep_end"}},
            None,
            8,
            LengthReport(11, whole=Cuts(1, 5)),
        ),
        ({"length_policy": "truncate"}, tuple(range(10)), 4, LengthReport(11, no_completion=1)),
        (
            {"length_policy": "drop"},
            tuple(range(10)),
            4,
            LengthReport(11, whole=Cuts(dropped=1)),
        ),
    ],
)
def test_length_policy_applies_to_a_prompt_that_fills_max_length(
    prompt_config, data, kept, longest, truncation
):
    report = check_prompts(
        data_spec(prompt_config([*ROWS, {"prompt": "1" * 13}], max_length=9, **data))
    )
    assert (report.kept, report.longest, report.truncation) == (kept, longest, truncation)


def test_the_render_stage_cuts_each_row_and_loses_none(prompt_config):
    rows = [{"prompt": "7" * 15 + "1+2=", "answer": "3"}, *ROWS]
    config = prompt_config(rows, prompt_policy="truncate")
    table = with_ordinals(pa.Table.from_pylist(rows[:2]), [5, 6], [0, 0])
    rendered = render_table(table, data_spec(config))
    assert rendered["prompt_text"].to_pylist() == ["7" * 12 + "1+2=", "0+1="] and rendered[
        "prompt_ids"
    ].type == pa.list_(pa.int32())
    assert [len(ids) for ids in rendered["prompt_ids"].to_pylist()] == [16, 4] and rendered[
        "answer"
    ].to_pylist() == ["3", "1"]
    dropping = Config.model_validate(
        config.model_dump() | {"data": config.data.model_dump() | {"prompt_policy": "drop"}}
    )
    with pytest.raises(ConfigError, match=r"have changed since the check .*1 row dropped"):
        render_table(table, data_spec(dropping))


def test_evaluation_prompts_keep_the_files_order(prompt_config, tmp_path):
    config = prompt_config(ROWS)
    pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "eval.parquet")
    prompts = read_prompts(str(tmp_path / "eval.parquet"), data_spec(config), 3)
    assert [(p.ordinal, p.epoch, p.text, p.columns) for p in prompts] == [
        (i, 0, f"{i}+1=", {"answer": str(i + 1), "level": i}) for i in range(3)
    ]
