"""One real run, and one part of it after the other is killed, stopped or broken. `make faults` runs this and prints how long each took to recover."""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import asyncrl
from asyncrl.audit import audit, audit_text
from asyncrl.directory import read_record

STEPS_AFTER = 3
"""Steps that the run must do after a fault, with a version committed among them, before it counts as recovered."""


@dataclass(frozen=True)
class Fault:
    """`number` is sent to the first process of the run whose command line has `process` in it; None: `stopped_s` seconds of SIGSTOP."""

    name: str
    process: str
    number: signal.Signals | None = signal.SIGKILL
    stopped_s: float = 0.0
    new_attempt: bool = False
    moment: Callable[[Path], bool] = lambda directory: True
    """When it is injected, by the run's directory."""


def saving(directory):
    return any((directory / "checkpoints").glob(".step_*"))


def publishing(directory):
    return newest(directory, "gather") > newest(directory, "commit")


FAULTS = [
    Fault("generator: replica killed while it serves", "ray::ServeReplica"),
    Fault("generator: replica killed while a version is on its way", "ray::ServeReplica", moment=publishing),
    Fault("generator: engine killed under a living replica", "VLLM::EngineCore"),
    Fault("generator: replica stopped for 10 s", "ray::ServeReplica", None, 10.0),
    Fault("control: rollout worker killed", "ray::RolloutWorker"),
    Fault("control: scoring reader killed", "MapBatches(score_table)"),
    Fault("control: prompt reader killed", "MapBatches(_render_table)"),
    Fault("control: Serve controller killed", "ray::ServeController"),
    Fault("learner: rank stopped for 10 s", "ray::RankProcess", None, 10.0),
    Fault("learner: rank killed", "ray::RankProcess", new_attempt=True),
    Fault("learner: rank killed while it saves", "ray::RankProcess", new_attempt=True, moment=saving),
    Fault("learner: rank killed while a version is on its way", "ray::RankProcess", new_attempt=True, moment=publishing),
]


def newest(directory, event):
    found = asyncrl.open_run(directory).records(event) if (directory / "metrics.jsonl").exists() else []
    return max((record["version"] for record in found), default=-1)


def wait_for(fault, run, directory):
    """Without the look at all processes that `until` takes: some moments are short."""
    deadline = time.monotonic() + 300
    while not fault.moment(directory):
        assert run.process.poll() is None and time.monotonic() < deadline, f"{fault.name}: its moment did not come\n{run.output}"
        time.sleep(0.002)


@pytest.mark.faults
@pytest.mark.timeout(3600)
def test_a_run_survives_what_it_should(start_run, shared_memory, tmp_path, capsys):
    before, directory = shared_memory(), tmp_path / "runs" / "run"
    run = start_run({"max_steps": 100_000, "checkpoint.every_steps": 5, "eval": {}})
    run.until(lambda: newest(directory, "commit") >= 5)
    rows, attempts = [], 1
    for fault in FAULTS:
        process = next((one for one in run.descendants() if fault.process in " ".join(one.cmdline())), None)
        assert process is not None, f"{fault.name}: no process {fault.process!r} among {[' '.join(one.cmdline())[:60] for one in run.descendants()]}"
        step = newest(directory, "step")
        wait_for(fault, run, directory)
        began = time.monotonic()
        if fault.number is None:
            process.suspend()
            time.sleep(fault.stopped_s)  # the fault itself
            process.resume()
        else:
            process.send_signal(fault.number)
        attempts += fault.new_attempt

        def recovered(fault=fault, step=step, attempts=attempts):
            if fault.new_attempt:
                record = read_record(directory)["attempts"]
                step = record[-1]["version"] if len(record) == attempts else 10**9
            return newest(directory, "step") >= step + STEPS_AFTER and newest(directory, "commit") > step

        run.until(recovered, timeout_s=420)
        rows.append((fault.name, time.monotonic() - began))
        with capsys.disabled():
            print(f"{fault.name:<52} {rows[-1][1]:6.1f} s to {STEPS_AFTER} steps", flush=True)
    run.stop(signal.SIGINT)
    assert run.wait(60) == 130, run.output
    assert run.gone() == [] and shared_memory() <= before
    finished = asyncrl.open_run(directory)
    checks = audit(finished)
    with capsys.disabled():
        print(audit_text(checks))
    assert all(check.passed for check in checks), audit_text(checks)
    assert len(read_record(directory)["attempts"]) == attempts


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_eight_generators_on_one_node(start_run, shared_memory, tmp_path, engine_starts):
    """Real ones, started at once. Their engines listen on no port: what they say goes over files and pipes of their own."""
    before, directory = shared_memory(), tmp_path / "runs" / "run"
    engine_starts += ["one of eight"] * 8
    run = start_run({"generator.num_replicas": 8, "generator.num_cpus": 0.1, "max_steps": 40})
    run.until(lambda: newest(directory, "commit") >= 1, timeout_s=1200)
    engines = [one for one in run.descendants() if "VLLM::" in " ".join(one.cmdline()) or "ServeReplica" in " ".join(one.cmdline())]
    listening = [(one.name(), connection.laddr) for one in engines for connection in one.net_connections("tcp") if connection.status == "LISTEN"]
    assert [place for name, place in listening if name.startswith("VLLM::")] == []
    assert run.wait(600) == 0, run.output
    assert len({record["replica"] for record in asyncrl.open_run(directory).records("push")}) == 8
    assert all(check.passed for check in audit(asyncrl.open_run(directory)))
    assert run.gone() == [] and shared_memory() <= before
