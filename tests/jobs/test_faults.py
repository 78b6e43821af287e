"""Kills, stops or breaks one part after the other of a real run. `make faults` runs this and prints
the recovery time of each part."""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import pytest
from run_variables import PYTHON_PATH

import asyncrl
from asyncrl.rewards.scoring import scored_block
from asyncrl.run.audit import audit, audit_text
from asyncrl.rundir.record import read_record

STEPS_AFTER = 3
"""Steps that a run must take after a fault to count as recovered, with a version committed among
them."""


LOOK_S = 0.3
"""Seconds between stopping the process and checking that the fault's moment still lasts."""


@dataclass(frozen=True)
class Fault:
    """Stop a process at a moment, and then kill it, leave it, or let it go after `stopped_s`
    seconds.

    The process is the newest of the run whose command line contains `process`: an older one may
    still be ending. `moment(directory)`
    tells from the run directory whether the moment has come. A stopped process cannot end its
    moment, so the test knows that it was hit.
    """

    name: str
    process: str
    then: Literal["killed", "left", "let go"] = "killed"
    stopped_s: float = 10.0
    new_attempt: bool = False
    moment: Callable[[Path], bool] = lambda directory: True


def newest(directory, event, attempt=0):
    """The newest version in the records of this event, in this attempt or later."""
    found = (
        asyncrl.open_run(directory).records(event) if (directory / "metrics.jsonl").exists() else []
    )
    return max((record["version"] for record in found if record["attempt"] >= attempt), default=-1)


def last_of(directory, *events):
    """The event of the newest attempt's last record among these. It does not read the whole file,
    because some moments are short."""
    with (directory / "metrics.jsonl").open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 17)))
        lines = file.read().splitlines()[1:]
    records = [json.loads(line) for line in lines if line.endswith(b"}")]
    found = [
        record["event"]
        for record in records
        if record["event"] in events and record["attempt"] == records[-1]["attempt"]
    ]
    return found[-1] if found else None


def saving(directory):
    return any((directory / "checkpoints").glob(".step_*"))


def fetching(directory):
    return last_of(directory, "gather", "commit") == "gather"


def staged(directory):
    """A replica has a version in shared memory, because it still fetches it or its engine is
    changing to it. A replica that is stopped now is in one of the two states. With a stopped
    engine, the replica waits in vain for the change."""
    run_id = json.loads((directory / "run.json").read_text())["run_id"]
    return any(Path("/dev/shm").glob(f"asyncrl-{run_id}-*.weights"))


def gathering(directory):
    """A step is done, the previous version is committed, and nothing is being saved, so the rank
    gathers the new version next."""
    return (
        last_of(directory, "step", "gather") == "step"
        and not fetching(directory)
        and not saving(directory)
    )


FAULTS = [
    Fault("generator: replica killed while it serves", "ray::ServeReplica"),
    Fault(
        "generator: replica killed while it fetches a version", "ray::ServeReplica", moment=staged
    ),
    Fault("generator: engine killed under a living replica", "VLLM::EngineCore"),
    Fault(
        "generator: engine killed while it changes to a version", "VLLM::EngineCore", moment=staged
    ),
    Fault("generator: replica stopped for 10 s", "ray::ServeReplica", "let go"),
    Fault("generator: engine hangs", "VLLM::EngineCore", "left"),
    Fault("generator: replica hangs", "ray::ServeReplica", "left"),
    Fault("control: rollout worker killed", "ray::RolloutWorker"),
    Fault("control: scoring reader killed", f"MapBatches({scored_block.__name__})"),
    Fault("control: prompt reader killed", "MapBatches(render_table)"),
    Fault("control: Serve controller stopped for 10 s", "ray::ServeController", "let go"),
    Fault("control: Serve controller killed", "ray::ServeController"),
    Fault("control: version registry killed", "ray::VersionRegistry"),
    Fault("learner: rank stopped for 10 s", "ray::RankProcess", "let go"),
    Fault("learner: rank killed", "ray::RankProcess", new_attempt=True),
    Fault(
        "learner: rank killed while it saves", "ray::RankProcess", new_attempt=True, moment=saving
    ),
    Fault(
        "learner: rank killed while it gathers a version",
        "ray::RankProcess",
        new_attempt=True,
        moment=gathering,
    ),
]


def stop_in_its_moment(fault, run, directory):
    """Stop the process in the fault's moment, and return it."""
    deadline, process = time.monotonic() + 300, None
    while True:
        if process is None or not process.is_running():
            process = next(reversed(run.having(fault.process)), None)
        if process is not None and fault.moment(directory):
            with contextlib.suppress(psutil.NoSuchProcess):  # it may just have ended
                process.suspend()
                time.sleep(LOOK_S)
                if fault.moment(directory):
                    return process
                process.resume()
        assert run.process.poll() is None and time.monotonic() < deadline, (
            f"{fault.name}: its moment did not come, or no process {fault.process!r}\n{run.output}"
        )
        time.sleep(0.002)


@pytest.mark.faults
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("placement", ["decoupled", "colocate"])
def test_a_run_survives_what_it_should(placement, start_run, tmp_path, capsys):
    directory = tmp_path / "runs" / "run"
    run = start_run(
        {
            "max_steps": 100_000,
            "placement": placement,
            "staleness.max_staleness": 0 if placement == "colocate" else 2,
            "checkpoint.every_steps": 5,
            "eval": {},
            "generator.stall_timeout_s": 15,
            "max_restarts": 10,
            "weights.check_every_versions": 0,
        }
    )
    run.until(lambda: newest(directory, "commit") >= 5)
    rows, attempts = [], 1
    for fault in FAULTS:
        process = stop_in_its_moment(fault, run, directory)
        began, step = time.monotonic(), newest(directory, "step")
        if fault.then == "killed":
            process.kill()
        elif fault.then == "let go":
            time.sleep(fault.stopped_s)  # the fault itself
            process.resume()
        attempts += fault.new_attempt

        def recovered(fault=fault, step=step, attempt=attempts - 1):
            if fault.new_attempt:
                record = read_record(directory)["attempts"]
                step = record[attempt]["version"] if len(record) > attempt else 10**9
            return (
                newest(directory, "step", attempt) >= step + STEPS_AFTER
                and newest(directory, "commit", attempt) > step
            )

        run.until(recovered, timeout_s=420)
        rows.append((fault.name, time.monotonic() - began))
        with capsys.disabled():
            print(f"{fault.name:<52} {rows[-1][1]:6.1f} s to {STEPS_AFTER} steps", flush=True)
    run.stop(signal.SIGINT)
    assert run.wait(60) == 130, run.output
    assert run.gone() == [] and run.left_in_shared_memory() == []
    finished = asyncrl.open_run(directory)
    checks = audit(finished)
    with capsys.disabled():
        print(audit_text(checks))
    assert all(check.passed for check in checks), audit_text(checks)
    assert len(read_record(directory)["attempts"]) == attempts


STORE_BYTES = 128 << 20
SAYS = "says: "
TWO_NODES = f"""
import numpy as np
import ray
from ray._private import ray_constants
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={{"num_cpus": 4,
    "object_store_memory": {STORE_BYTES}}})
second = cluster.add_node(num_cpus=1, object_store_memory={STORE_BYTES})
raylet, = second.all_processes[ray_constants.PROCESS_TYPE_RAYLET]
print(cluster.address, raylet.process.pid, flush=True)
input()  # fill the store
ray.init(address=cluster.address, log_to_driver=False)
held = [ray.put(np.full({STORE_BYTES // 8}, number, np.uint8)) for number in range(16)]
print("{SAYS}full", flush=True)
input()  # read what filled it
print("{SAYS}whole" if [int(ray.get(one)[0]) for one in held] == [*range(16)] else "{SAYS}torn",
    flush=True)
input()  # lose the second node
cluster.remove_node(second, allow_graceful=False)
print("{SAYS}lost", flush=True)
input()
ray.shutdown()
cluster.shutdown()
"""


class TwoNodes:
    """A Ray cluster of two nodes on this machine, in a separate process. The second node has room
    for a replica, but not for a learner."""

    def __init__(self, environment):
        self.process = subprocess.Popen(
            [sys.executable, "-c", TWO_NODES],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        address, raylet = self.process.stdout.readline().split()
        self.address, self.raylet = address, psutil.Process(int(raylet))
        script = psutil.Process(self.process.pid)
        self.started = [script, *script.children(recursive=True)]

    def go_on(self):
        """Let the process take its next step, and return its output without Ray's own lines."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return (
            next(line for line in self.process.stdout if line.startswith(SAYS))
            .removeprefix(SAYS)
            .strip()
        )


@pytest.fixture
def two_nodes():
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    cluster = TwoNodes(os.environ | token | {"PYTHONPATH": PYTHON_PATH})
    yield cluster, {**token, "RAY_ADDRESS": cluster.address}
    started = [
        *cluster.started,
        *(
            one
            for head in cluster.started
            if head.is_running()
            for one in head.children(recursive=True)
        ),
    ]
    with contextlib.suppress(subprocess.TimeoutExpired, OSError):
        cluster.process.communicate("\n" * 4, timeout=60)
    for process in psutil.wait_procs(started, 10)[1]:
        process.kill()


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_a_full_object_store_and_a_lost_node(two_nodes, start_run, tmp_path):
    cluster, variables = two_nodes
    directory = tmp_path / "runs" / "run"
    run = start_run(
        {"generator.num_replicas": 2, "learner.num_cpus": 1.5, "max_steps": 100_000, "eval": {}},
        **variables,
    )
    run.until(lambda: newest(directory, "commit") >= 3)

    assert cluster.go_on() == "full"  # filled with twice its capacity, so Ray spills
    step = newest(directory, "step")
    run.until(lambda: newest(directory, "commit") >= step + 10)
    assert cluster.go_on() == "whole"

    lost = cluster.raylet.children(recursive=True)
    assert any("ray::ServeReplica" in " ".join(one.cmdline()) for one in lost)
    served = {record["replica"] for record in asyncrl.open_run(directory).records("push")}
    assert len(served) == 2
    assert cluster.go_on() == "lost"
    run.until(
        lambda: (
            {record["replica"] for record in asyncrl.open_run(directory).records("push")} - served
        )
    )
    step = newest(directory, "step")
    run.until(lambda: newest(directory, "commit") >= step + STEPS_AFTER)
    assert psutil.wait_procs(lost, 60)[1] == []

    run.stop(signal.SIGINT)
    assert run.wait(60) == 130, run.output
    checks = audit(asyncrl.open_run(directory))
    assert all(check.passed for check in checks), audit_text(checks)
    assert len(read_record(directory)["attempts"]) == 1


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_eight_generators_on_one_node(start_run, tmp_path, engine_starts):
    """Eight real engines start at once without a port clash. An engine gets its ports from the
    kernel when it binds them (gloo). Its processes meet over a file, and use pipes to the
    replica."""
    directory = tmp_path / "runs" / "run"
    engine_starts += ["one of eight"] * 8
    run = start_run({"generator.num_replicas": 8, "generator.num_cpus": 0.1, "max_steps": 40})
    run.until(lambda: newest(directory, "commit") >= 1, timeout_s=1200)
    engines = run.having("VLLM::")
    assert len(engines) == 8
    listening = [
        connection.laddr
        for one in engines
        for connection in one.net_connections("tcp")
        if connection.status == "LISTEN"
    ]
    assert len({port for _, port in listening}) == len(listening) and {
        host for host, _ in listening
    } <= {"127.0.0.1"}
    assert run.wait(600) == 0, run.output
    assert len({record["replica"] for record in asyncrl.open_run(directory).records("push")}) == 8
    assert all(check.passed for check in audit(asyncrl.open_run(directory)))
    assert run.gone() == [] and run.left_in_shared_memory() == []
