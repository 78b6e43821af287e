"""The notebooks run unchanged on a finished run directory, without a cluster."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import nbformat
import pytest
from executed_notebook import NOTEBOOKS, executed, kinds, printed
from small_run import write_small_run

RECORDED = Path(__file__).parent / "recorded"


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_first_notebook_reads_a_run(tmp_path: Path) -> None:
    outputs = executed(NOTEBOOKS[0], tmp_path, ASYNCRL_RUN=str(write_small_run(tmp_path / "small")))
    text = printed(outputs)
    assert "learner at version 6, replicas have committed version 6" in text
    assert "24 trained trajectories, staleness at most 1, bound 2" in text
    assert {"text/html", "image/svg+xml"} <= kinds(outputs)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_relative_path_and_a_run_without_the_learners_values(tmp_path: Path, number: int) -> None:
    """As a user starts it: the kernel's folder is not the one where JupyterLab was started."""
    run = write_small_run(tmp_path / "runs" / "small")
    shutil.rmtree(run / "trained")
    (tmp_path / "notebooks").mkdir()
    outputs = executed(NOTEBOOKS[number], tmp_path / "notebooks", ASYNCRL_RUN="runs/small")
    assert any("Run(" in str(output) for output in outputs)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_second_notebook_tries_a_reward_and_an_environment(tmp_path: Path) -> None:
    outputs = executed(NOTEBOOKS[1], tmp_path, ASYNCRL_RUN=str(write_small_run(tmp_path / "small")))
    assert "14 groups, 28 completions" in printed(outputs)
    tables = [output["data"]["text/plain"] for output in outputs if "data" in output]
    assert any("groups that teach" in table for table in tables)
    assert "1.0    1.0" in tables[-1], "the first sibling is right"


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_third_notebook_finds_why_a_run_diverged(tmp_path: Path) -> None:
    """The metrics of a whole run whose learning rate was 25 times too high."""
    run = write_small_run(tmp_path / "small")
    with (RECORDED / "diverging.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["event"] == "step"]
    common = {"schema": 1, "attempt": 0, "time": 1.0}
    lines = []
    for row in rows:
        step = int(row["step"])
        values = {name: float(text) for name, text in row.items() if text and name != "event"}
        lines.append(common | values | {"event": "step", "step": step, "version": step})
        if values["kl_k3"] > 0.1:
            alarm = {"event": "alarm", "step": step, "version": step, "alarm": "kl_k3 is high"}
            lines.append(common | alarm)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    outputs = executed(NOTEBOOKS[2], tmp_path, ASYNCRL_RUN=str(run))
    worst = max(rows, key=lambda row: float(row["kl_k3"] or 0))
    assert f"furthest from the generators at step {worst['step']}\n" in printed(outputs)
    tables = [output["data"]["text/plain"] for output in outputs if "data" in output]
    assert any("kl_k3 is high" in table for table in tables)
    assert any("99%" in table and "0.1" in table for table in tables), "ratios of tokens"


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_fourth_notebook_compares_runs(tmp_path: Path) -> None:
    runs = [write_small_run(tmp_path / name, steps) for name, steps in (("short", 4), ("long", 8))]
    config = runs[1] / "config.yaml"
    config.write_text(config.read_text().replace("max_steps: 6", "max_steps: 8"))
    outputs = executed(NOTEBOOKS[3], tmp_path, ASYNCRL_COMPARE=":".join(map(str, runs)))
    tables = [output["data"]["text/plain"] for output in outputs if "data" in output]
    (settings,) = [output["data"]["text/html"] for output in outputs if "table id" in str(output)]
    assert "max_steps" in settings and "n_samples_per_prompt" not in settings
    assert "image/svg+xml" in kinds(outputs) and "staleness" in tables[-1]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_kept_without_outputs(notebook: Path) -> None:
    for cell in nbformat.read(notebook, as_version=4).cells:
        assert cell.cell_type != "code" or (not cell.outputs and cell.execution_count is None)
