"""Every sink with its real library, offline. Each has its own process, because the libraries keep
state in modules and folders."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.observe.sinks import Background

SCRIPT = """
import sys
from pathlib import Path
from asyncrl.config import load_config
from asyncrl.rundir.metrics import MetricsWriter
from asyncrl.observe.sinks import SinkRun, open_sinks

directory, sink = Path(sys.argv[1]), sys.argv[2]
config = load_config(Path("jobs/quickstart/quickstart.yaml"), ["--name", "sunk", "--observe.sinks",
    f'["{sink}"]', "--observe.project", "tests"])
run = SinkRun("tests", config.name, sys.argv[3], directory, config.dump())
with MetricsWriter(directory, 0, open_sinks(config.observe.sinks, run)) as writer:
    for step in (1, 2, 3):
        writer.write("step", step, step, {"reward/mean": step / 4, "note": "text"})
    writer.write("evaluation", 3, 3, {"eval/greedy_accuracy": 0.75})
    rows = [
        {"prompt": "2 + 2 =", "completion": "five hundred", "reward": None, "reward/exact": 0.0},
        {"prompt": "1", "completion": "1", "reward": 1.0, "reward/exact": None},
    ]
    writer.show_batch(3, {"rewards": [0.0, 1.0, 1.0], "staleness": [0.0, 1.0]}, rows)
    writer.show_batch(4, {}, rows[1:])
"""


def write(directory: Path, sink: str, run_id: str = "id0", **environment: str) -> None:
    before = set(Path.cwd().iterdir())
    folders = {"HOME": str(directory), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(directory), sink, run_id],
        capture_output=True,
        text=True,
        timeout=120,
        env=folders | environment,
    )
    assert done.returncode == 0 and "failed" not in done.stderr, done.stderr
    assert list((directory / "tensorboard").iterdir()) and before == set(Path.cwd().iterdir()), (
        "something was written to the working directory"
    )


@pytest.mark.timeout(180)
def test_wandb_offline(tmp_path: Path) -> None:
    write(tmp_path, "wandb", WANDB_MODE="offline")
    (file,) = tmp_path.glob("wandb/offline-run-*-id0/run-id0.wandb")
    content = file.read_bytes()
    assert (
        b"reward/mean" in content
        and b"eval/greedy_accuracy" in content
        and b"max_staleness" in content
    )
    parts = sorted(tmp_path.glob("wandb/offline-run-*/files/media/table/completions*.json"))
    assert [json.loads(part.read_text())["data"] for part in parts] == [
        [[3, "2 + 2 =", "five hundred", None, 0.0], [3, "1", "1", 1.0, None]],
        [[4, "1", "1", 1.0, None]],
    ]
    assert b"histogram" in content and b"staleness" in content


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_mlflow_in_a_file(tmp_path: Path) -> None:
    write(tmp_path, "mlflow")
    rows = (
        sqlite3.connect(tmp_path / "mlflow.db")
        .execute("select key, value, step from metrics order by timestamp, step")
        .fetchall()
    )
    assert list((tmp_path / "mlartifacts").rglob("config.yaml"))
    assert rows == [
        ("reward/mean", 0.25, 1),
        ("reward/mean", 0.5, 2),
        ("reward/mean", 0.75, 3),
        ("eval/greedy_accuracy", 0.75, 3),
    ]
    (table,) = tmp_path.glob("mlartifacts/**/completions/step_000003.json")
    assert json.loads(table.read_text())["data"][0] == [3, "2 + 2 =", "five hundred", None, 0.0]
    (rewards,) = tmp_path.glob("mlartifacts/**/rewards/step_000003.json")
    assert json.loads(rewards.read_text()) == {"values": [0.0, 1.0, 1.0]}
    for again in ("id0", "id1"):
        write(tmp_path, "mlflow", again)
    runs = (
        sqlite3.connect(tmp_path / "mlflow.db").execute("select name, status from runs").fetchall()
    )
    assert runs == [("sunk", "FINISHED")] * 2, (
        "a second attempt continues its run; another run of the same name is separate"
    )


@pytest.mark.timeout(180)
def test_trackio_here(tmp_path: Path) -> None:
    write(tmp_path, "trackio", TRACKIO_DIR=str(tmp_path / "trackio"))
    (file,) = (tmp_path / "trackio").glob("tests*.db")
    rows = sqlite3.connect(file).execute("select step, metrics from metrics order by id").fetchall()
    assert (
        [step for step, _ in rows] == [1, 2, 3, 3, 3, 3, 3, 4]
        and "five hundred" in str(rows)
        and "histogram" in str(rows)
    )
    assert json.loads(rows[2][1]) == {"reward/mean": 0.75} and "greedy_accuracy" in str(rows[3][1])


def test_a_sink_that_fails_is_named_and_dropped_and_the_others_continue(
    caplog: pytest.LogCaptureFixture,
) -> None:
    got: list[int] = []

    class Good:
        def add(self, step: int, now: float, scalars: object) -> None:
            got.append(step)

        def close(self, failed: bool = False) -> None:
            got.append(-1)

    class Bad(Good):
        def add(self, step: int, now: float, scalars: object) -> None:
            raise ConnectionError("no such host")

    def never() -> Good:
        raise ValueError("no key")

    background = Background({"never": never, "bad": Bad, "good": Good})
    for step in (1, 2):
        background.add(step, 0.0, {"loss": 1.0})
    background.close()
    assert got == [1, 2, -1]
    assert [record.message for record in caplog.records] == [
        "the sink never failed and gets no more metrics: ValueError: no key",
        "the sink bad failed and gets no more metrics: ConnectionError: no such host",
    ]


def test_wandb_without_a_key_is_noticed_before_it_asks(tmp_path):
    from asyncrl.observe.sinks import wandb_asks_for_a_key

    sinks, home = ["wandb"], {"HOME": str(tmp_path)}
    assert wandb_asks_for_a_key(sinks, home) == "api.wandb.ai"
    assert (
        wandb_asks_for_a_key(sinks, home | {"WANDB_BASE_URL": "https://wandb.example:8080/x"})
        == "wandb.example"
    )
    for variables in (
        {"WANDB_API_KEY": "k"},
        {"WANDB_MODE": "offline"},
        {"WANDB_MODE": "disabled"},
    ):
        assert wandb_asks_for_a_key(sinks, home | variables) is None
    assert wandb_asks_for_a_key([], home) is None
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password key\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert wandb_asks_for_a_key(sinks, home) is None
    assert (
        wandb_asks_for_a_key(sinks, home | {"WANDB_BASE_URL": "https://wandb.example"})
        == "wandb.example"
    )
    (tmp_path / "broken").write_text("machine")
    assert wandb_asks_for_a_key(sinks, home | {"NETRC": str(tmp_path / "broken")}) == "api.wandb.ai"
