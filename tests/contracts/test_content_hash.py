"""A group's hash survives every way in which its row is stored, and changes with every value."""

from dataclasses import replace

import pyarrow as pa
import pytest

from asyncrl.contracts.content_hash import content_hashes
from asyncrl.contracts.group_table import groups_to_table
from asyncrl.contracts.rows import Baseline, Completion, Group, Prompt, Trajectory, VersionSpan
from asyncrl.rewards.files import FlushFiles, compact
from asyncrl.runtime.files import parquet

NAN = float("nan")


def group(ordinal, **columns):
    whole = Completion((8, 2), (-0.1, NAN), (VersionSpan(3, 0, 2),), "stop", "né\0")
    empty = Completion((), (), (), "stop", "")
    trajectories = (
        Trajectory(
            whole, (1, 0), reward=1.0, reward_parts={"exact": 1.0, "judge": None}, advantage=0.5
        ),
        Trajectory(
            empty,
            (),
            reward=None,
            reward_parts={"exact": None, "judge": None},
            advantage=None,
            status="no_token",
        ),
    )
    prompt = Prompt(ordinal, 0, f"{ordinal} + 1 =", (5, 6, 7), columns)
    return Group(
        0,
        prompt,
        trajectories,
        "replica-1",
        10.0,
        11.0,
        scored_at=12.0,
        admitted_at=9.5,
        generated=((10.0, 10.5), (10.0, 11.0)),
    )


GROUPS = [
    group(ordinal, answer=str(ordinal), number=ordinal, chat=[{"role": "user", "content": "x"}])
    for ordinal in range(6)
]
TABLE = groups_to_table(GROUPS)
HASHES = content_hashes(TABLE)


def test_each_row_has_its_own_hash():
    assert len(set(HASHES)) == 6 and all(len(digest) == 32 for digest in HASHES)


def test_slices_column_order_and_chunks_do_not_matter():
    assert [content_hashes(TABLE.slice(row, 1))[0] for row in range(6)] == HASHES
    assert content_hashes(TABLE.select(sorted(TABLE.column_names, reverse=True))) == HASHES
    assert (
        content_hashes(pa.concat_tables([TABLE.slice(3, 3), TABLE.slice(0, 3)]))
        == HASHES[3:] + HASHES[:3]
    )
    assert content_hashes(TABLE.slice(0, 0)) == []


def test_parquet_and_compaction_do_not_matter(tmp_path):
    files = FlushFiles(tmp_path, 0)
    for row in range(6):
        files.write([TABLE.slice(row, 1)])
    assert compact(tmp_path) == 1
    (path,) = tmp_path.glob("*.parquet")
    assert content_hashes(parquet.read_table(path)) == HASHES


def test_type_changes_of_dataset_columns_in_a_merge_do_not_matter():
    """An empty column takes its type from another file, whole numbers become floats, and structs
    get each other's fields."""
    first, second = (
        group(0, hint=None, number=3, extra={"a": 1}),
        group(1, hint="x", number=2.5, extra={"a": 1, "b": "y"}),
    )
    apart = [content_hashes(groups_to_table([each]))[0] for each in (first, second)]
    merged = pa.concat_tables(
        [groups_to_table([first]), groups_to_table([second])], promote_options="permissive"
    )
    assert merged.schema.field("number").type == pa.float64() and content_hashes(merged) == apart


@pytest.mark.parametrize(
    "column",
    [
        "reward",
        "advantage",
        "reward_parts",
        "logprobs",
        "completion_ids",
        "versions",
        "failure",
        "token_rewards",
    ],
)
def test_a_missing_value_does_not_change_the_hash_of_other_rows(column):
    """Merging flushes puts a group with an unscored trajectory next to complete ones."""
    whole = [row | {"token_rewards": [[0.5, 0.0], []]} for row in TABLE.to_pylist()]
    schema = TABLE.schema.append(pa.field("token_rewards", pa.list_(pa.list_(pa.float32()))))
    for row in whole:
        row |= {
            "reward": [1.0, 0.0],
            "advantage": [0.5, -0.5],
            "failure": "why",
            "reward_parts": [{"exact": 1.0, "judge": 0.5}] * 2,
        }
    torn = [
        row
        | ({column: None if row["ordinal"] == 2 else row[column]} if column == "failure" else {})
        for row in whole
    ]
    if column != "failure":
        torn[2] = {**whole[2], column: [None, *whole[2][column][1:]]}
    apart = [content_hashes(pa.Table.from_pylist([row], schema))[0] for row in torn]
    together = pa.Table.from_pylist(torn, schema)
    assert (
        content_hashes(together)
        == apart
        == content_hashes(pa.concat_tables([together.slice(0, 4), together.slice(4)]))
    )
    assert [content_hashes(together.slice(row, 1))[0] for row in range(6)] == apart
    assert [
        a == b
        for a, b in zip(apart, content_hashes(pa.Table.from_pylist(whole, schema)), strict=True)
    ] == [True, True, False, True, True, True]


@pytest.mark.parametrize("name", TABLE.column_names)
def test_a_change_in_any_column_changes_the_hash(name):
    rows = TABLE.to_pylist()
    before = rows[2][name]
    rows[2][name] = changed(before)
    table = pa.Table.from_pylist(rows, TABLE.schema)
    assert table["ordinal"].to_pylist()[1] == 1
    found = content_hashes(table)
    assert [a == b for a, b in zip(found, HASHES, strict=True)] == [
        True,
        True,
        False,
        True,
        True,
        True,
    ]


def changed(value):
    """Another value of the same type."""
    if isinstance(value, list):
        return (
            [*value[:-1], changed(value[-1])]
            if value and value[-1]
            else [changed(value[0]), *value[1:]]
            if value
            else [1]
        )
    if isinstance(value, dict):
        name = sorted(value)[-1]
        return {**value, name: 0.25 if value[name] is None else changed(value[name])}
    if value is None:
        return "why"
    if value != value:
        return 0.0
    return value + "x" if isinstance(value, str) else value + 1


def test_adjacent_values_are_kept_apart():
    def hash_of(ids, texts):
        completions = [
            Completion(tuple(one), (-1.0,) * len(one), (VersionSpan(0, 0, len(one)),), "stop", text)
            for one, text in zip(ids, texts, strict=True)
        ]
        trajectories = tuple(
            Trajectory(one, (1,) * len(one.token_ids), 1.0, {"a": 1.0}, 0.0) for one in completions
        )
        return content_hashes(
            groups_to_table(
                [Group(0, Prompt(0, 0, "p", (1,)), trajectories, "r", 1.0, 2.0, scored_at=3.0)]
            )
        )[0]

    made = {
        hash_of(ids, texts)
        for ids in ([[1, 2], [3]], [[1], [2, 3]])
        for texts in (["ab", "c"], ["a", "bc"])
    }
    assert len(made) == 4


def test_a_baseline_is_part_of_the_row(tmp_path):
    greedy = Completion((8, 2), (-0.1, -2.0), (VersionSpan(3, 0, 2),), "stop", "é")
    given = [
        Baseline(greedy, 0.5, {"exact": 0.5, "judge": None}),
        Baseline(greedy, None, {"exact": None, "judge": None}),
        Baseline(replace(greedy, versions=(VersionSpan(2, 0, 2),)), 0.5, {"exact": 0.5}),
        Baseline(replace(greedy, token_ids=(8, 3)), 0.5, {"exact": 0.5}),
        Baseline(replace(greedy, text="e"), 0.5, {"exact": 0.5}),
    ]
    tables = [groups_to_table([replace(GROUPS[0], baseline=baseline)]) for baseline in given]
    hashes = [content_hashes(table)[0] for table in tables]
    assert len({*hashes, HASHES[0]}) == 6
    whole = pa.concat_tables(tables, promote_options="permissive")
    assert content_hashes(whole) == hashes, "the columns of one row do not change another's hash"
    parquet.write_table(whole, tmp_path / "groups.parquet")
    assert content_hashes(parquet.read_table(tmp_path / "groups.parquet")) == hashes
