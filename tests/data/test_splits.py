"""The files of a split, for the layouts of datasets on the hub."""

import json

import pyarrow as pa
import pytest

from asyncrl.config import ConfigError, Source
from asyncrl.data.sources import read_sources, stream_sources
from asyncrl.data.splits import data_files

GSM8K = [
    "README.md",
    ".gitattributes",
    "main/train-00000-of-00001.parquet",
    "main/test-00000-of-00001.parquet",
    "socratic/train-00000-of-00001.parquet",
    "socratic/test-00000-of-00001.parquet",
]
GSM8K_README = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: socratic/train-*
---
# GSM8K
"""
MATH = ["README.md", "test.jsonl", "train.jsonl", "eval.py", "_private/train.jsonl"]
SORTED = ["x/b.jsonl", "x/y/c.jsonl", "a.jsonl"]
"""In the order of the patterns."""
HANG = "*a" * 40 + "b"


def test_a_hostile_glob_in_a_readme_is_fast():
    readme = f"---\nconfigs:\n- data_files: '{HANG}'\n---"
    with pytest.raises(ValueError, match="contains no data file"):
        data_files(["a" * 200 + ".jsonl"], readme, None, None)


@pytest.mark.parametrize(
    ("names", "readme", "split", "subset", "files"),
    [
        (GSM8K, GSM8K_README, "train", "main", ["main/train-00000-of-00001.parquet"]),
        (GSM8K, GSM8K_README, None, "socratic", ["socratic/train-00000-of-00001.parquet"]),
        (GSM8K, None, "test", "socratic", ["socratic/test-00000-of-00001.parquet"]),
        (
            GSM8K,
            None,
            "test",
            None,
            ["main/test-00000-of-00001.parquet", "socratic/test-00000-of-00001.parquet"],
        ),
        (MATH, None, "train", None, ["train.jsonl"]),
        (["data.parquet", "dataset_infos.json"], None, "train", None, ["data.parquet"]),
        (["more.jsonl", "train.jsonl"], None, "train", None, ["train.jsonl"]),
        (
            ["a.jsonl", "x/b.jsonl", "x/y/c.jsonl"],
            "---\nconfigs:\n- data_files: ['**/b.jsonl', 'x/**/**/c*', './a.*']\n---",
            None,
            None,
            SORTED,
        ),
        (["b.jsonl", "a.jsonl.gz", "c.csv"], None, None, None, ["a.jsonl.gz", "b.jsonl"]),
        (
            ["data/validation.json", "data/dev_small.json", "training/x.pq"],
            None,
            "validation",
            None,
            ["data/dev_small.json", "data/validation.json"],
        ),
        (["training/x.pq", "test/x.pq"], None, "train", None, ["training/x.pq"]),
        (
            ["x/a.jsonl", "y/b.jsonl"],
            "---\nconfigs:\n- config_name: default\n  data_files: '**/*.jsonl'\n---",
            None,
            None,
            ["x/a.jsonl", "y/b.jsonl"],
        ),
        (
            ["x/a.jsonl", "y/b.jsonl"],
            "---\nconfigs:\n- data_files: {train: 'x/*', test: ['y/?.jsonl']}\n---",
            "test",
            None,
            ["y/b.jsonl"],
        ),
        (["train.jsonl"], "---\n: [no yaml\n---", None, None, ["train.jsonl"]),
    ],
)
def test_the_files_of_a_split(names, readme, split, subset, files):
    assert data_files(names, readme, split, subset) == files


@pytest.mark.parametrize(
    ("names", "readme", "split", "subset", "message"),
    [
        (
            GSM8K,
            GSM8K_README,
            "train",
            None,
            r"contains several subsets; name one of \['main', 'socratic'\] as subset",
        ),
        (
            GSM8K,
            GSM8K_README,
            "train",
            "hard",
            r"contains no subset 'hard'; name one of \['main', 'socratic'\]",
        ),
        (
            GSM8K,
            None,
            "train",
            "hard",
            r"contains no subset 'hard'; it has the folders \['main', 'socratic'\]",
        ),
        (GSM8K, GSM8K_README, "test", "socratic", r"contains no split 'test'; it has \['train'\]"),
        (
            MATH,
            None,
            None,
            None,
            r"contains the splits \['test', 'train'\]; name one of them as split",
        ),
        (MATH, None, "train[:10%]", None, r"contains no split 'train\[:10%\]'"),
        (["README.md"], None, "train", None, r"contains no data file \(.parquet"),
        (
            ["train-00000-of-00003.parquet", "train-00002-of-00003.parquet"],
            None,
            "train",
            None,
            "lacks train-00001-of-00003.parquet; download it again",
        ),
        (
            ["a.jsonl"],
            "---\nconfigs:\n- data_files: [{path: a.jsonl}]\n---",
            None,
            None,
            "has a README.md with unreadable configs",
        ),
        (
            ["a.jsonl"],
            "---\nconfigs:\n- data_files: 5\n---",
            None,
            None,
            "has a README.md with unreadable configs",
        ),
        (
            ["a.jsonl"],
            "---\nconfigs:\n- data_files: '[z-a].jsonl'\n---",
            None,
            None,
            "contains no data file",
        ),
        (
            ["more.jsonl", "train.jsonl"],
            None,
            None,
            None,
            r"contains the splits \['train'\], and files without a split \(more.jsonl\); name one",
        ),
        (
            ["a.jsonl"],
            "---\nconfigs:\n- data_files: ../../etc/*\n---",
            None,
            None,
            "contains no data file",
        ),
    ],
)
def test_missing_splits_and_files_are_refused(names, readme, split, subset, message):
    with pytest.raises(ValueError, match=message):
        data_files(names, readme, split, subset)


def save_to_disk(folder, rows, split, shards=1):
    """Write what `datasets.Dataset.save_to_disk` writes: Arrow streams and two JSON files."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{shards:05d}.arrow" for number in range(shards)]
    for number, name in enumerate(names):
        table = pa.Table.from_pylist(rows[number::shards])
        table = table.replace_schema_metadata({"huggingface": '{"info": {"features": {}}}'})
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(
            file, table.schema
        ) as writer:  # fmt: skip
            writer.write_table(table, max_chunksize=2)
    state = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": "f",
        "_split": split,
    }
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}, "splits": {}}))


def test_a_folder_of_save_to_disk_is_read(tmp_path):
    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(7)]
    save_to_disk(tmp_path / "set", rows, "train", shards=2)
    (tmp_path / "set" / "cache-0123.arrow").write_bytes(b"an older map()")
    (tmp_path / "set" / "stale.arrow").write_bytes(b"not listed")
    found = read_sources(str(tmp_path / "set")).table.to_pylist()
    assert found == [*rows[0::2], *rows[1::2]]
    assert [
        table.num_rows
        for block in stream_sources(str(tmp_path / "set"), {"prompt"}, rows=3)
        for table in [block.table]
    ] == [2, 2, 2, 1], "never more than a record batch"
    (tmp_path / "set" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(ConfigError, match=r"lacks data-00001-of-00002.arrow, which its state.json"):
        read_sources(str(tmp_path / "set"))


def test_splits_of_save_to_disk_have_their_own_names(tmp_path):
    for split in ("train_sft", "test_gen", "extra"):
        save_to_disk(tmp_path / split, [{"prompt": split}], split)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train_sft", "test_gen", "extra"]}')
    for split in ("train_sft", "test_gen", "extra"):
        source = Source(path=str(tmp_path), split=split)
        assert read_sources([source]).table.to_pylist() == [{"prompt": split}]
    with pytest.raises(ConfigError, match=r"the splits \['extra', 'test_gen', 'train_sft'\]; name"):
        read_sources(str(tmp_path))
    with pytest.raises(ConfigError, match="no split 'train'"):
        read_sources([Source(path=str(tmp_path), split="train")])


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"_indices_data_files": [{"filename": "i.arrow"}]}, r"flatten_indices\(\), and save it"),
        ({"_data_files": ["data-00000-of-00001.arrow"]}, "has state.json, which does not list its"),
        ({"_data_files": [{"filename": 5}]}, "does not list its Arrow files as"),
        ({"_data_files": [{}]}, "does not list its Arrow files as"),
        ({"_data_files": None}, "does not list its Arrow files as"),
        ({"_data_files": {"filename": "x"}}, "does not list its Arrow files as"),
        (
            {"_data_files": [{"filename": "../x.arrow"}]},
            r"lacks \.\./x.arrow, which its state.json",
        ),
        ("{", "does not list its Arrow files as"),
        ("[" * 100_000, "does not list its Arrow files as"),
        ("[]", "does not list its Arrow files as"),
        (b"\xff\xfe", "does not list its Arrow files as"),
    ],
)
def test_a_state_that_is_not_followed_is_refused(tmp_path, state, message):
    save_to_disk(tmp_path / "set", [{"prompt": "1+1="}], "train")
    file = tmp_path / "set" / "state.json"
    if isinstance(state, dict):
        state = json.dumps(json.loads(file.read_text()) | state)
    file.write_bytes(state if isinstance(state, bytes) else state.encode())
    with pytest.raises(ConfigError, match=message) as refused:
        read_sources(str(tmp_path / "set"))
    assert "\n" not in str(refused.value)


def test_a_users_own_state_is_data(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "1+1="}')
    (tmp_path / "state.json").write_text('{"prompt": "2+2="}')
    assert read_sources(str(tmp_path)).table["prompt"].to_pylist() == ["1+1=", "2+2="]


@pytest.mark.parametrize(
    ("splits", "split", "message"),
    [
        ('{"splits": ["train", "test"]}', "test", "lacks the folder 'test', which its dataset_di"),
        ('{"splits": "train"}', None, "has a dataset_dict.json without a list of splits"),
        ('{"splits": [["train"]]}', None, "has a dataset_dict.json without a list of splits"),
        ('{"splits": []}', None, "has a dataset_dict.json without a list of splits"),
        ("{", None, "has a dataset_dict.json without a list of splits"),
        ('{"splits": ["a"]}', None, "contains no data file in its folder 'a'"),
    ],
)
def test_splits_that_are_not_there_are_refused(tmp_path, splits, split, message):
    save_to_disk(tmp_path / "train", [{"prompt": "1+1="}], "train")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "none.txt").write_text("")
    (tmp_path / "dataset_dict.json").write_text(splits)
    with pytest.raises(ConfigError, match=message):
        read_sources([Source(path=str(tmp_path), split=split)])


def test_hidden_files_are_no_data_and_linked_folders_are(tmp_path):
    save_to_disk(tmp_path / "set" / "train", [{"prompt": "1+1="}], "train")
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "link").symlink_to(tmp_path / "set")
    (tmp_path / "set" / "back").symlink_to(tmp_path / "plain")
    for name in (".x.parquet", "._x.parquet", "_x.jsonl", ".cache/x.arrow", "_SUCCESS"):
        file = tmp_path / "set" / "train" / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"no data")
    for folder in ("set", "plain"):
        assert read_sources(str(tmp_path / folder)).table.to_pylist() == [{"prompt": "1+1="}]
    (tmp_path / "plain" / "train.jsonl").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"plain/train.jsonl. cannot be read"):
        read_sources([Source(path=str(tmp_path / "plain"))])


def test_arrow_files_are_read_in_both_formats_and_never_run_code(tmp_path):
    table = pa.table({"prompt": ["1+1="]})
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_file(
        file, table.schema
    ) as writer:  # fmt: skip
        writer.write_table(table)
    assert read_sources(str(tmp_path / "a.arrow")).table.to_pylist() == [{"prompt": "1+1="}]
    (tmp_path / "bad.arrow").write_bytes(b"no Arrow at all")
    with pytest.raises(ConfigError, match=r"bad.arrow' cannot be read as .* Arrow \(\*.arrow\)"):
        read_sources(str(tmp_path / "bad.arrow"))
    marked = pa.field("prompt", pa.string(), metadata={b"ARROW:extension:name": b"ray.tensor"})
    for new in (pa.ipc.new_file, pa.ipc.new_stream):
        path = str(tmp_path / "e.arrow")
        with pa.OSFile(path, "wb") as file, new(file, pa.schema([marked])) as writer:
            writer.write_table(table.cast(pa.schema([marked])))
        with pytest.raises(ConfigError, match="column of an Arrow extension type"):
            read_sources(str(tmp_path / "e.arrow"))
