"""The files of a split, for the layouts of datasets on the hub."""

import pytest

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
