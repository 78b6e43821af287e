"""A learner that dies in a whole run is started again, and the engines keep running if they can."""

import signal

import pytest

import asyncrl
from asyncrl.run.audit import audit, audit_text
from asyncrl.rundir.record import read_record


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_engines_outlive_the_death_of_a_rank_and_restart_if_they_died_too(
    start_run, tmp_path, engine_starts
):
    directory = tmp_path / "runs" / "run"

    def records(event, attempt):
        found = (
            asyncrl.open_run(directory).records(event)
            if (directory / "metrics.jsonl").exists()
            else []
        )
        return [record for record in found if record["attempt"] == attempt]

    def reached(attempt, steps):
        commits = records("commit", attempt)
        return commits and commits[-1]["version"] >= commits[0]["version"] + steps

    # `keep` does not clear the prefix cache at an update. The checkpoint's version must not use
    # entries of the same version in another attempt.
    run = start_run(
        {
            "max_steps": 200,
            "checkpoint.every_steps": 5,
            "generator.in_flight": "keep",
            "weights.check_every_versions": 1,
            "eval": {},
        }
    )
    run.until(lambda: reached(0, 7))
    [engine] = run.having("VLLM::EngineCore")
    run.having("ray::RankProcess")[0].kill()
    run.until(lambda: reached(1, 7))
    assert run.having("VLLM::EngineCore") == [engine]
    assert (
        "its process died" in run.output
        and run.output.count("a new attempt starts automatically") == 1
    )

    engine_starts.append("the third attempt of the run whose learner and engine die together")
    [rank] = run.having("ray::RankProcess")
    for process in (*run.having("ray::ServeReplica"), engine, rank):
        process.kill()
    run.until(lambda: reached(2, 3))
    assert (
        engine not in run.having("VLLM::EngineCore")
        and run.output.count("a new attempt starts automatically") == 2
    )
    run.stop(signal.SIGTERM)
    assert run.wait() == 130, run.output
    assert run.gone() == [] and run.left_in_shared_memory() == []

    attempts = read_record(directory)["attempts"]
    assert len(attempts) == 3 and attempts[1]["version"] >= 5
    replicas = [{record["replica"] for record in records("push", attempt)} for attempt in range(3)]
    assert replicas[0] == replicas[1] and len(replicas[0]) == 1 and not replicas[2] & replicas[0]
    assert records("push", 1)[0]["version"] == attempts[1]["version"], (
        "the checkpoint's version is published first"
    )
    startup = [records("startup", attempt)[0]["startup/generators_s"] for attempt in range(3)]
    print(f"seconds until the generators of each attempt answer: {startup}")
    assert startup[1] < startup[0] / 10
    assert (
        max(
            record["check/logprob_max_diff"]
            for attempt in range(3)
            for record in records("logprob_check", attempt)
        )
        <= 1e-4
    )
    checks = audit(asyncrl.open_run(directory))
    assert all(check.passed for check in checks), audit_text(checks)
