"""Whole runs that are stopped from outside: by a signal to their process group, by a reader that
leaves, and by the end of Ray's servers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from run_process import RunProcess
from run_variables import HERE, run_variables

import asyncrl
from asyncrl.run.audit import audit, audit_text
from asyncrl.rundir.record import read_record


def versions(directory: Path, event: str = "step") -> list[int]:
    """Versions of the run's records of one event."""
    if not (directory / "metrics.jsonl").exists():
        return []
    return [record["version"] for record in asyncrl.open_run(directory).records(event)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_signal_to_the_process_group_loses_no_step_and_a_lost_reader_ends_nothing(
    sft: dict[str, Any], start_config: Callable[..., RunProcess], tmp_path: Path
) -> None:
    """`timeout`, `scancel` and systemd signal the group, some of them twice."""
    directory = tmp_path / "runs" / "run"
    tree = sft | {"max_steps": 100_000, "checkpoint": {"every_steps": 0}, "eval": {}}
    run = start_config(tree, "--watch")
    run.until(lambda: len(versions(directory)) >= 12)
    (address,) = [line.split()[1] for line in run.output.splitlines() if line.startswith("page ")]
    with urllib.request.urlopen(address, timeout=60) as page:
        assert page.status == 200
    assert asyncrl.open_run(directory).status().state == "running"
    run.descendants()
    for _ in range(2):
        os.killpg(run.process.pid, signal.SIGTERM)
    assert run.wait(60) == 130 and run.gone() == [], run.output
    assert "SIGTERM: the run finishes its step and writes a checkpoint" in run.output
    assert "\ninterrupted (SIGTERM); resume with: " in run.output
    reached = versions(directory)[-1]
    assert versions(directory, "checkpoint") == [reached]
    status = asyncrl.open_run(directory).status()
    assert (status.state, status.cause, status.version) == ("interrupted", "SIGTERM", reached)
    attempt = read_record(directory)["attempts"][0]
    assert attempt["command"][1] == "train" and attempt["start"] <= attempt["end"]
    assert attempt["host"] and attempt["versions"]["ray"]
    assert (
        "interrupted (SIGTERM); resume with: "
        in (directory / "logs" / "attempt_0" / "driver.log").read_text()
    )

    resumed = tree | {"resume": "must", "max_steps": reached + 3}
    (tmp_path / "resumed.yaml").write_text(yaml.safe_dump(resumed))
    command = [Path(sys.executable).with_name("asyncrl"), "train", tmp_path / "resumed.yaml"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=HERE, env=run_variables()
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()  # as `| head -1` does
    try:
        assert process.wait(300) == 0
    finally:
        process.kill()
    found = asyncrl.open_run(directory)
    assert found.status().state == "finished" and versions(directory)[-1] == reached + 3
    checks = audit(found)
    assert all(check.passed for check in checks), audit_text(checks)

    again = subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=HERE, env=run_variables()
    )
    assert again.returncode == 0 and f"run run is finished: step {reached + 3}" in again.stdout
    assert len(read_record(directory)["attempts"]) == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_end_of_rays_servers_is_named_with_the_way_on(
    sft: dict[str, Any], start_config: Callable[..., RunProcess], tmp_path: Path
) -> None:
    """As `ray stop` does: SIGTERM to all of Ray's processes, and SIGKILL to those that stay."""
    directory = tmp_path / "runs" / "run"
    run = start_config(sft | {"max_steps": 100_000, "eval": {}})
    run.until(lambda: 20 in versions(directory, "checkpoint"))
    servers = psutil.Process(run.process.pid).children(recursive=True)
    for process in servers:
        process.terminate()
    for process in psutil.wait_procs(servers, 3)[1]:
        process.kill()
    began = time.monotonic()
    assert run.wait(60) == 1 and run.gone() == [], run.output
    ended = "\nasyncrl: Ray's processes on this machine ended during the run ("
    assert ended in run.output, (directory / "logs" / "attempt_0" / "driver.log").read_text()
    assert "  resume with: " in run.output and time.monotonic() - began < 45, run.output
    status = asyncrl.open_run(directory).status()
    assert status.state == "failed" and status.cause.startswith("Ray's processes")


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_a_signal_to_every_process_is_an_interruption_without_the_last_steps(
    sft: dict[str, Any], start_config: Callable[..., RunProcess], tmp_path: Path
) -> None:
    """As systemd's default does, which ends Ray and the learner, too."""
    directory = tmp_path / "runs" / "run"
    run = start_config(sft | {"max_steps": 100_000, "eval": {}})
    run.until(lambda: 20 in versions(directory, "checkpoint"))
    for process in [*run.descendants(), psutil.Process(run.process.pid)]:
        process.terminate()
    began = time.monotonic()
    assert run.wait(60) == 130 and time.monotonic() - began < 45, run.output
    assert run.gone() == [], run.output
    assert "\ninterrupted (SIGTERM); resume with: " in run.output
    assert asyncrl.open_run(directory).status().state == "interrupted"


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_a_stopped_run_of_two_ranks_resumes_at_its_last_step(
    start_run: Callable[..., RunProcess], tmp_path: Path
) -> None:
    directory = tmp_path / "runs" / "run"
    changes = {"learner.world_size": 2, "checkpoint.every_steps": 0, "eval": {}}
    run = start_run(changes | {"max_steps": 10_000})
    run.until(lambda: len(versions(directory)) >= 5)
    run.descendants()
    os.killpg(run.process.pid, signal.SIGTERM)
    assert run.wait(120) == 130 and run.gone() == [], run.output
    reached = versions(directory)[-1]
    assert versions(directory, "checkpoint") == [reached]
    resumed = start_run(changes | {"max_steps": reached + 2}, "--resume", "must")
    assert resumed.wait() == 0, resumed.output
    assert versions(directory)[-1] == reached + 2
    checks = audit(asyncrl.open_run(directory))
    assert all(check.passed for check in checks), audit_text(checks)
