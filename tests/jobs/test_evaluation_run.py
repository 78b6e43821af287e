"""A whole run on two real replicas: one evaluates, and training continues with the other."""

from collections import Counter

import pytest

import asyncrl


@pytest.mark.slow
def test_a_run_without_steps_only_evaluates(start_run, tmp_path):
    run = start_run({"max_steps": 0, "eval.sets": {"many": {"n": 4, "temperature": 0.8}}})
    assert run.wait(400) == 0, run.output
    finished = asyncrl.open_run(tmp_path / "runs" / "run")
    (evaluation,) = finished.records("evaluation")
    assert evaluation["version"] == 0 and 0 <= evaluation["eval/many_pass_at_4"] <= 1
    assert len(finished.evaluations()) == 16 * (1 + 1 + 4)
    assert finished.records("step") == [] and len(finished.groups()) == 0
    assert finished.status().state == "finished"
    again = start_run(
        {"max_steps": 0, "eval.sets": {"many": {"n": 4, "temperature": 0.8}}},
        "--resume",
        "auto",
        starts_engine=False,
    )
    assert again.wait(100) == 0 and "finished" in again.output
    assert run.gone() == []


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_the_learner_does_not_wait_for_an_evaluation(start_run, tmp_path):
    """Micro-batches of one or two trajectories make the learner the slow part, so it could only
    wait for the evaluation."""
    long = {"n": 16, "temperature": 0.8, "max_completion_length": 300}
    run = start_run(
        {
            "max_steps": 12,
            "rollout.rollout_batch_size": 8,
            "rollout.n_samples_per_prompt": 8,
            "learner.max_tokens_per_gpu": 18,
            "generator.num_replicas": 2,
            "eval.every_steps": 4,
            "eval.sets": {"long": long},
            "checkpoint.every_steps": 0,
            "weights.check_every_versions": 0,
        }
    )
    assert run.wait(800) == 0, run.output
    finished = asyncrl.open_run(tmp_path / "runs" / "run")
    evaluations, commits, rows = (
        finished.records("evaluation"),
        finished.records("commit"),
        finished.evaluations().to_pylist(),
    )
    assert len(evaluations) >= 3
    assert (evaluations[0]["version"], evaluations[-1]["version"]) == (0, 12)
    for record in evaluations:
        mine = [row for row in rows if row["version"] == record["version"]]
        assert Counter(row["set"] for row in mine) == {"greedy": 16, "sampled": 16, "long": 256}
        assert {row["status"] for row in mine} == {"ok"}
        assert all(
            [span["version"] for span in row["versions"]] == [record["version"]] for row in mine
        )
        assert 0 <= record["eval/long_pass_at_1"] <= record["eval/long_pass_at_16"] <= 1
    # The first evaluation begins before there is a batch. During the last, nothing is trained.
    for record in evaluations[1:-1]:
        began = record["time"] - record["eval/seconds"]
        waited = sum(
            step["time/learner_waited_s"]
            for step in finished.records("step")
            if began < step["time"] <= record["time"]
        )
        meanwhile = [commit for commit in commits if began + 1 < commit["time"] < record["time"]]
        print(
            f"version {record['version']}: {record['eval/seconds']:.1f} s, of which the learner"
            f" waited {waited:.3f} s; {len(meanwhile)} versions committed"
        )
        assert waited <= 0.05 * record["eval/seconds"]
        assert len({row["replica"] for row in rows if row["version"] == record["version"]}) == 1
        assert any(commit["weights/replicas"] == 1 for commit in meanwhile)
    assert run.gone() == []
