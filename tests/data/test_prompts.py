import asyncio
import shutil

import pyarrow as pa
import pyarrow.parquet
import pytest

from asyncrl.config import ConfigError
from asyncrl.data.prompts import RayPromptSource, ReorderWindow, check_prompts, ordinal_to_row, read_prompts, stream_ordinals
from asyncrl.types import Prompt

ROWS = [{"prompt": f"{index}+1=", "answer": str(index + 1), "level": index} for index in range(10)]


def test_an_ordinal_means_one_row_and_every_epoch_has_every_row_once():
    places = [ordinal_to_row(ordinal, 10, seed=3) for ordinal in range(30)]
    assert places == [ordinal_to_row(ordinal, 10, seed=3) for ordinal in range(30)]
    assert [epoch for epoch, _ in places] == [0] * 10 + [1] * 10 + [2] * 10
    orders = [[row for _, row in places[at : at + 10]] for at in (0, 10, 20)]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert orders[0] != orders[1] != orders[2]
    assert [ordinal_to_row(ordinal, 10, 3, shuffle=False)[1] for ordinal in range(12)] == [*range(10), 0, 1]


def test_ordinals_go_on_from_a_frontier():
    ordinals = stream_ordinals(4, frozenset({5, 7}))
    assert [next(ordinals) for _ in range(4)] == [4, 6, 8, 9]


def test_the_window_restores_order_and_drops_what_comes_twice():
    window = ReorderWindow(2, frozenset({4}))
    given = []
    for ordinal in (3, 5, 2, 3, 2, 6):
        given += [prompt.ordinal for prompt in window.put(Prompt(ordinal, 0, "p", (1,)))]
    assert given == [2, 3, 5, 6]


def test_the_report_names_first_prompt_and_columns(prompt_config):
    report = check_prompts(prompt_config(ROWS))
    assert (report.rows, report.dropped, report.longest, report.kept) == (10, 0, 4, None)
    assert report.first_text == "0+1=" and len(report.first_ids) == 4
    assert report.columns == ("answer", "level")


@pytest.mark.parametrize(
    ("rows", "data", "message"),
    [
        ([], {}, "has no rows"),
        (ROWS, {"train": "missing.parquet"}, r"data.train = '.*missing.parquet': no such file"),
        (ROWS, {"prompt_column": "text"}, r"data.prompt_column = 'text' is not a column of .*\['prompt', 'answer', 'level'\]"),
        ([{"prompt": "1+1=", "reward": 1.0}], {}, r"columns \['reward'\], names that asyncrl uses; rename them"),
        ([*ROWS, {"prompt": "1" * 17, "answer": "", "level": 0}], {}, "row 10 has 17 tokens, above data.max_prompt_length = 16.*prompt_policy: drop"),
        ([{"prompt": ""}], {}, "row 0 has an empty prompt"),
        ([{"prompt": 12}], {}, "holds '12': neither a string nor chat messages"),
        (ROWS, {"apply_chat_template": True}, "no chat template"),
    ],
)
def test_prompts_that_cannot_be_used(prompt_config, rows, data, message):
    config = prompt_config(rows, **data)
    with pytest.raises(ConfigError, match=message) as raised:
        check_prompts(config)
    assert "\n" not in str(raised.value)


TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"


@pytest.mark.parametrize(
    ("rows", "apply"),
    [([{"prompt": "1+2="}], True), ([{"prompt": [{"role": "user", "content": "1+2="}]}], False)],
    ids=["strings when asked", "messages always"],
)
def test_chat_templates_are_rendered(prompt_config, tiny_model, tmp_path, rows, apply):
    model = shutil.copytree(tiny_model, tmp_path / "chat")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    config = prompt_config(rows, apply_chat_template=apply, max_prompt_length=64)
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(model)})})
    report = check_prompts(config)
    assert report.first_text == "<bos>user: 1+2=\nassistant: "
    # One BOS, the template's own; one token per character after it.
    assert report.first_ids[0] == 1 and report.first_ids.count(1) == 1 and len(report.first_ids) == 1 + len("user: 1+2=\nassistant: ")


def test_a_file_that_is_neither_parquet_nor_jsonl(prompt_config, tmp_path):
    (tmp_path / "broken.parquet").write_text("no parquet")
    with pytest.raises(ConfigError, match="neither Parquet"):
        check_prompts(prompt_config(ROWS, train=str(tmp_path / "broken.parquet")))


def test_policy_drop_leaves_long_prompts_out_and_counts_them(prompt_config):
    config = prompt_config([{"prompt": "1" * 17}, *ROWS], prompt_policy="drop")
    report = check_prompts(config)
    assert (report.rows, report.dropped, report.kept) == (10, 1, tuple(range(1, 11)))
    assert report.first_text == "0+1="
    assert [prompt.text for prompt in read_prompts(config.data.train, config, 2)] == ["0+1=", "1+1="]


def test_evaluation_prompts_keep_the_files_order(prompt_config, tmp_path):
    config = prompt_config(ROWS)
    pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "eval.parquet")
    prompts = read_prompts(str(tmp_path / "eval.parquet"), config, 3)
    assert [(p.ordinal, p.epoch, p.text, p.columns) for p in prompts] == [(i, 0, f"{i}+1=", {"answer": str(i + 1), "level": i}) for i in range(3)]


async def take(source, count):
    try:
        return [await asyncio.wait_for(source.next(), 120) for _ in range(count)]
    finally:
        await source.close()


def test_the_stream_gives_every_ordinal_in_order_across_epochs_and_from_a_frontier(prompt_config, ray_cluster, capfd):
    config = prompt_config(ROWS)
    report = check_prompts(config)

    async def scenario():
        return await take(RayPromptSource(config, report), 45), await take(RayPromptSource(config, report, 7, {9, 12}), 5)

    from_start, from_frontier = asyncio.run(scenario())
    assert [prompt.ordinal for prompt in from_start] == list(range(45))
    for prompt in [*from_start, *from_frontier]:
        epoch, row = ordinal_to_row(prompt.ordinal, 10, config.seed)
        assert (prompt.epoch, prompt.text, prompt.columns) == (epoch, ROWS[row]["prompt"], {"answer": ROWS[row]["answer"], "level": row})
        assert len(prompt.token_ids) == 4
    assert [prompt.ordinal for prompt in from_frontier] == [7, 8, 10, 11, 13]
    out, err = capfd.readouterr()
    assert "Dataset" not in out + err and "Progress" not in out + err
