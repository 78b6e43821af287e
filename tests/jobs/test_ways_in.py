"""`ray job submit` and `serve deploy` against a Ray that was started with token authentication."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

import asyncrl

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
CALL = """
import ray
from ray import serve
from asyncrl.generation.protocol import GenerateRequest
ray.init(address="auto", log_to_driver=False)
answer = serve.get_app_handle("generator").generate.remote(GenerateRequest((5, 6, 14), 2, 8, 1.0, seed=1, ignore_eos=True)).result(timeout_s=300)
print("TOKENS", [len(completion.token_ids) for completion in answer.completions])
"""


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


class Cluster:
    """A head node of its own: loopback, token authentication, ports that were free."""

    def __init__(self, folder: Path) -> None:
        self.port, self.dashboard = free_port(), free_port()
        self.temp = Path(f"/tmp/asyncrl-{os.getpid()}")  # Ray's sockets need a short path
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "ASYNCRL_", "PYTHONPATH"))}
        self.environment |= {"PATH": f"{BIN}:{os.environ['PATH']}", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        options = [f"--port={self.port}", "--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1", f"--dashboard-port={self.dashboard}"]
        options.append(f"--dashboard-agent-listen-port={free_port()}")  # its default is taken by the session's own cluster, and jobs need the agent
        command = [BIN / "ray", "start", "--head", "--block", "--num-cpus=3", f"--temp-dir={self.temp}", "--disable-usage-stats", *options]
        self.log = folder / "head.log"
        self.process = subprocess.Popen(command, env=self.environment, stdout=self.log.open("w"), stderr=subprocess.STDOUT, cwd=folder)
        self.environment |= {"RAY_ADDRESS": f"http://127.0.0.1:{self.dashboard}", "RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{self.dashboard}"}

    def wait(self) -> None:
        deadline = time.monotonic() + 120
        while "--block" not in self.log.read_text():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.5)

    def run(self, *command: str | Path, timeout_s: float = 500, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env={**self.environment, **environment}, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL
        )

    def submit(self, *arguments: str, variables: dict[str, str] | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
        runtime = json.dumps({"env_vars": variables or {}})
        command = [BIN / "ray", "job", "submit", "--working-dir", ".", "--runtime-env-json", runtime, "--", "python", "jobs/train.py", "jobs/quickstart.yaml"]
        deadline = time.monotonic() + 120
        while "No available agent" in (submitted := self.run(*command, *arguments, **environment)).stderr:  # the head's agent comes up last
            assert time.monotonic() < deadline, submitted.stderr
        return submitted

    def applications(self) -> dict[str, Any]:
        """What `serve status` shows, from its REST API: the command's own imports would starve the replica that it asks about."""
        headers = {"Authorization": f"Bearer {self.environment['RAY_AUTH_TOKEN']}"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.dashboard}/api/serve/applications/", headers=headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["applications"]

    def stop(self) -> None:
        if self.process.poll() is not None:
            return
        processes = [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        _, alive = psutil.wait_procs(processes, 10)
        for process in alive:
            process.kill()
        self.process.wait()
        shutil.rmtree(self.temp, ignore_errors=True)


@pytest.fixture
def cluster(tmp_path):
    cluster = Cluster(tmp_path)
    try:
        cluster.wait()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    from quickstart_task import make_data, make_model

    directory = tmp_path_factory.mktemp("runs")
    make_data(directory / "quickstart-inputs", seed=0, held_out_rows=40, max_digits=1)
    make_model(directory / "quickstart-inputs" / "model", seed=0)
    return directory


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_submitted_job_trains_where_it_was_told_to(cluster, runs, engine_starts):
    refused = cluster.submit(RAY_AUTH_MODE="disabled", RAY_AUTH_TOKEN="")
    assert refused.returncode != 0 and re.search("auth", refused.stdout + refused.stderr, re.IGNORECASE)

    lost = cluster.submit()
    assert lost.returncode != 0 and '"ASYNCRL_RUNS": "/absolute/path"' in lost.stdout + lost.stderr

    small = ["--max_steps", "4", "--rollout.rollout_batch_size", "4", "--warm_start.min_accuracy", "0", "--eval.max_prompts", "8"]
    engine_starts.append("a submitted job")
    done = cluster.submit(*small, variables={"ASYNCRL_RUNS": str(runs)})
    assert done.returncode == 0, done.stdout + done.stderr
    uploads = [path for path in cluster.temp.glob("session_*/runtime_resources/working_dir_files/_ray_pkg_*") if path.is_dir()]
    assert uploads and sum(file.stat().st_size for file in uploads[0].rglob("*") if file.is_file()) < 5 << 20

    cluster.stop()
    run = asyncrl.open_run(runs / "quickstart")
    startup = run.records("startup")[0]
    assert run.status().committed == 4
    assert startup["package/driver"] == startup["package/replica"] and "runtime_resources" in startup["package/driver"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_serve_deploy_hosts_the_generator_on_loopback(cluster, runs, tmp_path, engine_starts):
    tree = yaml.safe_load((ROOT / "serve_configs" / "generator_cpu.yaml").read_text())
    tree["applications"][0]["args"]["model"] = str(runs / "quickstart-inputs" / "model")
    tree["http_options"]["port"] = free_port()
    (tmp_path / "generator.yaml").write_text(yaml.safe_dump(tree))
    engine_starts.append("serve deploy")
    deployed = cluster.run(BIN / "serve", "deploy", tmp_path / "generator.yaml")
    assert deployed.returncode == 0, deployed.stdout + deployed.stderr
    deadline = time.monotonic() + 400
    while (application := cluster.applications().get("generator", {})).get("status") != "RUNNING":
        assert application.get("status") != "DEPLOY_FAILED" and time.monotonic() < deadline, application
        time.sleep(1)
    called = cluster.run(sys.executable, "-c", CALL, RAY_ADDRESS=f"127.0.0.1:{cluster.port}")
    assert "TOKENS [8, 8]" in called.stdout, called.stdout + called.stderr
    ours = {process.pid for process in psutil.Process(cluster.process.pid).children(recursive=True)}
    hosts = {c.laddr.ip for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.pid in ours and c.laddr.port == tree["http_options"]["port"]}
    assert hosts == {"127.0.0.1"}
