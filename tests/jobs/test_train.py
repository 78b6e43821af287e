"""Whole runs with real parts, as a user starts them."""

import contextlib
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter

import psutil
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from executed_notebook import NOTEBOOKS, executed, printed
from page_values import values_of
from transformers import AutoModelForCausalLM, AutoTokenizer

import asyncrl
from asyncrl.observe.metric_catalog import known_names
from asyncrl.page.report import write_report
from asyncrl.run.audit import Books, audit, audit_text
from asyncrl.rundir import metrics
from asyncrl.rundir.record import read_record

ASYNCRL = [sys.executable, "-m", "asyncrl.cli"]


def events(directory, event):
    return (
        asyncrl.open_run(directory).records(event) if (directory / "metrics.jsonl").exists() else []
    )


@pytest.mark.timeout(900)
def test_a_run_end_to_end_with_its_notebook(start_run, tmp_path):
    directory, read = tmp_path / "runs" / "run", tmp_path / "read"
    unhurried = {
        "function": "rewards_for_runs:unhurried",
        "weight": 0.0,
    }  # so that the run is still alive when the notebook reads it
    run = start_run(
        {
            "max_steps": 40,
            "checkpoint.every_steps": 20,
            "reward.functions.unhurried": unhurried,
            "eval.accuracy": "digits",
        },
        HURRY=str(read),
    )
    run.until(lambda: len(events(directory, "commit")) >= 3)
    assert not run.having("ProxyActor")  # its generator opens no HTTP port
    live = printed(executed(NOTEBOOKS[0], tmp_path, ASYNCRL_RUN=str(directory)))
    read.touch()
    versions = [
        int(word) for word in live.split("committed version ")[2].split(",")[0].split(" -> ")
    ]
    assert versions[0] < versions[1], live
    assert run.wait() == 0, run.output
    assert run.gone() == [] and run.left_in_shared_memory() == []
    assert (
        "held-out greedy accuracy" in run.output
        and "reward mean" in run.output
        and "--resume must" in run.output
    )
    log = (directory / "logs" / "attempt_0" / "driver.log").read_text()
    assert (
        log.count(": version ") >= 40
        and "evaluation of version 0: " in log
        and "checkpoint at step " in log
        and "held-out greedy" in log
    )
    assert "INFO" not in run.output and "WARNING" not in run.output

    finished = asyncrl.open_run(directory)
    trained = [ended for ended in finished.outcomes().to_pylist() if ended["outcome"] == "trained"]
    assert len(trained) == 40 * 4 and len({ended["ordinal"] for ended in trained}) == len(trained)
    trajectories = finished.trajectories().to_pylist()
    assert (
        max(
            row["trained_at_version"] - row["oldest_version"]
            for row in trajectories
            if row["outcome"] == "trained"
        )
        <= 2
    )
    late = [ended["staleness"] for ended in trained if ended["trained_at_version"] >= 3]
    assert (
        sum(late) / len(late) >= 0.5
    )  # the slow reward lets the learner wait; the demo's bar is 1
    rewards = [record["reward/mean"] for record in finished.records("step")]
    assert sum(rewards[-20:]) > 1.25 * sum(rewards[:20])
    assert (
        max(record["check/logprob_max_diff"] for record in finished.records("logprob_check"))
        <= 1e-4
    )
    assert len(finished.records("logprob_check")) > 3
    [first_step] = finished.records("first_step")
    phases = [value for name, value in first_step.items() if name.startswith("startup/phase/")]
    assert len(phases) >= 6 and first_step["startup/first_step_s"] == pytest.approx(sum(phases))
    [truncation] = finished.records("truncation")
    assert truncation["truncation/data.train/used"] == truncation["truncation/data.train/rows"] > 0
    assert [record["version"] for record in finished.records("evaluation")] == [0, 40]
    assert pq.read_table(next((directory / "groups").glob("*.parquet"))).num_rows > 0
    evaluated = finished.evaluations().to_pylist()
    assert Counter((row["set"], row["version"], row["status"]) for row in evaluated) == {
        (name, at, "ok"): 16 for name in ("greedy", "sampled") for at in (0, 40)
    }
    assert sorted(path.name for path in (directory / "checkpoints").iterdir()) == [
        "LATEST",
        "step_000020",
        "step_000040",
    ]
    documented = known_names()
    for record in metrics.read_metrics(directory):
        own = [
            re.sub("^eval/(greedy|sampled)_", "eval/<set>_", name)
            for name in set(record) - {*metrics.RESERVED}
        ]
        own = [
            re.sub("(reward/|eval/<set>_)(digits|unhurried)(?=$|/)", r"\1<name>", name)
            for name in own
        ]
        own = [re.sub("^truncation/[^/]+/", "truncation/<file>/", name) for name in own]
        own = [re.sub("^startup/phase/.+_s$", "startup/phase/<phase>_s", name) for name in own]
        assert not [name for name in own if name not in documented], record["event"]
    executions = (
        directory / "logs" / "attempt_0" / "ray" / "ray-data" / "ray-data.log"
    ).read_text()
    registered = set(
        re.findall(r"Registered dataset logger for dataset (\w+)", executions)
    )  # Ray may do so again as an execution ends
    assert sorted(name.partition("_")[0] for name in registered) == ["prompts", "scoring"]
    assert (finished.status().committed, finished.status().version) == (40, 40)
    assert_page_has_the_files_numbers(directory)

    before_and_after = [
        AutoModelForCausalLM.from_pretrained(path).state_dict()
        for path in (finished.config.model.path, directory / "hf")
    ]
    assert all(
        (before_and_after[0][name] != parameter).any()
        for name, parameter in before_and_after[1].items()
    )
    AutoTokenizer.from_pretrained(directory / "hf")


def assert_page_has_the_files_numbers(directory):
    """The report of a real run against its Parquet files, read without asyncrl."""
    write_report(asyncrl.open_run(directory), directory / "report.html")
    found = values_of((directory / "report.html").read_text())
    rows, ends = (
        {
            row["ordinal"]: row
            for path in sorted((directory / folder).glob("*.parquet"))
            for row in pq.read_table(path).to_pylist()
        }
        for folder in ("groups", "outcomes")
    )
    learned = {
        (row["ordinal"], row["index"]): row
        for path in (directory / "trained").glob("*.parquet")
        for row in pq.read_table(path).to_pylist()
    }
    ratios = Counter()
    groups = found["groups"]
    assert sorted(groups["ordinal"]) == sorted(rows) and len(rows) >= 40 * 4
    for at, ordinal in enumerate(groups["ordinal"]):
        row, end = rows[ordinal], ends.get(ordinal, {})
        assert groups["reward"][at] == pytest.approx(sum(row["reward"]) / 4, abs=1e-4)
        assert groups["staleness"][at] == end.get("staleness")
        assert groups["version"][at] == end.get("trained_at_version")
        detail = found["details"][groups["detail"][at]]
        for trajectory, ids, logprobs in zip(
            detail["trajectories"], row["completion_ids"], row["logprobs"], strict=True
        ):
            assert len(trajectory["pieces"]) == len(ids)
            assert trajectory["logprobs"] == pytest.approx(logprobs, abs=1e-4)
        for index, trajectory in enumerate(detail["trajectories"]):
            if (mine := learned.get((ordinal, index))) is None:
                assert end.get("outcome") != "trained" or trajectory["status"] != "ok"
                continue
            shown = trajectory["learner"]["logprobs"]
            assert [shown[token] for token in mine["positions"] or range(len(shown))] == (
                pytest.approx(mine["logprobs"], abs=1e-5)
            )
            for token, new in zip(
                mine["positions"] or range(len(shown)), mine["logprobs"], strict=True
            ):
                ratios[end["step"]] += math.exp(new - row["logprobs"][index][token])
    for record in asyncrl.open_run(directory).records("step"):
        mean = ratios[record["step"]] / record["tokens"]
        assert mean == pytest.approx(record["ratio_mean"], rel=1e-5)
    assert "truncated_ratio" in found["verdict"][0]["text"], "the alarm of so short completions"
    assert found["verdict"][1]["text"].startswith("It learns: "), found["verdict"]
    assert found["lost"] and sum(one["groups"] for one in found["lost"]) == len(ends)


KILLED = (("ray::ServeReplica", 5), ("ray::RankProcess", 25))
"""Processes of the second attempt, and the versions after which they are killed."""


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("kills", "steps"),
    [
        pytest.param((), 8, marks=pytest.mark.slow, id="driver"),
        pytest.param(KILLED, 60, marks=pytest.mark.faults, id="driver then replica then rank"),
    ],
)
def test_parts_of_a_run_are_killed_and_nothing_is_lost(start_run, tmp_path, kills, steps):
    directory = tmp_path / "runs" / "run"
    first = start_run({"max_steps": 150})
    first.until(lambda: len(events(directory, "checkpoint")) >= 2)
    first.stop(signal.SIGKILL)
    first.wait()
    assert first.gone(180) == []  # Ray's agents wait a minute for the head node before they give up
    committed = max(
        int(path.name.removeprefix("step_"))
        for path in (directory / "checkpoints").glob("step_*")
        if (path / "COMMITTED").exists()
    )

    second = start_run({"max_steps": committed + steps}, "--resume", "must")
    for part, after in kills:
        second.until(
            lambda after=after: any(
                record["version"] > committed + after for record in events(directory, "commit")
            )
        )
        second.having(part)[0].kill()
    assert second.wait(900) == 0, second.output
    assert f"resuming at version {committed}" in second.output
    if kills:
        assert (
            "learner rank 0 failed in" in second.output
            and "its process died" in second.output
            and "a new attempt starts automatically" in second.output
        )
    assert second.gone() == [] and second.left_in_shared_memory() == []

    run = asyncrl.open_run(directory)
    checks = audit(run)
    assert all(check.passed for check in checks), audit_text(checks)
    attempts, books = read_record(directory)["attempts"], Books(run)
    trained = [ended for ended, _ in books.trained()]
    assert (
        len(attempts) == (3 if kills else 2)
        and len(trained) == (committed + steps) * 4
        and max(ended["staleness"] for ended in trained) <= 2
    )
    waited = {(made_in, ordinal) for made_in, ordinal in attempts[1]["waiting"]}
    assert waited <= {
        (ended["attempt"], ended["ordinal"])
        for ended in run.outcomes().to_pylist()
        if ended["ended_in"] == 1
    }
    assert len({record["replica"] for record in run.records("push") if record["attempt"] == 1}) == (
        2 if kills else 1
    )

    exported = subprocess.run(
        [*ASYNCRL, "export", directory], capture_output=True, text=True, timeout=300
    )
    assert exported.returncode == 0, exported.stderr
    ours = AutoModelForCausalLM.from_pretrained(
        directory / "export" / f"step_{committed + steps:06d}"
    ).state_dict()
    at_the_end = AutoModelForCausalLM.from_pretrained(directory / "hf").state_dict()
    assert ours.keys() == at_the_end.keys() and all(
        torch.equal(ours[name], at_the_end[name]) for name in ours
    )


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_a_run_killed_five_times_keeps_its_books(start_run, tmp_path):
    directory, moments, killed = tmp_path / "runs" / "run", random.Random(5), []

    def steps(attempt):
        return sum(record["attempt"] == attempt for record in events(directory, "step"))

    for attempt in range(5):
        run = start_run({"max_steps": 1000}, *(["--resume", "must"] if attempt else []))
        some = moments.randint(3, 9)
        run.until(lambda attempt=attempt, some=some: steps(attempt) >= some, timeout_s=420)
        run.stop(signal.SIGKILL)
        run.wait()
        killed.append(run)
    until = events(directory, "step")[-1]["version"] + 10
    last = start_run({"max_steps": until}, "--resume", "must")
    assert last.wait(900) == 0, last.output
    checks = audit(asyncrl.open_run(directory))
    assert all(check.passed for check in checks), audit_text(checks)
    assert (
        len(read_record(directory)["attempts"]) == 6
        and len([*Books(asyncrl.open_run(directory)).trained()]) == until * 4
    )
    assert [run.gone(180) for run in killed] == [[]] * 5 and last.gone() == []


PHASES = {
    "engine loading": lambda run, directory: run.having("EngineCore") or run.having("ServeReplica"),
    "warm start": lambda run, directory: events(directory, "warm_start"),
    "generating": lambda run, directory: len(events(directory, "step")) >= 3,
    "mid-update": (
        lambda run, directory: (
            len(events(directory, "gather")) > max(3, len(events(directory, "commit")))
        )
    ),
}


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("phase", "numbers"),
    [
        ("engine loading", [signal.SIGTERM]),
        ("warm start", [signal.SIGINT]),
        ("generating", [signal.SIGINT, signal.SIGINT]),
        ("mid-update", [signal.SIGTERM]),
        ("generating", [signal.SIGTERM, signal.SIGKILL]),
    ],
)
def test_a_signal_stops_the_run_cleanly(start_run, task, tmp_path, phase, numbers):
    directory = tmp_path / "runs" / "run"
    never = {
        "warm_start.data": task["data"]["train"],
        "warm_start.min_accuracy": 0.99,
        "warm_start.max_accuracy": 1.0,
    }
    run = start_run({"max_steps": 10_000, **(never if phase == "warm start" else {})})
    run.until(lambda: PHASES[phase](run, directory))
    for number in numbers:
        run.descendants()
        os.killpg(run.process.pid, number)
        time.sleep(0.5)  # the second signal comes while the run stops
    if signal.SIGKILL in numbers:
        assert run.wait(30) == -signal.SIGKILL
        assert (
            run.gone(180) == []
        )  # Ray's agents wait a minute for the head node before they give up
        assert run.left_in_shared_memory() == []
        return
    assert run.wait(30) == 130, run.output
    assert run.gone() == [] and run.left_in_shared_memory() == []
    assert "interrupted" in run.output and "--resume" in run.output
    if len(numbers) > 1:  # the second Ctrl-C does not wait for the checkpoint
        return
    steps = [record["version"] for record in events(directory, "step")]
    saved = [record["version"] for record in events(directory, "checkpoint")]
    assert saved[-1:] == steps[-1:], "a step was lost"


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("reward", "code"), [("hangs", 2), ("hangs_in_the_run", 1)])
def test_a_bad_reward_ends_the_run_with_its_name(start_run, reward, code):
    """The plan tries each reward once. A reward that hangs only later ends the run."""
    run = start_run(
        {
            "reward.functions": {"bad": {"function": f"rewards_for_runs:{reward}"}},
            "reward.deadline_s": 2,
            "eval": {},
        }
    )
    assert run.wait() == code, run.output
    last = f"\n{run.output}".split("\nasyncrl: ")[1]
    assert (
        f"rewards_for_runs:{reward}" in last.splitlines()[0]
        and "killed after reward.deadline_s = 2" in last.splitlines()[0]
    ), run.output
    assert run.gone() == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_and_two_replicas_on_two_cores_and_a_resume_with_one_of_each(
    start_run, tmp_path, engine_starts
):
    run = start_run({"learner.world_size": 2, "generator.num_replicas": 2, "max_steps": 14})
    assert run.wait(800) == 0, run.output
    directory = tmp_path / "runs" / "run"
    finished = asyncrl.open_run(directory)
    assert len({record["replica"] for record in finished.records("push")}) == 2
    assert finished.records("evaluation")[-1]["eval/greedy_accuracy"] > 0.05

    # The model that two ranks wrote writes what their generators wrote.
    model = AutoModelForCausalLM.from_pretrained(directory / "hf", dtype=torch.float32)
    greedy = (pc.field("version") == 14) & (pc.field("set") == "greedy")
    answers = finished.evaluations().filter(greedy).to_pylist()
    assert len(answers) == 16
    for answer in answers:
        prompt, ids = torch.tensor([answer["prompt_ids"]]), answer["completion_ids"]
        written = model.generate(prompt, max_new_tokens=len(ids), do_sample=False)
        assert written[0, prompt.shape[1] :].tolist() == ids

    resumed = start_run(
        {
            "learner.world_size": 1,
            "generator.num_replicas": 1,
            "max_steps": 16,
            "checkpoint.keep": 3,
        },
        "--resume",
        "must",
    )
    assert resumed.wait(800) == 0, resumed.output
    for changed in ("generator.num_replicas 2 → 1", "learner.world_size 2 → 1"):
        assert f"changed since: {changed}" in resumed.output
    assert (
        len(
            {
                record["replica"]
                for record in asyncrl.open_run(directory).records("push")
                if record["attempt"] == 1
            }
        )
        == 1
    )
    checks = audit(asyncrl.open_run(directory))
    assert all(check.passed for check in checks), audit_text(checks)
    exported = subprocess.run(
        [*ASYNCRL, "export", directory, "--step", "14", "--out", tmp_path / "at_14"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert exported.returncode == 0 and "step_000014" in exported.stdout, (
        exported.stdout + exported.stderr
    )
    at_14, at_16 = (
        AutoModelForCausalLM.from_pretrained(path).state_dict()
        for path in (tmp_path / "at_14", directory / "hf")
    )
    assert at_14.keys() == at_16.keys() and not all(
        torch.equal(at_14[name], at_16[name]) for name in at_14
    )


@pytest.mark.faults
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("times", [10, 20])
def test_one_of_two_replicas_slower(times, start_run, tmp_path):
    run = start_run({"generator.num_replicas": 2, "max_steps": 40, "eval": {}})
    directory = tmp_path / "runs" / "run"
    run.until(lambda: len(events(directory, "step")) >= 3)
    slow = run.having("EngineCore")[0]
    with contextlib.suppress(psutil.NoSuchProcess):
        while run.process.poll() is None:  # it runs 1/times of the time
            slow.suspend()
            time.sleep(0.5 - 0.5 / times)
            slow.resume()
            time.sleep(0.5 / times)
    assert run.wait(900) == 0, run.output
    outcomes = asyncrl.open_run(directory).outcomes().to_pylist()
    assert {ended["outcome"] for ended in outcomes} == {"trained"} and len(outcomes) == 40 * 4, (
        "`wait` keeps the groups of the slow replica"
    )
    assert max(ended["staleness"] for ended in outcomes) <= 2
    by_replica = Counter(
        row["replica"] for row in asyncrl.open_run(directory).trajectories().to_pylist()
    )
    print("trajectories by replica:", dict(by_replica))
    assert len(by_replica) == 2
    checks = audit(asyncrl.open_run(directory))
    assert all(check.passed for check in checks), audit_text(checks)
    assert run.gone() == []


@pytest.mark.timeout(120)
def test_bad_input_starts_nothing(start_run, tmp_path):
    run = start_run({"data.prompt_column": "question_text"}, starts_engine=False)
    assert run.wait() == 2
    assert len(run.output.strip().splitlines()) == 1 and "question_text" in run.output
    assert not (tmp_path / "runs").exists()
