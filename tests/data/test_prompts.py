import asyncio
import shutil

import psutil
import pyarrow as pa
import pyarrow.parquet
import pytest
import ray

from asyncrl.config import Config, ConfigError
from asyncrl.contracts.errors import PartDiedError
from asyncrl.contracts.rows import Prompt
from asyncrl.data.length_limits import Cuts, LengthReport
from asyncrl.data.mixture import ordinal_to_row
from asyncrl.data.prompts import (
    RayPromptSource,
    ReorderWindow,
    _render_table,
    _with_ordinals,
    check_prompts,
    order_of,
    read_prompts,
    stream_ordinals,
)
from asyncrl.preflight.specs import data_spec

ROWS = [{"prompt": f"{index}+1=", "answer": str(index + 1), "level": index} for index in range(10)]


def test_an_ordinal_means_one_row_and_every_epoch_has_every_row_once():
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
    report = check_prompts(data_spec(prompt_config(ROWS)))
    assert (report.rows, report.truncation, report.longest, report.kept) == (
        10,
        LengthReport(10),
        4,
        None,
    )
    assert report.first_text == "0+1=" and len(report.first_ids) == 4
    assert report.columns == ("answer", "level")


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
            r"columns \['reward'\], names that asyncrl uses; rename them",
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
                r" left\); raise the limit, or set data.length_side: keep_end, which"
            ),
        ),
        (
            [*ROWS, {"prompt": "1" * 9}],
            {"max_length": 9},
            "set data.length_policy: drop, or truncate with data.length_side: keep_end$",
        ),
        (
            [{"prompt": "1"}, {"prompt": ""}, {"prompt": ""}],
            {},
            "row 1 has an empty prompt, one of 2 such rows",
        ),
        ([{"prompt": 12}], {}, "holds '12': neither a string nor chat messages"),
        (ROWS, {"apply_chat_template": True}, "no chat template"),
    ],
)
def test_prompts_that_cannot_be_used(prompt_config, rows, data, message):
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
    # One BOS, the template's own; one token per character after it.
    assert (
        report.first_ids[0] == 1
        and report.first_ids.count(1) == 1
        and len(report.first_ids) == 1 + len("user: 1+2=\nassistant: ")
    )


def test_a_file_that_is_neither_parquet_nor_jsonl(prompt_config, tmp_path):
    (tmp_path / "broken.parquet").write_text("no parquet")
    with pytest.raises(ConfigError, match="cannot be read as Parquet"):
        check_prompts(data_spec(prompt_config(ROWS, train=str(tmp_path / "broken.parquet"))))


def test_policy_drop_leaves_long_prompts_out_and_counts_them(prompt_config):
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


def test_rows_keep_their_numbers_over_the_blocks_of_the_check(prompt_config, monkeypatch):
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


def test_policy_truncate_keeps_the_end_and_the_text_says_what_the_model_sees(prompt_config):
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


def test_a_rendered_prompt_that_is_cut_keeps_what_makes_the_model_answer(
    prompt_config, tiny_model, tmp_path
):
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
            {"length_policy": "truncate", "length_side": "keep_end"},
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
def test_a_prompt_that_fills_max_length_is_judged_by_length_policy(
    prompt_config, data, kept, longest, truncation
):
    report = check_prompts(
        data_spec(prompt_config([*ROWS, {"prompt": "1" * 13}], max_length=9, **data))
    )
    assert (report.kept, report.longest, report.truncation) == (kept, longest, truncation)


def test_the_stage_of_the_stream_cuts_each_row_and_misses_none(prompt_config):
    rows = [{"prompt": "7" * 15 + "1+2=", "answer": "3"}, *ROWS]
    config = prompt_config(rows, prompt_policy="truncate")
    table = _with_ordinals(pa.Table.from_pylist(rows[:2]), [5, 6], [0, 0])
    rendered = _render_table(table, data_spec(config))
    assert rendered["prompt_text"].to_pylist() == ["7" * 12 + "1+2=", "0+1="] and rendered[
        "prompt_ids"
    ].type == pa.list_(pa.int32())
    assert [len(ids) for ids in rendered["prompt_ids"].to_pylist()] == [16, 4] and rendered[
        "answer"
    ].to_pylist() == ["3", "1"]
    dropping = Config.model_validate(
        config.model_dump() | {"data": config.data.model_dump() | {"prompt_policy": "drop"}}
    )
    with pytest.raises(ConfigError, match=r"no longer those that were checked .*1 row dropped"):
        _render_table(table, data_spec(dropping))


def test_evaluation_prompts_keep_the_files_order(prompt_config, tmp_path):
    config = prompt_config(ROWS)
    pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "eval.parquet")
    prompts = read_prompts(str(tmp_path / "eval.parquet"), data_spec(config), 3)
    assert [(p.ordinal, p.epoch, p.text, p.columns) for p in prompts] == [
        (i, 0, f"{i}+1=", {"answer": str(i + 1), "level": i}) for i in range(3)
    ]


async def take(source, count):
    try:
        return [await asyncio.wait_for(source.next(), 120) for _ in range(count)]
    finally:
        await source.close()


def test_a_reader_that_dies_is_followed_by_one_that_goes_on(prompt_config, ray_cluster):
    """After the death come more prompts than were waiting, none twice and none left out."""
    config, first, then = prompt_config(ROWS), 50, 3000
    report = check_prompts(data_spec(config))

    def readers():
        return [
            one
            for one in psutil.Process().children(recursive=True)
            if "MapBatches(_render_table)" in " ".join(one.cmdline())
        ]

    async def scenario():
        source = RayPromptSource(data_spec(config), report, 7, {9, 12})
        try:
            prompts = [await asyncio.wait_for(source.next(), 120) for _ in range(first)]
            [before] = readers()
            before.kill()
            prompts += [await asyncio.wait_for(source.next(), 120) for _ in range(then)]
            assert [one.pid for one in readers()] != [before.pid]
            return prompts
        finally:
            await source.close()

    given = asyncio.run(scenario())
    assert [prompt.ordinal for prompt in given] == [7, 8, 10, 11, *range(13, 13 + first + then - 4)]
    places = [ordinal_to_row(prompt.ordinal, 10, config.seed) for prompt in given]
    assert [(prompt.epoch, prompt.text) for prompt in given] == [
        (epoch, ROWS[row]["prompt"]) for epoch, row in places
    ]


def test_the_stream_gives_every_ordinal_in_order_across_epochs_and_from_a_frontier(
    prompt_config, ray_cluster, capfd
):
    # Prompts of four tokens lose their first one.
    config = prompt_config(ROWS, max_prompt_length=3, prompt_policy="truncate")
    report = check_prompts(data_spec(config))

    async def scenario():
        return await take(RayPromptSource(data_spec(config), report), 45), await take(
            RayPromptSource(data_spec(config), report, 7, {9, 12}), 5
        )

    from_start, from_frontier = asyncio.run(scenario())
    assert [prompt.ordinal for prompt in from_start] == list(range(45))
    for prompt in [*from_start, *from_frontier]:
        epoch, row = ordinal_to_row(prompt.ordinal, 10, config.seed)
        assert (prompt.epoch, prompt.text, prompt.columns) == (
            epoch,
            ROWS[row]["prompt"][1:],
            {"answer": ROWS[row]["answer"], "level": row},
        )
        assert len(prompt.token_ids) == 3
    assert [prompt.ordinal for prompt in from_frontier] == [7, 8, 10, 11, 13]
    out, err = capfd.readouterr()
    assert "Dataset" not in out + err and "Progress" not in out + err


def test_the_stream_carries_tool_calls_maps_and_large_rows_of_a_mixture(
    prompt_config, tmp_path, ray_cluster
):
    """What a worker used to meet (a map, a uint64, a number beside a string, a row beyond the
    stream's memory) comes as the files gave it."""
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    rows = [
        {"prompt": f"{n}+1=", "calls": [call] if n % 2 else [], "mixed": n if n % 3 else str(n)}
        for n in range(10)
    ]
    large = pa.table(
        {
            "prompt": ["1-1=", "2-1="],
            "map": pa.array([{"a": 1}, {"b": None}], pa.map_(pa.string(), pa.int64())),
            "big": pa.array([2**64 - 1, 0], pa.uint64()),
            "text": ["x" * (20 << 20), "y" * (20 << 20)],
        }
    )
    pyarrow.parquet.write_table(large, tmp_path / "large.parquet")
    config = prompt_config(rows)
    train = [
        {"path": config.data.train, "weight": 3},
        {"path": str(tmp_path / "large.parquet"), "weight": 1},
    ]
    config = Config.model_validate(
        config.model_dump() | {"data": {**config.data.model_dump(), "train": train}}
    )
    report = check_prompts(data_spec(config))
    order = order_of(report, data_spec(config))
    count = 24

    async def scenario():
        return await take(RayPromptSource(data_spec(config), report), count), await take(
            RayPromptSource(data_spec(config), report, 10, {11}), 3
        )

    given, later = asyncio.run(scenario())
    absent = dict.fromkeys(("calls", "mixed", "map", "big", "text"))
    expected = [{**absent, **row, "source_name": "train"} for row in rows]
    expected += [
        {**absent, **row, "source_name": "large"}
        for row in large.to_pylist(maps_as_pydicts="strict")
    ]
    for prompt in given:
        row = expected[order.place(prompt.ordinal)[1]]
        assert prompt.text == row["prompt"] and dict(prompt.columns) == {
            name: row[name] for name in row if name != "prompt"
        }
    assert {prompt.columns["source_name"] for prompt in given} == {"train", "large"}
    assert [prompt.ordinal for prompt in later] == [10, 12, 13] and later[0].text == given[10].text


def test_after_a_death_the_reader_begins_where_prompts_are_missing_and_not_at_the_attempts_start(
    prompt_config, monkeypatch
):
    """A run of days would else render all of its prompts again."""
    config, begun_at = prompt_config(ROWS), []
    report = check_prompts(data_spec(config))

    def stream(source, stage, *_):
        begun_at.append(source.args[3])
        for number, table in enumerate(source()):
            if number == 3 and len(begun_at) < 3:
                raise ray.exceptions.WorkerCrashedError
            yield stage(table)

    monkeypatch.setattr("asyncrl.runtime.ray_stream.stream_blocks", stream)
    given = asyncio.run(take(RayPromptSource(data_spec(config), report, 7, {9, 12}), 400))
    assert [prompt.ordinal for prompt in given] == [7, 8, 10, 11, *range(13, 13 + 396)]
    assert (
        begun_at[0] == 7
        and len(begun_at) == 3
        and begun_at[1] > 80
        and begun_at[2] > begun_at[1] + 80
    )


def test_a_reader_that_dies_at_once_again_and_again_breaks_the_stream(prompt_config, monkeypatch):
    config = prompt_config(ROWS)

    def stream(*_):
        raise ray.exceptions.WorkerCrashedError
        yield

    monkeypatch.setattr("asyncrl.runtime.ray_stream.stream_blocks", stream)
    with pytest.raises(PartDiedError, match="the prompt stream broke: WorkerCrashedError"):
        asyncio.run(take(RayPromptSource(data_spec(config), check_prompts(data_spec(config))), 1))
