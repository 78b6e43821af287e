"""Rows keep the types and shapes of their files, and values that cannot travel are refused by
name."""

import datetime
import decimal
import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.config import ConfigError, Source
from asyncrl.contracts.columns import row_values
from asyncrl.contracts.content_hash import content_hashes
from asyncrl.contracts.group_table import (
    groups_from_table,
    groups_to_table,
    table_from_ipc,
    table_to_ipc,
)
from asyncrl.contracts.rows import Completion, Group, Prompt, Trajectory, VersionSpan
from asyncrl.data import jsonl, sources
from asyncrl.data.prompts import check_prompts, read_prompts
from asyncrl.data.sources import RowsByNumber, read_sources, stream_sources
from asyncrl.preflight.specs import data_spec

TOOL_CALL = {
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Oslo", "days": 2}},
}
CHAT = [
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "tool_calls": [TOOL_CALL]},
    {"role": "tool", "name": "weather", "content": "12"},
]
EXACT = [
    {
        "prompt": "a",
        "when": "2024-01-02",
        "age": 18,
        "mixed": 18,
        "many": 2**64,
        "chat": CHAT,
        "none": None,
        "flag": True,
        "list": [1, 2.5, "x", None],
    },
    {
        "prompt": "b",
        "when": "2024-01-02T03:04:05Z",
        "age": 19,
        "mixed": 18.5,
        "many": 7,
        "chat": [{"role": "user", "content": None}],
        "flag": None,
    },
    {
        "prompt": "c",
        "age": 2**63 - 1,
        "mixed": "18",
        "chat": "plain",
        "list": {},
        "deep": {"a": {}, "b": [[]], "Ä": "\u2028\n"},
    },
    {"prompt": "d", "mixed": True, "small": 5e-324, "list": {"z": 1, "a": 2}},
]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def same(value, other):
    """Equal in type, key order and value, at every depth."""
    if isinstance(value, dict):
        return (
            isinstance(other, dict)
            and list(value) == list(other)
            and all(same(value[key], other[key]) for key in value)
        )
    if isinstance(value, list):
        return isinstance(other, list) and len(value) == len(other) and all(map(same, value, other))
    return type(value) is type(other) and value == other


def group_of(prompt):
    completion = Completion((5, 2), (-0.5, -0.25), (VersionSpan(0, 0, 2),), "stop", "x")
    return Group(1, prompt, (Trajectory(completion, (1, 1)),), "replica", 1.0, 2.0)


@pytest.mark.parametrize("chunk_bytes", [1, 16 << 20], ids=["a chunk for each row", "one chunk"])
def test_jsonl_is_read_without_guessing(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(jsonl, "CHUNK_BYTES", chunk_bytes)
    names = dict.fromkeys(name for row in EXACT for name in row)
    found = read_sources(write_jsonl(tmp_path / "rows.jsonl", EXACT)).table
    for row, expected in zip(row_values(found), EXACT, strict=True):
        assert same(row, {name: expected.get(name) for name in names})
    assert (
        found.schema.field("age").type == pa.int64()
        and found.schema.field("when").type == pa.string()
    )


def test_columns_reach_the_reward_unchanged(prompt_config, tmp_path):
    """Columns pass through prompts, groups, leases of several groups, Arrow's stream and Parquet.
    Rows of other groups do not change their types."""
    for row in EXACT:
        row["prompt"] = "1+1="
    config = prompt_config(EXACT)
    prompts = read_prompts(config.data.train, data_spec(config))
    tables = [groups_to_table([group_of(prompt)]) for prompt in prompts]
    assert len({table.schema for table in tables}) == 1
    leased = table_from_ipc(table_to_ipc(pa.concat_tables(tables, promote_options="permissive")))
    pq.write_table(leased.take([2, 0, 1, 3]), tmp_path / "groups.parquet")
    back = {
        group.ordinal: group
        for group in groups_from_table(pq.read_table(tmp_path / "groups.parquet"))
    }
    names = dict.fromkeys(name for row in EXACT for name in row if name != "prompt")
    for ordinal, row in enumerate(EXACT):
        expected = {name: row.get(name) for name in names}
        assert same(dict(prompts[ordinal].columns), expected)
        assert same(dict(back[ordinal].prompt.columns), expected)


@pytest.mark.parametrize("limit", [2, 5, 7, None])
def test_several_sources_take_turns_if_only_some_prompts_are_used(prompt_config, tmp_path, limit):
    """In evaluation and in the warm start's held-out rows. Ordinals stay the row numbers."""
    from asyncrl.data.supervised import read_supervised

    rows = {"a": 5, "b": 2, "c": 1}
    paths = [
        write_jsonl(
            tmp_path / f"{name}.jsonl",
            [{"prompt": f"{i}+{i}=", "answer": f"{name}{i}"} for i in range(n)],
        )
        for name, n in rows.items()
    ]
    held_out = {"data": [{"path": path} for path in paths]}
    config = prompt_config(
        [{"prompt": "1+1="}], {"eval": held_out, "warm_start": {"data": paths[0]}}
    )
    prompts = read_prompts(config.eval.data, data_spec(config), limit)
    assert [prompt.columns["answer"] for prompt in prompts] == [
        "a0",
        "b0",
        "c0",
        "a1",
        "b1",
        "a2",
        "a3",
        "a4",
    ][:limit]
    assert [prompt.ordinal for prompt in prompts] == [0, 5, 7, 1, 6, 2, 3, 4][:limit]
    held_out, _ = read_supervised(data_spec(config), config.eval.data, "eval.data")
    assert [tuple(ids) for ids, _ in held_out][:limit] == [prompt.token_ids for prompt in prompts]


def test_parquet_messages_have_only_the_keys_of_the_file(prompt_config, tmp_path, tiny_model):
    """Arrow fills absent struct fields with None, and a template would print them."""
    from asyncrl.data.rendering import prompt_values

    pq.write_table(
        pa.Table.from_pylist([{"prompt": CHAT}, {"prompt": [{"role": "user", "content": "hi"}]}]),
        tmp_path / "chats.parquet",
    )
    table = read_sources(str(tmp_path / "chats.parquet")).table
    assert table["prompt"].to_pylist()[1] == [
        {"role": "user", "content": "hi", "tool_calls": None, "name": None}
    ]
    assert prompt_values(table, "prompt") == [CHAT, [{"role": "user", "content": "hi"}]]


@pytest.mark.parametrize("column", ["prompt", "messages"])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rewards_get_the_messages_as_given(prompt_config, tmp_path, llama_model, suffix, column):
    chats = [
        CHAT[:1],
        [*CHAT[:1], {"role": "assistant", "content": "2", "tool_calls": [TOOL_CALL]}, *CHAT[:1]],
    ]
    config = prompt_config(
        [], prompt_column=column, max_prompt_length=400, unused_keys="drop"
    )  # the template has no tool calls, and rewards get them
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"path": str(llama_model)})}
    )
    path = tmp_path / f"chats.{suffix}"
    rows = [{column: chat, "answer": "2"} for chat in chats]
    if suffix == "jsonl":
        write_jsonl(path, rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    prompts = read_prompts(str(path), data_spec(config))
    assert [dict(prompt.columns) for prompt in prompts] == [
        {"answer": "2", "messages": chat} for chat in chats
    ]
    (tmp_path / "plain.jsonl").write_text(json.dumps({column: "1+1=", "answer": "2"}))
    assert dict(read_prompts(str(tmp_path / "plain.jsonl"), data_spec(config))[0].columns) == {
        "answer": "2"
    }
    asked = config.model_copy(
        update={"data": config.data.model_copy(update={"apply_chat_template": True})}
    )
    (prompt,) = read_prompts(str(tmp_path / "plain.jsonl"), data_spec(asked))
    assert prompt.columns["messages"] == [{"role": "user", "content": "1+1="}]


def test_arrow_types_are_carried(tmp_path):
    """Maps, large uint64, times, decimals and bytes: to the reward, into groups and back."""
    when = datetime.datetime(2024, 1, 2, 3, 4, 5, 678, datetime.UTC)
    values = {
        "map": pa.array([{"a": 1, "b": None}], pa.map_(pa.string(), pa.int64())),
        "maps": pa.array(
            [[{"a": [{"x": 1}]}]],
            pa.list_(pa.map_(pa.string(), pa.list_(pa.struct([("x", pa.int8())])))),
        ),
        "big": pa.array([2**64 - 1], pa.uint64()),
        "when": pa.array([when], pa.timestamp("us", "UTC")),
        "day": pa.array([when.date()]),
        "cost": pa.array([decimal.Decimal("1.10")]),
        "image": pa.array([b"\xff\x00"]),
        "kind": pa.array(["train"]).dictionary_encode(),
        "long": pa.array(["x"], pa.large_string()),
    }
    expected = {
        name: column.to_pylist(maps_as_pydicts="strict")[0] for name, column in values.items()
    }
    pq.write_table(pa.table({"prompt": ["1+1="], **values}), tmp_path / "types.parquet")
    table = read_sources(str(tmp_path / "types.parquet")).table
    (row,) = row_values(table)
    assert row == {"prompt": "1+1=", **expected}
    columns = {name: row[name] for name in values}
    group = groups_to_table([group_of(Prompt(0, 0, "1+1=", (5,), columns, table.schema))])
    pq.write_table(group, tmp_path / "group.parquet")
    assert content_hashes(pq.read_table(tmp_path / "group.parquet")) == content_hashes(group)
    assert (
        groups_from_table(pq.read_table(tmp_path / "group.parquet"))[0].prompt.columns == expected
    )


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (
            pa.array([[(1, 2)]], pa.map_(pa.int64(), pa.int64())),
            "column 'extra' has map keys of type int64; use strings",
        ),
        (
            pa.array([1], pa.int64()).cast(pa.timestamp("ns")),
            r"column 'extra' has type timestamp\[ns\], finer than Python's times; cast it to micro",
        ),
        (
            pa.array([[(1, 2, 3)]], pa.list_(pa.month_day_nano_interval())),
            "column 'extra' has type month_day_nano_interval, which asyncrl does not carry",
        ),
    ],
)
def test_values_that_cannot_travel_are_refused(tmp_path, monkeypatch, column, message):
    # Parquet has no intervals, but another reader may produce them.
    table = pa.table({"prompt": ["1+1="], "extra": column})
    monkeypatch.setattr("asyncrl.runtime.files.parquet.read_table", lambda path: table)
    (tmp_path / "rows.parquet").write_bytes(b"")
    with pytest.raises(ConfigError, match=message):
        read_sources(str(tmp_path / "rows.parquet"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n\n{"prompt": \n', "line 3 cannot be read as JSON: Expecting value"),
        ('{"prompt": "a"}\n["b"]\n', "line 2 starts a JSON array; write one object per line"),
        ('[\n{"prompt": "a"}]', "line 1 starts a JSON array; write one object per line"),
        ('"a"\n', "line 1 is not a JSON object; write one object per line"),
        ('{"prompt": "a"}\n{"prompt": "\\ud800"}\n', r"line 2 has half a character .* at 'prompt'"),
        (
            '{"prompt": "a", "n": ' + "9" * 5000 + "}\n",
            "line 1 cannot be read as JSON: Exceeds the limit",
        ),
        ('{"prompt": "a", "n": ' + "[" * 100_000 + "}\n", "line 1 cannot be read as JSON"),
        ("   \n\n", "has no rows"),
        (
            '{"prompt": "a"}\n{"prompt": "b", "n": {"k": 1, "k": 2}}\n',
            "line 2 cannot be read as JSON: the key 'k' appears twice in an object; keep one",
        ),
        ("{}\n", "line 1 has an object without keys; leave it out"),
        (
            '{"prompt": "\ufeffa"}\n'.encode("utf-16").decode("latin-1"),
            "line 1 cannot be read as JSON: it is not UTF-8",
        ),
    ],
)
def test_an_invalid_line_is_named(tmp_path, text, message):
    (tmp_path / "rows.jsonl").write_bytes(
        text.encode("latin-1" if text.startswith("ÿþ") else "utf-8")
    )
    with pytest.raises(ConfigError, match=message) as raised:
        read_sources(str(tmp_path / "rows.jsonl"))
    assert "\n" not in str(raised.value)


UNREADABLE = {
    "a key twice": (
        pa.array([{}, [("k", 1), ("k", 2)]], pa.map_(pa.string(), pa.int64())),
        "column 'x' in row 1 has a value that Python cannot represent",
    ),
    "a key twice, deep": (
        pa.array([[], [[("k", 1), ("k", 2)]]], pa.list_(pa.map_(pa.string(), pa.int64()))),
        "column 'x' in row 1 has a value",
    ),
    "after the year 9999": (
        pa.array([0, 2**62], pa.timestamp("us")),
        r"column 'x' in row 1 has a value .*out of range",
    ),
    "before the year 1": (
        pa.array([0, -(2**40)], pa.timestamp("s")),
        "column 'x' in row 1 has a value",
    ),
    "a date": (pa.array([0, 2**30], pa.date32()), "column 'x' in row 1 has a value"),
    "a duration": (pa.array([0, 2**62], pa.duration("s")), "column 'x' in row 1 has a value"),
    "a zone": (
        pa.array([None, 1], pa.timestamp("us", tz="Mars/Base")),
        "column 'x' in row 1 has a value .*Mars/Base",
    ),
    "a struct": (
        pa.array([None, {"when": 2**62}], pa.struct([("when", pa.timestamp("us"))])),
        "column 'x' in row 1 has a value",
    ),
}


def not_utf8(lists=False):
    offsets = pa.array([0, 1, 2], pa.int32())
    text = pa.Array.from_buffers(
        pa.string(), 2, [None, offsets.buffers()[1], pa.py_buffer(b"a\xff")]
    )
    return pa.ListArray.from_arrays(offsets, text) if lists else text


@pytest.mark.parametrize(("column", "message"), UNREADABLE.values(), ids=UNREADABLE)
def test_values_that_python_cannot_represent_are_refused(tmp_path, column, message):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b"], "x": column}), path)
    with pytest.raises(ConfigError, match=message):
        read_sources(str(path))


@pytest.mark.parametrize("lists", [False, True])
def test_parquet_text_that_is_not_utf8_is_refused_with_its_column(tmp_path, lists):
    pq.write_table(
        pa.table({"prompt": ["a", "b"], "x": not_utf8(lists)}), tmp_path / "rows.parquet"
    )
    with pytest.raises(ConfigError, match=r"rows.parquet': column 'x' is damaged .*UTF8"):
        read_sources(str(tmp_path / "rows.parquet"))


def test_file_suffixes_may_be_in_capitals(tmp_path):
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "TRAIN.PARQUET")
    assert read_sources(str(tmp_path)).table["prompt"].to_pylist() == ["a"]


def test_a_file_of_another_format_is_refused_with_the_supported_ones(tmp_path):
    (tmp_path / "rows.csv").write_text("prompt,answer\na,b\n")
    with pytest.raises(
        ConfigError,
        match=(
            r"rows.csv': line 1 cannot be read as JSON: Expecting value; asyncrl reads Parquet and"
            r" JSONL, so convert it"
        ),
    ):
        read_sources(str(tmp_path / "rows.csv"))


def test_a_column_source_name_is_refused_even_with_one_source(tmp_path):
    with pytest.raises(ConfigError, match="has a column 'source_name', which asyncrl uses"):
        read_sources(
            write_jsonl(
                tmp_path / "rows.jsonl", [{"prompt": "a", "source_name": {"not": "a name"}}]
            )
        )


def test_rows_above_the_size_limit_are_refused(tmp_path, monkeypatch):
    rows = [{"prompt": "a", "text": "x"}, {"prompt": "b", "text": "y" * (3 << 20)}]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for place in (path, str(tmp_path / "rows.parquet")):
        assert row_values(read_sources(place).table) == rows
    for module in (jsonl, sources):
        monkeypatch.setattr(module, "MOST_ROW_BYTES", 2 << 20)
    with pytest.raises(
        ConfigError,
        match="line 2 is longer than 2 MiB, the limit for one row; shorten its values",
    ):
        read_sources(path)
    with pytest.raises(ConfigError, match="row 1 has 3 MiB, above the limit of 2 MiB"):
        read_sources(str(tmp_path / "rows.parquet"))


def test_a_string_column_may_have_more_than_two_gib(tmp_path):
    """2,304 rows of 1 MiB. `Table.take` of them fails with an offset overflow. All chunks share one
    buffer here, because only offsets matter."""
    one = pa.array(["x" * (1 << 20)] * 64)
    column = pa.chunked_array([one] * 36)
    table = pa.table({"text": column, "number": pa.array(range(len(column)))})
    assert table["text"].nbytes > 2 << 30
    rows = RowsByNumber(table)
    taken = rows.table([rows.row(number) for number in (2303, 0, 64)])
    assert taken["number"].to_pylist() == [2303, 0, 64] and len(taken["text"][0].as_py()) == 1 << 20


def test_rows_by_number_copies_the_rows_of_the_table():
    table = pa.concat_tables(
        [
            pa.table({"n": list(range(start, start + 7)), "s": [str(n) for n in range(7)]})
            for start in range(0, 70, 7)
        ]
    )
    rows = RowsByNumber(table)
    for wanted in ([3], [69, 0, 7, 6, 6], list(np.random.default_rng(0).integers(0, 70, 32))):
        taken = rows.table([rows.row(int(number)) for number in wanted])
        assert taken.to_pylist() == table.take(wanted).to_pylist()
        assert (
            sum(buffer.size for chunk in taken["s"].chunks for buffer in chunk.buffers() if buffer)
            < 1024
        )


def test_globs_folders_and_compressed_files_are_read_in_name_order(tmp_path):
    for name in ("b", "a", "c"):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"prompt": name, name: 1}])
    (tmp_path / "d.jsonl.gz").write_bytes(
        gzip.compress(b'\xef\xbb\xbf{"prompt": "d", "a": "text"}\r\n')
    )
    (tmp_path / "notes.md").write_text("nothing")
    folder = read_sources(str(tmp_path))
    assert (
        folder.table["prompt"].to_pylist() == ["a", "b", "c", "d"] and folder.sources[0].files == 4
    )
    # `a` is 1 in one file and text in another.
    assert [row["a"] for row in row_values(folder.table)] == [1, None, None, "text"]
    assert read_sources(str(tmp_path / "[ab].jsonl")).table["prompt"].to_pylist() == ["a", "b"]
    with pytest.raises(
        ConfigError,
        match="no such file; give a Parquet or JSONL file, a glob, a folder, or the owner",
    ):
        read_sources(str(tmp_path / "x*.jsonl"))
    with pytest.raises(ConfigError, match="is not a folder, so it has no split 'test'"):
        read_sources((Source(path=str(tmp_path / "a.jsonl"), split="test"),))


def test_sources_share_one_set_of_columns_and_add_their_name(tmp_path):
    first = write_jsonl(tmp_path / "first.jsonl", [{"prompt": CHAT, "answer": 4, "level": 1}])
    pq.write_table(
        pa.Table.from_pylist([{"question": "2+2", "answer": "4", "score": 0.5}]),
        tmp_path / "second.parquet",
    )
    given = (
        Source(path=first),
        Source(path=str(tmp_path / "second.parquet"), prompt_column="question", name="sums"),
    )
    found = read_sources(given)
    assert row_values(found.table) == [
        {"prompt": CHAT, "answer": 4, "level": 1, "source_name": "first", "score": None},
        {"prompt": "2+2", "answer": "4", "level": None, "source_name": "sums", "score": 0.5},
    ]
    assert [(one.name, one.rows) for one in found.sources] == [("first", 1), ("sums", 1)]


def test_columns_with_incompatible_types_are_refused(tmp_path):
    pq.write_table(pa.table({"prompt": ["a"], "extra": [b"bytes"]}), tmp_path / "a.parquet")
    write_jsonl(tmp_path / "b.jsonl", [{"prompt": "b", "extra": 1}])
    with pytest.raises(
        ConfigError,
        match=(
            r"column 'extra' has types \['binary', 'int64'\] in different files, which cannot"
            r" be combined"
        ),
    ):
        read_sources(str(tmp_path))


def test_a_missing_prompt_column_is_named(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "question": "b"}])
    with pytest.raises(
        ConfigError, match=r"prompt_column = 'text' is not a column of .*a.jsonl', which has"
    ):
        read_sources((Source(path=path, prompt_column="text"),))
    with pytest.raises(
        ConfigError, match="has a column 'prompt' in addition to its prompt_column 'question'"
    ):
        read_sources((Source(path=path, prompt_column="question"),))


def test_the_plan_shows_several_sources(prompt_config, tmp_path):
    many = write_jsonl(
        tmp_path / "many.jsonl", [{"prompt": f"{n}+1="} for n in range(30)] + [{"prompt": "1" * 17}]
    )
    few = write_jsonl(tmp_path / "few.jsonl", [{"prompt": f"{n}-1="} for n in range(10)])
    config = prompt_config(
        [], train=[{"path": many, "weight": 1}, {"path": few, "weight": 3}], prompt_policy="drop"
    )
    report = check_prompts(data_spec(config))
    assert [(one.name, one.rows, one.weight) for one in report.sources] == [
        ("many", 30, 1.0),
        ("few", 10, 3.0),
    ]
    from asyncrl.preflight.plan.sections import sources_text

    assert (
        sources_text(report, config)
        == "  source many: 30 rows used from 1 file; 25.0% of the prompts\n  source few: 10 rows"
        " used from 1 file; 75.0% of the prompts\n"
    )
    assert report.columns == ("source_name",)
    (tmp_path / "few.jsonl").write_text(json.dumps({"prompt": "1" * 17}))
    with pytest.raises(
        ConfigError, match="no row of source 'few' is left; raise the limit, or remove the"
    ):
        check_prompts(data_spec(config))


def test_dictionary_columns_count_by_each_rows_value(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MOST_ROW_BYTES", 2 << 20)
    column = pa.array(["x" * (3 << 19), "y" * (3 << 19)]).dictionary_encode()
    pq.write_table(pa.table({"prompt": ["a", "b"], "extra": column}), tmp_path / "rows.parquet")
    assert read_sources(str(tmp_path / "rows.parquet")).table.num_rows == 2


def test_compressed_suffixes_may_be_in_capitals_and_a_byte_order_mark_is_skipped(tmp_path):
    (tmp_path / "ROWS.JSONL.GZ").write_bytes(gzip.compress(b'{"prompt": "a"}'))
    assert row_values(read_sources(str(tmp_path / "ROWS.JSONL.GZ")).table) == [{"prompt": "a"}]
    (tmp_path / "mark.jsonl").write_bytes(b"\xef\xbb\xbf")
    with pytest.raises(ConfigError, match="has no rows"):
        read_sources(str(tmp_path / "mark.jsonl"))


def test_streamed_rows_are_those_of_the_whole_table(tmp_path):
    """In blocks of few rows and bytes, across files, formats and sources."""
    long = "x" * 1000
    jsonl = "".join(
        json.dumps({"prompt": f"{n}", "answer": n, "other": long}) + "\n" for n in range(25)
    )
    (tmp_path / "a.jsonl").write_text(jsonl)
    folder = tmp_path / "b"
    folder.mkdir()
    for part in range(2):
        table = pa.table(
            {"prompt": [f"{part}{n}" for n in range(13)], "chat": [[{"a": None}]] * 13}
        )
        pq.write_table(table, folder / f"{part}.parquet", row_group_size=5)
    pq.write_table(table.slice(0, 0), folder / "2.parquet")
    sources = [Source(path=str(tmp_path / "a.jsonl")), Source(path=str(folder))]
    whole = read_sources(sources).table
    blocks = list(stream_sources(sources, {"prompt", "answer"}, rows=4))
    assert [block.first_row for block in blocks] == list(
        np.cumsum([0, *(block.table.num_rows for block in blocks)])[:-1]
    )
    assert max(block.table.num_rows for block in blocks) == 4
    prompts = [prompt for block in blocks for prompt in block.table["prompt"].to_pylist()]
    assert prompts == whole["prompt"].to_pylist() and len(prompts) == 51
    assert {block.columns for block in blocks} == {
        ("prompt", "answer", "other"),
        ("prompt", "chat"),
    }
    assert blocks[0].table.column_names == ["prompt", "answer"]
    assert {block.source for block in blocks} == {0, 1}
    assert [block.file.name for block in blocks[-1:]] == ["1.parquet"]


def test_streamed_blocks_have_a_bounded_size(tmp_path, monkeypatch):
    monkeypatch.setattr("asyncrl.data.sources.BLOCK_BYTES", 5000)
    texts = ["x" * size for size in (10, 4000, 4000, 9000, 10)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    blocks = list(stream_sources(str(tmp_path / "a.parquet"), {"text"}))
    assert [block.table["text"].to_pylist() for block in blocks] == [
        texts[:2],
        texts[2:3],
        texts[3:4],
        texts[4:],
    ]


def test_streaming_refuses_what_reading_refuses(tmp_path):
    def stream(name):
        return list(stream_sources(str(tmp_path / name), {"text", "when"}))

    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\nno json\n')
    with pytest.raises(ConfigError, match=r"bad.jsonl': line 2 cannot be read as JSON"):
        stream("bad.jsonl")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ConfigError, match="cannot be read as Parquet"):
        stream("bad.parquet")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "empty.parquet")
    with pytest.raises(ConfigError, match="has no rows"):
        stream("empty.parquet")
    when = pa.array([1], pa.timestamp("ns"))
    pq.write_table(pa.table({"when": when}), tmp_path / "fine.parquet")
    with pytest.raises(ConfigError, match="column 'when' has type timestamp"):
        stream("fine.parquet")
    other = pa.table({"other": [1, 2], "when too": pa.array([1, 2], pa.timestamp("ns"))})
    pq.write_table(other, tmp_path / "unread.parquet")
    (block,) = stream("unread.parquet")
    assert block.columns == ("other", "when too") and block.table.num_rows == 2
