"""Whole runs on real parts, as a user starts them."""

import os
from pathlib import Path

import nbformat
import pyarrow.parquet as pq
import pytest
from nbclient import NotebookClient

import asyncrl

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "01_quickstart.ipynb"


def events(directory, event):
    return asyncrl.open_run(directory).records(event) if (directory / "metrics.jsonl").exists() else []


def execute_notebook(directory, folder, monkeypatch):
    monkeypatch.setenv("ASYNCRL_RUN", str(directory))
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute(env=dict(os.environ))
    return "".join(output.text for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs if output.output_type == "stream")


@pytest.mark.timeout(900)
def test_a_run_end_to_end_and_the_notebook_beside_it(start_run, shared_memory, tmp_path, monkeypatch):
    before, directory = shared_memory(), tmp_path / "runs" / "run"
    unhurried = {"function": "rewards_for_runs:unhurried", "weight": 0.0}  # so that the notebook finds the run alive
    run = start_run({"max_steps": 120, "checkpoint.every_steps": 60, "reward.functions.unhurried": unhurried, "eval.accuracy": "exact"})
    run.until(lambda: len(events(directory, "commit")) >= 3)
    live = execute_notebook(directory, tmp_path, monkeypatch)
    versions = [int(word) for word in live.split("committed version ")[2].split(",")[0].split(" -> ")]
    assert versions[0] < versions[1], live
    assert run.wait() == 0, run.output
    assert run.gone() == [] and shared_memory() <= before
    assert "held-out greedy accuracy" in run.output and "--resume must" in run.output
    assert "INFO" not in run.output and "WARNING" not in run.output

    finished = asyncrl.open_run(directory)
    trained = [fate for fate in finished.fates().to_pylist() if fate["outcome"] == "trained"]
    assert len(trained) == 120 * 4 and len({fate["ordinal"] for fate in trained}) == len(trained)
    trajectories = finished.trajectories().to_pylist()
    assert max(row["trained_at_version"] - row["oldest_version"] for row in trajectories if row["outcome"] == "trained") <= 2
    assert sum(fate["staleness"] for fate in trained if fate["trained_at_version"] >= 3) / len(trained) > 0.5
    assert max(record["check/logprob_max_diff"] for record in finished.records("logprob_check")) <= 1e-4
    assert len(finished.records("logprob_check")) > 3
    assert [record["version"] for record in finished.records("evaluation")] == [0, 120]
    assert pq.read_table(next((directory / "groups").glob("*.parquet"))).num_rows > 0
    assert sorted(path.name for path in (directory / "checkpoints").iterdir()) == ["LATEST", "step_000060", "step_000120"]
    assert "committed version 120 -> 120" in execute_notebook(directory, tmp_path, monkeypatch)

    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(directory / "hf")
    AutoTokenizer.from_pretrained(directory / "hf")


@pytest.mark.timeout(120)
def test_bad_input_costs_nothing(start_run, tmp_path):
    run = start_run({"data.prompt_column": "question_text"}, starts_engine=False)
    assert run.wait() == 2
    assert len(run.output.strip().splitlines()) == 1 and "question_text" in run.output
    assert not (tmp_path / "runs").exists()
