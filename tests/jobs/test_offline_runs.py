"""Runs on a dataset through the command line: a rank that dies, and pairs that a run recorded."""

import pytest

import asyncrl
from asyncrl.run.audit import audit, audit_text
from asyncrl.rundir.record import read_record


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_a_rank_that_dies_is_started_again_and_no_row_is_lost(sft, start_config, tmp_path):
    directory = tmp_path / "runs" / "run"

    def steps():
        return (
            asyncrl.open_run(directory).records("step")
            if (directory / "metrics.jsonl").exists()
            else []
        )

    run = start_config(sft)
    run.until(lambda: len(steps()) >= 50)
    run.having("ray::RankProcess")[0].kill()
    assert run.wait() == 0, run.output
    assert run.output.count("a new attempt starts automatically") == 1
    assert run.gone() == [] and run.left_in_shared_memory() == []
    found = asyncrl.open_run(directory)
    checks = audit(found)
    assert all(check.passed for check in checks), audit_text(checks)
    attempts = read_record(directory)["attempts"]
    assert len(attempts) == 2 and attempts[1]["frontier"] == 16 * attempts[1]["version"] > 0
    losses = [record["eval/loss"] for record in found.records("evaluation")]
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_dpo_trains_the_groups_that_a_run_recorded(sft, start_run, start_config, tmp_path):
    """`asyncrl train` samples with learning rate 0, and `asyncrl dpo` trains its groups."""
    samples = start_run({"learner.learning_rate": 0.0, "max_steps": 4, "eval": {}}, name="samples")
    assert samples.wait() == 0, samples.output
    recorded = tmp_path / "runs" / "samples" / "groups" / "*.parquet"
    settings = {name: value for name, value in sft.items() if name != "eval"}
    run = start_config(
        {
            **settings,
            "name": "dpo",
            "objective": "dpo",
            "max_steps": 6,
            "batch_size": 4,
            "data": {"train": str(recorded), "max_length": 20},
        }
    )
    assert run.wait() == 0, run.output
    assert "scoring with the reference policy" in run.output
    found = asyncrl.open_run(tmp_path / "runs" / "dpo")
    steps = found.records("step")
    assert len(steps) == 6 and steps[0]["pref/margin"] == pytest.approx(0.0, abs=1e-5)
    checks = audit(found)
    assert all(check.passed for check in checks), audit_text(checks)
