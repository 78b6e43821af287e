"""Paths as users write them: home directories, variables, URLs, and names with a slip."""

import os

import pytest
from small_config import offline_spec

from asyncrl.config import ConfigError, load_any
from asyncrl.data.offline_rows import check_offline_rows
from asyncrl.runtime.paths import meant, written_path

CONFIG = """
name: paths
objective: sft
{more}
model: {{path: {model}}}
data: {{train: {train}}}
checkpoint: {{save: {save}}}
"""


def load(tmp_path, model="m", train="t.jsonl", save="s", more="", overrides=None):
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG.format(model=model, train=train, save=save, more=more))
    return load_any(path, overrides)


def test_variables_and_home_are_replaced_in_every_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setenv("SETS", "/sets")
    config = load(tmp_path, "~/m", "'${SETS}/a.jsonl'", "$HOME/s", 'runs_root: "$HOME/runs"')
    assert config.model.path == "/home/ann/m" and config.checkpoint.save == "/home/ann/s"
    assert config.data.train == "/sets/a.jsonl"
    assert str(config.run_directory) == "/home/ann/runs/paths"
    sources = load(tmp_path, train="[{path: $SETS/a.jsonl}, {path: ~/b.jsonl}]").data.train
    assert [source.path for source in sources] == ["/sets/a.jsonl", "/home/ann/b.jsonl"]
    rooted = load(tmp_path, save="'${runs_root}/s'", more="runs_root: /r")
    assert rooted.checkpoint.save == "/r/s"
    asked = load(tmp_path, overrides=["--data.train", "$SETS/c.jsonl"])
    assert asked.data.train == "/sets/c.jsonl"


def test_relative_paths_begin_in_the_directory_of_the_call(tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    config = load(tmp_path, "m", "t.jsonl", "s")
    there = str(tmp_path / "there")
    assert config.model.path == f"{there}/m" and config.checkpoint.save == f"{there}/s"
    assert config.data.train == f"{there}/t.jsonl"


@pytest.mark.parametrize(
    ("setting", "path", "message"),
    [
        ("model", "$NOWHERE_SET/m", r"model.path = '\$NOWHERE_SET/m' has \$NOWHERE_SET, and the"),
        ("train", "'${NOWHERE_SET}/t'", r"data.train = .* has \$\{NOWHERE_SET\}, and the"),
        ("train", "'${oc.env:HOME}/t'", r"has \$\{oc.env:HOME\}, and the environment has no"),
        ("train", "$EMPTY_SET/t", r"has \$EMPTY_SET, and .* no variable 'EMPTY_SET' with a value"),
        ("save", "$NOWHERE_SET", r"checkpoint.save = '\$NOWHERE_SET' has"),
        ("train", "s3://bucket/t.jsonl", "data.train = 's3://bucket/t.jsonl' is a URL"),
        ("train", "file:///t.jsonl", "is a URL, and asyncrl reads local files"),
        ("save", "gs://bucket", "checkpoint.save = 'gs://bucket' is a URL"),
        ("train", "$BUCKET/t", "is a URL"),
        ("train", "file:/t.jsonl", "is a URL, and asyncrl reads local files"),
        ("save", "s3:/bucket", "checkpoint.save = 's3:/bucket' is a URL"),
        ("train", "'%HOME%/t'", r"has %HOME%, which is not replaced; write \$HOME"),
        ("train", "~nobody-of-this-name/t", "begins with a home directory that is unknown"),
        ("more", "runs_root: $NOWHERE_SET/r", r"runs_root = '\$NOWHERE_SET/r' has"),
    ],
)
def test_what_would_become_a_folder_of_that_name_is_refused(
    tmp_path, monkeypatch, setting, path, message
):
    monkeypatch.delenv("NOWHERE_SET", raising=False)
    monkeypatch.setenv("EMPTY_SET", "")
    monkeypatch.setenv("BUCKET", "s3://bucket")
    for overrides in (None, ["--seed", "1"]):
        with pytest.raises(ConfigError, match=message) as refused:
            load(tmp_path, **{setting: path}, overrides=overrides)
        assert "\n" not in str(refused.value)


def test_a_path_that_exists_as_it_is_written_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a$HOME").mkdir()
    assert written_path("a$HOME") == "a$HOME"
    assert written_path("cost$/x") == "cost$/x"
    (tmp_path / "a:").mkdir()
    assert written_path("a:/") == "a:/"
    assert written_path("50%_a%.jsonl") == "50%_a%.jsonl"


def test_a_missing_file_names_its_neighbor(tmp_path, chat_model_path):
    (tmp_path / "train.jsonl").write_text("{}")
    assert meant(tmp_path / "trian.jsonl") == f"; did you mean '{tmp_path}/train.jsonl'?"
    assert meant(tmp_path / "train.json") == f"; did you mean '{tmp_path}/train.jsonl'?"
    assert meant(tmp_path / "TRAIN.JSONL") == f"; did you mean '{tmp_path}/train.jsonl'?"
    assert meant(tmp_path / "none" / "x.jsonl") == f"; there is no folder '{tmp_path}/none'"
    (tmp_path / "sets").mkdir()
    assert meant(tmp_path / "set" / "x.jsonl") == f"; did you mean '{tmp_path}/sets'?"
    assert meant(tmp_path / "zzz") == ""
    spec = offline_spec(chat_model_path)
    with pytest.raises(ConfigError, match=r"no such file; .*; did you mean '.*/train.jsonl'\?"):
        check_offline_rows(spec, str(tmp_path / "trains.jsonl"), "data.train", "sft")
    (tmp_path / "run.yaml").write_text("name: x")
    with pytest.raises(ConfigError, match=r"cannot be read .* did you mean '.*/run.yaml'\?"):
        load_any(tmp_path / "runs.yaml")
    assert os.path.isabs(written_path("~"))


@pytest.fixture
def chat_model_path(tmp_path_factory):
    from chat_families import save_chat_model

    return save_chat_model(tmp_path_factory.mktemp("chat"), None)
