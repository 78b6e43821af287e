"""Each test tries to break one security promise. The HTTP routes have their own tests
(tests/serving)."""

from __future__ import annotations

import ast
import asyncio
import base64
import io
import json
import logging
import os
import pickle
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from asyncrl.config import Config, ConfigError, load_config
from asyncrl.observe.progress import Progress, ProgressView
from asyncrl.preflight.specs import data_spec
from asyncrl.run.cluster import cluster
from asyncrl.rundir.directory import RunDirectory
from asyncrl.rundir.metrics import MetricsWriter, read_metrics
from asyncrl.rundir.reader import open_run
from asyncrl.runtime.files.shared import size_and_checksum
from asyncrl.runtime.redact import (
    RedactingFormatter,
    redact,
    redact_all,
    redact_tree,
    secret_names,
    shown,
)
from asyncrl.testing import FakeLearner, FakeRollouts, FakeScores

ROOT = Path(__file__).parents[1]
SECRET = "tr0ub4dor-and-3"
HOSTILE = "\x1b[2J\x1b]0;owned\x07[bold red]<script>alert(1)</script>\u202e\r"


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    """The path of a file that no code may create."""
    yield tmp_path / "executed"
    assert not (tmp_path / "executed").exists(), "code in a file was run"


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("ASYNCRL_API_KEY", SECRET)
    return SECRET


def tree(root: Path, **changes: Any) -> dict[str, Any]:
    return {
        "name": "run",
        "runs_root": str(root),
        "max_steps": 3,
        "model": {"path": str(root / "model")},
        "data": {"train": str(root / "train.parquet"), "max_prompt_length": 20},
        "rollout": {"max_completion_length": 8},
        "reward": {"functions": {"exact": {"function": "asyncrl.rewards.builtin:exact_match"}}},
        **changes,
    }


def config(root: Path, **changes: Any) -> Config:
    return Config.model_validate(tree(root, **changes))


# Ray's token


def test_ray_without_its_token_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    ended: list[bool] = []
    monkeypatch.setattr(cluster, "is_token_auth_enabled", lambda: False)
    monkeypatch.setattr(cluster, "start_local_ray", lambda cpus, **options: None)
    monkeypatch.setattr(
        cluster.ray._private.worker,
        "_global_node",
        type("Node", (), {"get_session_dir_path": lambda self: str(tmp_path)})(),
    )
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: ended.append(True))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with (
        pytest.raises(RuntimeError, match="Ray's token authentication is off; unset RAY_AUTH_MODE"),
        cluster.ray_cluster(config(tmp_path)),
    ):
        raise AssertionError("the run continued")
    assert ended == [True]


def test_a_local_cluster_has_a_token(ray_cluster: Any) -> None:
    from asyncrl.run.cluster.cluster import _refuse_open_ray

    _refuse_open_ray()


# Code in a model's directory


@pytest.fixture
def model_with_code(tmp_path: Path, tiny_model: Path, marker: Path) -> Path:
    """A checkpoint with its own code for config, model and tokenizer."""
    directory = tmp_path / "model"
    directory.mkdir()
    for file in tiny_model.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    (directory / "code.py").write_text(f"open({str(marker)!r}, 'w')\nclass A: pass\n")
    settings = json.loads((directory / "config.json").read_text())
    settings |= {
        "model_type": "brings_its_own",
        "auto_map": {"AutoConfig": "code.A", "AutoModelForCausalLM": "code.A"},
    }
    (directory / "config.json").write_text(json.dumps(settings))
    tokenizer = json.loads((directory / "tokenizer_config.json").read_text())
    tokenizer |= {"tokenizer_class": "A", "auto_map": {"AutoTokenizer": ["code.A", "code.A"]}}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return directory


def test_a_models_own_code_does_not_run(
    model_with_code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from asyncrl.models.policy import load_policy
    from asyncrl.text.tokenizer import load_tokenizer

    monkeypatch.setattr("builtins.input", lambda *text: "y")  # transformers asks by default
    with pytest.raises(ValueError):
        load_policy(str(model_with_code), torch.float32, 1.0)
    load = load_tokenizer.__wrapped__  # without the cache
    load(str(model_with_code))  # the tokenizer.json alone is safe
    (model_with_code / "tokenizer.json").rename(model_with_code / "vocabulary.json")
    with pytest.raises((ValueError, OSError)):
        load(str(model_with_code))


def test_weights_come_from_safetensors_alone(
    tmp_path: Path, tiny_model: Path, marker: Path
) -> None:
    """A directory with any safetensors file passes the plan, but transformers would look for its
    usual names and then for pickles."""
    import torch

    from asyncrl.models.policy import load_policy

    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").rename(tmp_path / "decoy.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Touch(marker)))
    with pytest.raises(OSError, match="safetensors"):
        load_policy(str(tmp_path), torch.float32, 1.0)


def test_the_engine_gets_the_same_settings(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checked in the source, because importing vLLM's config takes half a minute."""
    (call,) = [
        node
        for node in ast.walk(parsed("generation/engine/arguments.py"))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "AsyncEngineArgs"
    ]
    given = {keyword.arg: getattr(keyword.value, "value", None) for keyword in call.keywords}
    assert given["trust_remote_code"] is False and given["load_format"] == "safetensors"


def parsed(name: str) -> ast.Module:
    return ast.parse((ROOT / "asyncrl" / name).read_text())


SAFE = {"weights_only": True, "trust_remote_code": False}


SOURCES = [
    *sorted(
        path for top in ("asyncrl", "jobs", "benchmarks") for path in (ROOT / top).rglob("*.py")
    ),
    ROOT / "docs" / "hooks.py",
]


IN_SANDBOX = ROOT / "asyncrl" / "rewards" / "in_sandbox.py"
"""The grader inside the sandbox. It runs the model's program, so it never runs elsewhere."""


def test_the_grader_is_only_text_outside_the_sandbox() -> None:
    texts = {path: path.read_text() for path in SOURCES}
    with_word = {path: text for path, text in texts.items() if "in_sandbox" in text}
    assert with_word
    for path, text in with_word.items():
        imported = {
            name
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in (getattr(node, "module", None), *(alias.name for alias in node.names))
        }
        assert not any("in_sandbox" in (name or "") for name in imported), path


def test_every_source_file_is_found() -> None:
    for top, least in {"asyncrl": 200, "jobs": 5, "benchmarks": 3, "docs": 1}.items():
        assert len([path for path in SOURCES if path.is_relative_to(ROOT / top)]) >= least, top
    assert ROOT / "jobs" / "quickstart" / "task.py" in SOURCES


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_call_runs_code_from_files(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            assert not names & {
                "pickle",
                "cloudpickle",
                "dill",
                "joblib",
                "marshal",
                "shelve",
            }, f"line {node.lineno}"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            given = {
                keyword.arg: getattr(keyword.value, "value", None) for keyword in node.keywords
            }
            assert (path == IN_SANDBOX and called in ("eval", "exec")) or called not in (
                "eval",
                "exec",
                "yaml.load",
                "yaml.unsafe_load",
                "yaml.full_load",
                "os.system",
            ), f"line {node.lineno}: {called}"
            assert all(given.get(name, value) is value for name, value in SAFE.items()), (
                f"line {node.lineno}: {called}"
            )
            assert called != "torch.load" or "weights_only" in given, f"line {node.lineno}"
            assert given.get("shell") is not True, f"line {node.lineno}"


# Checkpoints: only our own shards, after the manifest check


class Learner(FakeLearner):
    async def save(self, directory: Path) -> dict[str, tuple[int, int]]:
        path = directory / "zero3" / "mp_rank_00_model_states.pt"
        path.parent.mkdir()
        path.write_bytes(b"ours")
        return {str(path.relative_to(directory)): size_and_checksum(path)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    with RunDirectory(config(tmp_path)) as directory:
        state = replace(directory.state, version=2, steps_attempted=2, frontier=8)
        return asyncio.run(
            directory.checkpoints.write(state, [], Learner(1), FakeScores(FakeRollouts()))
        )


def refused_resume(root: Path, text: str) -> None:
    for resume in ("auto", "must"):
        with pytest.raises(ConfigError, match=text):
            RunDirectory(config(root, resume=resume))


def test_a_shard_that_was_replaced_is_never_loaded(
    tmp_path: Path, checkpoint: Path, marker: Path
) -> None:
    (checkpoint / "learner" / "zero3" / "mp_rank_00_model_states.pt").write_bytes(
        pickle.dumps(Touch(marker))
    )
    refused_resume(tmp_path, "is damaged: learner/zero3/mp_rank_00_model_states.pt")


def test_a_shard_that_was_added_is_never_loaded(
    tmp_path: Path, checkpoint: Path, marker: Path
) -> None:
    """DeepSpeed looks for shards by pattern, so it would find this one."""
    (checkpoint / "learner" / "zero3" / "mp_rank_01_model_states.pt").write_bytes(
        pickle.dumps(Touch(marker))
    )
    refused_resume(
        tmp_path,
        "has files that its MANIFEST does not list, first learner/zero3/mp_rank_01_model_states.pt",
    )


def test_a_shard_behind_a_link_is_never_loaded(tmp_path: Path, checkpoint: Path) -> None:
    """The content may be right during the check and different during the load."""
    shard = checkpoint / "learner" / "zero3" / "mp_rank_00_model_states.pt"
    (tmp_path / "elsewhere").write_bytes(shard.read_bytes())
    shard.unlink()
    shard.symlink_to(tmp_path / "elsewhere")
    refused_resume(tmp_path, "is a symbolic link")


def test_a_rank_file_that_runs_code_is_refused(tmp_path: Path, marker: Path) -> None:
    from asyncrl.learning.engine.checkpoint import load_rank

    (tmp_path / "counters.json").write_text('{"world_size": 1}')
    (tmp_path / "rank_0.pt").write_bytes(pickle.dumps(Touch(marker)))
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        load_rank(None, tmp_path, 0, 1, 3, tmp_path)


# Names and paths


@pytest.mark.parametrize(
    "name", ["../x", "..", ".", "", "a/b", "/etc", "a\n", "a\x00", "-rf", ".hidden", "ä", "x" * 65]
)
def test_names_stay_in_the_root(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="a name is 1 to 64 letters"):
        config(tmp_path, name=name)
    with pytest.raises(ValueError, match="attach"):
        config(tmp_path, generator={"attach": name})


@pytest.mark.parametrize(
    "entry",
    [
        "",
        "checkpoints",
        "groups",
        "logs",
        "config.yaml",
        ".run.json",
        "metrics.jsonl",
        "logs/attempt_1",
        "checkpoints/.LATEST",
    ],
)
def test_a_link_does_not_lead_a_run_out_of_its_directory(tmp_path: Path, entry: str) -> None:
    outside, root = tmp_path / "outside", tmp_path / "runs"
    outside.mkdir()
    root.mkdir()
    if entry:
        (root / "run" / entry).parent.mkdir(parents=True)
    (root / "run" / entry).symlink_to(outside)
    for resume in ("never", "auto"):
        with pytest.raises(ConfigError, match="is a symbolic link"):
            RunDirectory(config(root, resume=resume))
    assert list(outside.iterdir()) == []


def test_a_link_in_shared_memory_is_not_followed(tmp_path: Path) -> None:
    from asyncrl.weights.staging import _new_file

    victim, link = tmp_path / "victim", tmp_path / "asyncrl-id-0-1-7.weights"
    victim.write_text("precious")
    link.symlink_to(victim)
    with pytest.raises(FileExistsError):
        _new_file(str(link), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("run_id", ["../x", "a/../../etc/x", "/etc/x"])
def test_a_manifest_does_not_name_a_staging_file_elsewhere(tmp_path: Path, run_id: str) -> None:
    from asyncrl.contracts.messages import Manifest
    from asyncrl.weights.staging import StagingError, fetch_version

    (tmp_path / "shm").mkdir()
    with pytest.raises(StagingError, match="would be outside"):
        fetch_version(Manifest(run_id, 0, 1, (), (), (), ()), {}, 1.0, tmp_path / "shm")
    assert list((tmp_path / "shm").iterdir()) == []


# YAML, data and import paths


def test_yaml_makes_no_objects(tmp_path: Path, marker: Path) -> None:
    evil = (
        "!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.PosixPath"
        f" [{str(marker)!r}]]"
    )
    path = tmp_path / "config.yaml"
    path.write_text(f"name: {evil}\n")
    with pytest.raises(ConfigError, match="cannot be used as YAML"):
        load_config(path)
    with pytest.raises(ConfigError, match="cannot be used as YAML"):
        _ = open_run(tmp_path).config


def test_a_dataset_runs_no_code(tmp_path: Path, marker: Path) -> None:
    """Once ray.data is imported, reading a value of a column with Ray's object type unpickles
    it."""
    from ray.data._internal.object_extensions.arrow import ArrowPythonObjectType

    from asyncrl.data.sources import read_sources

    kind = ArrowPythonObjectType()
    column = pa.ExtensionArray.from_storage(
        kind, pa.array([pickle.dumps(Touch(marker))], kind.storage_type)
    )
    nested = pa.ListArray.from_arrays(pa.array([0, 1]), column)
    for name, values in (("plain", column), ("nested", nested)):
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table({"prompt": ["1 + 1 ="], "extra": values}), path)
        with pytest.raises(ConfigError, match="extension type, which may run code"):
            read_sources(str(path)).table.to_pylist()


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{this}: &{this} [{', '.join([f'*{before}'] * 10)}]\n"
    for before, this in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (BOMB, "it has more than 100,000 values, those of its aliases included"),
        ("name: &a [*a]\n", "an alias is inside the value that it names"),
        ("name: " + "[" * 600 + "]" * 600, "nested more than 64 deep"),
        ("name: " + "[" * 100 + "]" * 100, "more than 64 deep"),
        ("name: " + "[" * 100_000, "more than 64 deep"),
        ("# " + "x" * (5 << 20), "characters, above"),
        ("[" + "a," * 100_001 + "]", "it has more than 100,000 values"),
        ("%TAG !a! x\n" * 9 + "---\na: 1", "more than 8 lines that begin with %"),
        ("seed: " + "9" * 5000, "a number has 5,000 digits"),
        ("seed: 0x" + "f" * 5000, "digits, above 100"),
        ("seed: 2001-99-99", "a value cannot be read"),
        ("seed: !!timestamp x", "a value cannot be read"),
        ("seed: !!bool x", "a value cannot be read"),
        ('seed: !!int ""', "a value cannot be read"),
        ('name: "\\U00110000"', "a value cannot be read"),
        ('name: "\\ud800"', "half of a surrogate pair"),
    ],
    ids=[
        "bomb",
        "endless",
        "too deep to parse",
        "too deep",
        "too deep for libyaml",
        "too long",
        "too many",
        "directives",
        "long",
        "hex",
        "date",
        "time",
        "flag",
        "empty number",
        "no character",
        "half",
    ],
)
def test_a_yaml_file_that_expands_or_nests_too_far_is_refused(
    tmp_path: Path, text: str, reason: str
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        load_config(path)
    with pytest.raises(ConfigError, match=reason):
        _ = open_run(tmp_path).config


def test_a_few_yaml_aliases_are_fine(tmp_path: Path) -> None:
    from asyncrl.runtime.files.yaml_files import parse_yaml

    assert parse_yaml("a: &a {x: 1}\nb: [*a, *a]\nc: {<<: *a, y: 2}") == {
        "a": {"x": 1},
        "b": [{"x": 1}, {"x": 1}],
        "c": {"x": 1, "y": 2},
    }


def test_a_config_that_is_a_pipe_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match="is a named pipe"):
        load_config(tmp_path / "config.yaml")


def test_import_paths_come_from_the_config_alone(
    tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that names a function in its columns reaches the reward as data only."""
    from asyncrl.data.rendering import read_prompt_rows
    from asyncrl.rewards.contract import GroupCall, call_reward

    (tmp_path / "evil_reward.py").write_text(f"open({str(marker)!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    names = (
        "function",
        "function_path",
        "reward_function",
        "import_path",
        "environment",
        "__class__",
        "auto_map",
    )
    row = {"prompt": "1 + 1 =", "answer": "2", **dict.fromkeys(names, "evil_reward:run")}
    pq.write_table(
        pa.table({name: [value] for name, value in row.items()}), tmp_path / "train.parquet"
    )
    table = read_prompt_rows(
        str(tmp_path / "train.parquet"), data_spec(config(tmp_path)), "data.train"
    ).table
    (columns,) = table.drop_columns(["prompt"]).to_pylist()
    assert call_reward(
        "asyncrl.rewards.builtin:exact_match", GroupCall(["1 + 1 ="], ["2"], [(5,)], columns)
    ).rewards == [1.0]
    for path in (
        "evil_reward",
        "evil_reward:run()",
        "os;evil_reward:run",
        "../evil_reward:run",
        "evil_reward:a.b",
    ):
        with pytest.raises(ValueError, match=r"function"):
            config(tmp_path, reward={"functions": {"exact": {"function": path}}})


# Secrets


def test_secrets_stay_out_of_config_dumps(tmp_path: Path, secret: str) -> None:
    from asyncrl.observe import sinks

    hiding = config(
        tmp_path,
        data={
            "train": f"/data/{secret}/train.parquet",
            "max_prompt_length": 20,
            "prompt_column": f"of {secret}",
        },
    )
    with RunDirectory(hiding) as directory:
        written = (directory.path / "config.yaml").read_text()
    assert "[redacted ASYNCRL_API_KEY]" in written and secret not in written
    assert secret not in json.dumps(hiding.dump())
    source = (Path(sinks.__file__)).read_text() + (
        ROOT / "asyncrl" / "preflight" / "plan" / "plan.py"
    ).read_text()
    assert "model_dump(" not in source.replace("correction.model_dump(", ""), (
        "use `dump()` to show a config"
    )


def test_secrets_stay_out_of_metrics(tmp_path: Path, secret: str) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(
            "alarm", 1, 1, {"alarm": f"key {secret}", "nested": {"note": [f"Bearer {secret}"]}}
        )
    (record,) = read_metrics(tmp_path)
    assert secret not in json.dumps(record) and record["alarm"] == "key [redacted ASYNCRL_API_KEY]"


def test_secrets_stay_out_of_logs(secret: str) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(RedactingFormatter("%(message)s"))
    logger = logging.Logger("test")
    logger.addHandler(handler)
    try:
        raise RuntimeError(f"https://user:{secret}@tracking.example refused {secret}")
    except RuntimeError:
        logger.exception("with %s", f"Authorization: Bearer {secret}")
    assert secret not in stream.getvalue() and "tracking.example refused" in stream.getvalue()


def test_ray_logs_are_kept_without_secrets(tmp_path: Path, secret: str) -> None:
    from asyncrl.run.across_attempts import _keep_logs

    (tmp_path / "session").mkdir()
    (tmp_path / "session" / "worker.err").write_bytes(b"\xff said " + secret.encode())
    _keep_logs(tmp_path / "session", tmp_path / "kept")
    assert (
        (tmp_path / "kept" / "worker.err").read_text().endswith("said [redacted ASYNCRL_API_KEY]")
    )


@pytest.mark.parametrize(
    "texts",
    [
        [],
        [""],
        ["plain", "", "api_key=abcdef123456", "key at the end: token=hunter22"],
        # A secret that seems to reach into the next text, and texts with the separator.
        ["-----BEGIN RSA PRIVATE KEY-----abc", "innocent", "def-----END RSA PRIVATE KEY-----"],
        ["a\n\x00", "\n\x00\nb", "\x00", "-----BEGIN PRIVATE KEY-----", "x-----END"],
        ["https://user:", "hunter22@host"],
    ],
)
def test_texts_are_redacted_together_as_alone(texts: list[str]) -> None:
    assert redact_all(texts) == [redact(text) for text in texts]


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://me:hunter22@db.example/x",
        "Authorization: Bearer abcdef123456",
        "OPENAI sk-abcdefghijklmnop1234",
        "token hf_abcdefghijklmnopqrst",
        "https://x.example/?api_key=hunter22&y=1",
        "password=hunter22",
    ],
)
def test_text_that_looks_like_a_secret_is_redacted(text: str) -> None:
    assert "[redacted]" in redact(text)
    assert not any(part in redact(text) for part in ("hunter22", "abcdef"))


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Basic aHVudGVyOmh1bnRlcjI=",
        "X-Api-Key: hunter22",
        "{'api_key': 'hunter22'}",
        '{"password": "hunter22"}',
        "mysql://me:hunt@hunter22@db.example/x",
        "https://hunter22@db.example/x",
        "gho_hunter22hunter22hunter22",
        "github_pat_11hunter22hunter22_hunter22",
        "xoxp-123456789012-hunter22hunter22",
        "AKIAHUNTER22HUNTER22",
        "eyJhunter22.eyJhunter22.hunter22",
        "bearer\thunter22",
        "-----BEGIN RSA PRIVATE KEY-----\nhunter22\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_more_text_that_looks_like_a_secret_is_redacted(text: str) -> None:
    assert "[redacted]" in redact(text) and not re.search(
        "hunter22|aHVudGVy", redact(text), re.IGNORECASE
    ), redact(text)


def test_variables_with_secrets_are_found_by_name() -> None:
    variables = {
        "OPENAI_API_KEY": "sk-x",
        "HF_TOKEN": "hf",
        "DB_PASSWORD": "p4",
        "EMPTY_TOKEN": "",
        "USE_AUTH": "false",
        "PWD": "/here",
        "HOME": "/root",
        "KEYBOARD": "de",
    }
    assert secret_names(variables) == ["DB_PASSWORD", "HF_TOKEN", "OPENAI_API_KEY"]


@pytest.mark.parametrize("value", ["p@ss w0rd/+é!x", "abcdefgh12345678", "first line\nsecond line"])
def test_a_secret_is_redacted_in_every_encoding(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", value)
    content = value.encode()
    forms = [
        json.dumps(json.dumps({"a": value})),
        quote(value),
        quote_plus(value),
        quote(value, safe="").lower(),
        content.hex(),
        *value.splitlines(),
    ]
    forms += [
        base64.b64encode(b"x" * before + content + b"y" * after).decode()
        for before in range(4)
        for after in range(4)
    ]
    for form in forms:
        assert "[redacted WANDB_API_KEY]" in redact(f"with {form} there"), form


@pytest.mark.parametrize(
    "name",
    [
        "refreshToken",
        "privateKey",
        "Authorization",
        "PROXY_AUTH",
        "SENTRY_DSN",
        "TLS_PEM",
        "session_cookie",
    ],
)
def test_values_under_names_of_secrets_are_redacted(name: str) -> None:
    assert redact_tree({name: ["a", {"b": "c"}, 5]}) == {
        name: ["[redacted]", {"b": "[redacted]"}, 5]
    }


@pytest.mark.parametrize(
    "text",
    [
        "basic arithmetic",
        "a token: then",
        "keys of the monkey",
        "http://host/a@b",
        "the password is wrong",
        "version 1.2.3",
    ],
)
def test_plain_words_are_kept(text: str) -> None:
    assert redact(text) == text


def test_a_secret_in_a_name_is_redacted(secret: str) -> None:
    assert redact_tree({secret: 1, "monkey": "x", "max_tokens": 5}) == {
        "[redacted ASYNCRL_API_KEY]": 1,
        "monkey": "x",
        "max_tokens": 5,
    }


@pytest.mark.parametrize(
    "name",
    [
        "PGPASSWORD",
        "DB_PWD",
        "GITHUB_PAT",
        "API_KEY_2",
        "TOKEN1",
        "SMTP_PASS",
        "clientSecret",
        "WANDB_API_KEY",
    ],
)
@pytest.mark.parametrize(
    "value", ["hunter2", "a+b/c", "4711", 'say "so"\\now', "schlüssel", "it's here"]
)
def test_variables_of_these_names_are_secret_in_every_form(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    for text in (
        f"with {value}.",
        json.dumps({"x": value}),
        repr(value),
        yaml.safe_dump({"x": value}),
        json.dumps(value, ensure_ascii=False),
    ):
        assert f"[redacted {name}]" in redact(text) and value not in redact(text), text
    assert redact_tree({name: "anything"}) == {name: "[redacted]"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PWD", "work"),
        ("OLDPWD", "work"),
        ("MY_TOKEN", "true"),
        ("X_KEY", "k"),
        ("TOKENIZERS", "work"),
        ("PATH_X", "work"),
    ],
)
def test_other_variables_are_kept(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert redact(f"a {value} b") == f"a {value} b"


def test_a_short_secret_is_redacted_only_as_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DB_PWD", "run")
    assert redact("running run, rerun") == "running [redacted DB_PWD], rerun"


def test_only_values_under_names_of_secrets_are_redacted() -> None:
    assert redact_tree(
        {"api_key": "x", "wandb": {"token": "y"}, "monkey": "z", "tokens": ["a"]}
    ) == {
        "api_key": "[redacted]",
        "wandb": {"token": "[redacted]"},
        "monkey": "z",
        "tokens": ["a"],
    }
    shipped = load_config(ROOT / "jobs" / "quickstart" / "quickstart.yaml")
    assert shipped.dump() == shipped.model_dump(mode="json")


# Model text


def harmless(text: str) -> bool:
    return not any(character in text for character in "\x1b\x07\r\u202e\x9b")


@pytest.mark.parametrize("live", [False, True])
def test_model_text_cannot_act_on_a_terminal(live: bool) -> None:
    stream = io.StringIO()
    with ProgressView(stream=stream, live=live) as view:
        view.show(
            Progress(HOSTILE, max_steps=3, prompt=HOSTILE, completion=HOSTILE, notes=(HOSTILE,))
        )
    text = stream.getvalue()
    assert (
        "\x1b[2J" not in text
        and "\x1b]0" not in text
        and "\x07" not in text
        and "\u202e" not in text
    )
    assert "[bold red]" in text, "markup is shown and not applied"


def test_an_error_that_quotes_model_text_cannot_act_on_a_terminal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from asyncrl import commands
    from asyncrl.run import supervise as run

    assert harmless(run._one_line(RuntimeError(HOSTILE))) and harmless(shown(HOSTILE))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree(tmp_path, prompt=HOSTILE)))
    assert commands.run("plan", str(tmp_path / "config.yaml"), [HOSTILE]) == 2
    assert harmless(capsys.readouterr().err)


@pytest.mark.parametrize("command", ["plan", "audit", "export"])
def test_names_of_files_and_columns_cannot_act_on_a_terminal(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from asyncrl import cli

    root = tmp_path / "a\x1b[2Jb"
    root.mkdir()
    pq.write_table(pa.table({"c\x1b[2J": ["x"]}), root / "train.parquet")
    (root / "config.yaml").write_text(yaml.safe_dump(tree(root)))
    with pytest.raises(SystemExit) as ended:
        cli.main([command, str(root / "config.yaml") if command == "plan" else str(root)])
    printed = capsys.readouterr()
    assert (
        ended.value.code == 2
        and ("�[2J" in printed.err or r"\x1b[2J" in printed.err)
        and harmless(printed.out + printed.err)
    )


def test_model_text_is_not_html() -> None:
    """Notebooks show model output as pandas tables, which escape it. asyncrl's code writes no HTML,
    and does not turn the escaping off."""
    ours = [
        path
        for folder in ("asyncrl", "notebooks", "jobs")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".ipynb")
    ]
    assert len(ours) > 100 and not [
        path
        for path in ours
        if re.search(r"\bHTML\(|to_html|escape ?= ?False|display\.Markdown", path.read_text())
    ]
    table = pa.table({"completion": [HOSTILE], "prompt_text": ["<img src=x onerror=alert(1)>"]})
    page = table.to_pandas()._repr_html_()
    assert "<script>" not in page and "<img" not in page and "&lt;script&gt;" in page


def test_a_cluster_without_a_token_needs_a_setting_and_gives_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:

    monkeypatch.setattr(cluster, "is_token_auth_enabled", lambda: False)
    with pytest.raises(
        RuntimeError,
        match="ray_without_token: true accepts a cluster that is open to everyone who reaches its",
    ):
        cluster._refuse_open_ray()
    cluster._refuse_open_ray(allowed=True)
    assert (
        "everyone who reaches this cluster's ports can run code on its machines"
        in capsys.readouterr().err
    )
