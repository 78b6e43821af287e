"""`ray job submit` and `serve deploy` on a Ray cluster with token authentication."""

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
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from free_ports import free_port
from openai import BadRequestError, OpenAI
from prometheus_client.parser import text_string_to_metric_families
from run_variables import ROOT, run_variables

import asyncrl

BIN = Path(sys.executable).parent
CLOSED = "asyncrl.serving.http.close_own_routes"
CALL = """
import ray
from ray import serve
from asyncrl.contracts.messages import GenerateRequest
ray.init(address="auto", log_to_driver=False)
answer = serve.get_app_handle("generator").generate.remote(GenerateRequest((5, 6, 14), 2, 8, 1.0,
    seed=1, ignore_eos=True)).result(timeout_s=300)
print("HOST", serve.context._get_global_client().http_config.host)
print("TOKENS", [len(completion.token_ids) for completion in answer.completions])
"""


HOLD = """
import asyncio, sys, ray
from asyncrl.generation.settings import registry_name
from asyncrl.weights.version_registry import take_lease
ray.init(address=sys.argv[1], log_to_driver=False)
lease = asyncio.run(take_lease(registry_name("generator"), "run 'first'", "generator"))
ray.get(lease.holder.remote())
print("held", flush=True)
sys.stdin.read()
"""


RUN = """
import asyncio, sys, ray
from asyncrl.generation import app, shared_serve
from asyncrl.generation.run_generators import RunGenerators, lease_generators
from asyncrl.generation.settings import GeneratorApp
from asyncrl.serving.standing import build_standing_app

class Replica:
    def __init__(self, app): pass

address, shared_serve.PORT, name = sys.argv[1], int(sys.argv[2]), sys.argv[3]
real = app.build_app
app.build_app = lambda args: real(args, Replica)
ray.init(address=address, log_to_driver=False)
settings = GeneratorApp.model_validate({"model": "m", "generator":
    {"num_cpus": 0, "stall_timeout_s": 60, "start_timeout_s": 300}})

async def main():
    own = RunGenerators(name, await lease_generators(name, name), settings)
    await own.begin(watched=True)
    await app.wait_for_generators(name, 300)
    print("up", flush=True)
    for line in iter(lambda: sys.stdin.readline().strip(), "end"):
        try:
            build_standing_app({"model": "m", "http": True})
        except Exception as error:
            print(error, flush=True)
    await own.end()
    print("ended", flush=True)

asyncio.run(main())
"""


class Cluster:
    """A separate head node on loopback, with token authentication and free ports."""

    def __init__(self, folder: Path) -> None:
        self.port, self.dashboard = free_port(), free_port()
        self.temp = Path(f"/tmp/asyncrl-{os.getpid()}")  # Ray's sockets need a short path
        self.environment = run_variables("ASYNCRL_") | {
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
        self.environment |= {
            "ASYNCRL_API_KEY": secrets.token_hex(16),
            "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": CLOSED,
            # Serve kills a proxy that is not ready in 5 s, and a busy machine takes longer.
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        }
        options = [
            f"--port={self.port}",
            "--node-ip-address=127.0.0.1",
            "--dashboard-host=127.0.0.1",
            f"--dashboard-port={self.dashboard}",
        ]
        options.append(
            f"--dashboard-agent-listen-port={free_port()}"
        )  # the session's own cluster uses the default port, and jobs need the agent
        command = [
            BIN / "ray",
            "start",
            "--head",
            "--block",
            "--num-cpus=3",
            f"--temp-dir={self.temp}",
            "--disable-usage-stats",
            *options,
        ]
        self.log = folder / "head.log"
        self.process = subprocess.Popen(
            command,
            env=self.environment,
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            cwd=folder,
        )
        self.environment |= {
            "RAY_ADDRESS": f"http://127.0.0.1:{self.dashboard}",
            "RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{self.dashboard}",
        }

    def wait(self) -> None:
        deadline = time.monotonic() + 120
        while "--block" not in self.log.read_text():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.5)

    def run(
        self, *command: str | Path, timeout_s: float = 500, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env={**self.environment, **environment},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )

    def submit(
        self, *arguments: str, variables: dict[str, str] | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        runtime = json.dumps({"env_vars": variables or {}})
        command = [
            BIN / "ray",
            "job",
            "submit",
            "--working-dir",
            ".",
            "--runtime-env-json",
            runtime,
            "--",
            "python",
            "-m",
            "jobs.train",
            "jobs/quickstart/quickstart.yaml",
        ]
        deadline = time.monotonic() + 120
        while (
            "No available agent"
            in (submitted := self.run(*command, *arguments, **environment)).stderr
        ):  # the head's agent comes up last
            assert time.monotonic() < deadline, submitted.stderr
        return submitted

    def applications(self) -> dict[str, Any]:
        """The applications of `serve status`, from the REST API: the imports of the command would
        starve the replica."""
        return self._serve()["applications"]

    def proxies(self) -> list[bool]:
        """Whether each of Serve's proxies is healthy."""
        return [one["status"] == "HEALTHY" for one in self._serve()["proxies"].values()]

    def _serve(self) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.environment['RAY_AUTH_TOKEN']}"}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.dashboard}/api/serve/applications/", headers=headers
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def having(self, part: str) -> list[psutil.Process]:
        """Processes of the cluster whose command line contains `part`."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # others come and go
                found += [process] if part in " ".join(process.cmdline()) else []
        return found

    def kill(self, part: str) -> None:
        """Kill a process of the cluster whose command line contains `part`."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # others come and go
                if part in " ".join(process.cmdline()):
                    process.kill()
                    process.wait(30)
                    return
        raise AssertionError(f"no process {part!r}")

    def stop(self) -> None:
        if self.process.poll() is not None:
            return
        processes = [
            *psutil.Process(self.process.pid).children(recursive=True),
            psutil.Process(self.process.pid),
        ]
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
    from jobs.quickstart.task import make_data, make_model

    directory = tmp_path_factory.mktemp("runs")
    make_data(directory / "quickstart-inputs", seed=0, held_out_rows=40, max_digits=1)
    make_model(directory / "quickstart-inputs" / "model", seed=0)
    return directory


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_submitted_job_trains_in_its_runs_folder(cluster, runs, engine_starts):
    refused = cluster.submit(RAY_AUTH_MODE="disabled", RAY_AUTH_TOKEN="")
    assert refused.returncode != 0 and re.search(
        "auth", refused.stdout + refused.stderr, re.IGNORECASE
    )

    lost = cluster.submit()
    assert lost.returncode != 0 and '"ASYNCRL_RUNS": "/absolute/path"' in lost.stdout + lost.stderr

    small = [
        "--max_steps",
        "4",
        "--rollout.rollout_batch_size",
        "4",
        "--warm_start.min_accuracy",
        "0",
        "--eval.max_prompts",
        "8",
    ]
    engine_starts.append("a submitted job")
    done = cluster.submit(*small, variables={"ASYNCRL_RUNS": str(runs)})
    assert done.returncode == 0, done.stdout + done.stderr
    uploads = [
        path
        for path in cluster.temp.glob("session_*/runtime_resources/working_dir_files/_ray_pkg_*")
        if path.is_dir()
    ]
    uploaded = [  # the job's own processes compile there
        file for file in uploads[0].rglob("*") if file.is_file() and "__pycache__" not in file.parts
    ]
    assert {file.relative_to(uploads[0]).parts[0] for file in uploaded} & {
        "tests",
        ".venv",
    } == set()
    assert sum(file.stat().st_size for file in uploaded) < 6 << 20

    _, alive = psutil.wait_procs(cluster.having("ServeController"), 30)
    assert alive == []  # the run started it, so it also ended it

    cluster.stop()
    run = asyncrl.open_run(runs / "quickstart")
    startup = run.records("startup")[0]
    assert run.status().committed == 4
    assert (
        startup["package/driver"] == startup["package/replica"]
        and "runtime_resources" in startup["package/driver"]
    )


class OtherRun:
    """A driver that starts generators without an engine, as a run does on a shared cluster."""

    def __init__(self, cluster: Cluster, port: int, name: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUN, f"127.0.0.1:{cluster.port}", str(port), name],
            env={key: cluster.environment[key] for key in cluster.environment if "ADDR" not in key},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.wait_for("up")

    def ask(self, word: str) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(word, file=self.process.stdin, flush=True)
        return self.process.stdout.readline().strip()

    def wait_for(self, word: str) -> None:
        assert self.process.stdout is not None
        assert word in iter(lambda: self.process.stdout.readline().strip() or None, None)

    def end(self) -> None:
        assert self.process.stdin is not None
        print("end", file=self.process.stdin, flush=True)
        self.wait_for("ended")
        self.process.wait(60)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_runs_change_in_a_shared_serve_is_undone(cluster: Cluster) -> None:
    """Who comes during a run finds an open port, and who comes after the last run no Serve at all.
    A port that is taken is left alone."""
    port = free_port()
    first, second = OtherRun(cluster, port, "first"), OtherRun(cluster, port, "second")
    try:
        assert set(cluster.applications()) == {"first", "second"} and cluster.proxies() == [True]
        socket.create_connection(("127.0.0.1", port), 30).close()
        assert first.ask("build").startswith("model = 'm': No such file")  # Serve has proxies
        first.end()
        assert set(cluster.applications()) == {"second"} and cluster.proxies() == [True]
        second.process.kill()  # its watcher ends Serve
        until(lambda: not cluster.having("ServeController"))
        with socket.create_server(("127.0.0.1", port)):
            third = OtherRun(cluster, port, "third")
            try:
                assert cluster.proxies() == []
                refused = third.ask("build")
                assert refused.startswith("http: true: Serve on this cluster was started without")
                assert "serve shutdown" in refused
                third.end()
            finally:
                third.process.kill()
        assert not cluster.having("ServeController")
    finally:
        first.process.kill()
        second.process.kill()


def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.5)


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_a_run_whose_driver_is_gone_leaves_no_generators(cluster, runs, engine_starts):
    """The driver is killed with SIGKILL, and the resume command takes its room at once. Then `ray
    job stop` kills a driver after three seconds."""
    variables = {"RAY_ADDRESS": f"127.0.0.1:{cluster.port}", "ASYNCRL_RUNS": str(runs)}
    # The cluster has no room for two such replicas.
    small = [
        "--name",
        "left",
        "--generator.num_cpus",
        "1.6",
        "--rollout.rollout_batch_size",
        "4",
        "--warm_start.min_accuracy",
        "0",
    ]
    small += ["--eval.max_prompts", "8", "--checkpoint.every_steps", "2"]
    command = [BIN / "asyncrl", "train", "jobs/quickstart/quickstart.yaml", *small]
    engine_starts.extend(["killed with its driver", "resumed", "stopped"])
    with (runs / "left.log").open("w") as log:
        driver = subprocess.Popen(
            [*command, "--max_steps", "100000"],
            env=cluster.environment | variables,
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        while not (
            runs / "left" / "checkpoints" / "LATEST"
        ).exists():  # the test's timeout bounds it
            assert driver.poll() is None, (runs / "left.log").read_text()
            time.sleep(0.2)
    finally:
        driver.kill()
        driver.wait()
    assert len(cluster.applications()) == 1
    step = int(
        (runs / "left" / "checkpoints" / "LATEST").read_text().split()[0].removeprefix("step_")
    )
    resumed = cluster.run(*command, "--max_steps", str(step + 2), "--resume", "must", **variables)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert cluster.applications() == {}

    job = [
        BIN / "ray",
        "job",
        "submit",
        "--no-wait",
        "--submission-id",
        "stopped",
        "--working-dir",
        ".",
        "--runtime-env-json",
    ]
    job += [
        json.dumps({"env_vars": {"ASYNCRL_RUNS": str(runs)}}),
        "--",
        "python",
        "-m",
        "jobs.train",
        "jobs/quickstart/quickstart.yaml",
        *small,
    ]
    submitted = cluster.run(*job, "--max_steps", "100000", "--resume", "must")
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    while not any(one["status"] == "RUNNING" for one in cluster.applications().values()):
        time.sleep(0.5)
    stopped = cluster.run(BIN / "ray", "job", "stop", "stopped")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    while (
        cluster.applications()
        or cluster.having("ApplicationWatcher")
        or cluster.having("RankProcess")
    ):
        time.sleep(0.5)


class Http:
    """A client of the standing generator's HTTP routes."""

    def __init__(self, port: int, key: str | None) -> None:
        self.base, self.key = f"http://127.0.0.1:{port}", key

    def ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """Send a request, and return the status and the JSON body."""
        headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {self.key}"} if self.key else {}
        )
        request = urllib.request.Request(
            self.base + path, json.dumps(body).encode() if body is not None else None, headers
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def answers(self) -> bool:
        with contextlib.suppress(
            urllib.error.URLError, ConnectionError, ValueError
        ):  # the proxy's own errors are not JSON
            return self.ask("/health")[0] == 200
        return False


def worst_difference(model: Path, prompt: list[int], answer: dict[str, Any]) -> float:
    """Largest difference between the answer's log-probs and those of a checkpoint in
    transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    policy, worst = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval(), 0.0
    for choice in answer["choices"]:
        ids = choice["token_ids"]
        with torch.no_grad():
            logits = policy(torch.tensor([[*prompt, *ids]]), use_cache=False).logits[
                0, len(prompt) - 1 : -1
            ]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        worst = max(
            worst,
            (expected - torch.tensor(choice["logprobs"]["token_logprobs"])).abs().max().item(),
        )
    return worst


def deploy(cluster: Cluster, folder: Path, model: Path) -> int:
    """Deploy the shipped file for this model, wait until the application runs, and return its HTTP
    port."""
    tree = yaml.safe_load((ROOT / "serve_configs" / "generator_cpu.yaml").read_text())
    tree["applications"][0]["args"]["model"] = str(model)
    tree["http_options"]["port"] = port = free_port()
    (folder / "generator.yaml").write_text(yaml.safe_dump(tree))
    deployed = cluster.run(BIN / "serve", "deploy", folder / "generator.yaml")
    assert deployed.returncode == 0, deployed.stdout + deployed.stderr
    deadline = time.monotonic() + 400
    while (application := cluster.applications().get("generator", {})).get("status") != "RUNNING":
        assert application.get("status") != "DEPLOY_FAILED" and time.monotonic() < deadline, (
            application
        )
        time.sleep(1)
    return port


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_official_client_through_serves_proxy(cluster, runs, tmp_path, engine_starts):
    """Pieces arrive one by one through the proxy. A client that disconnects ends its generations in
    the engine."""
    model = shutil.copytree(runs / "quickstart-inputs" / "model", tmp_path / "model")
    (model / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    )
    engine_starts.append("serve deploy")
    port, key = deploy(cluster, tmp_path, model), cluster.environment["ASYNCRL_API_KEY"]
    asked: dict[str, Any] = {
        "model": "model",
        "messages": [{"role": "user", "content": "3+4="}],
        "seed": 1,
        "logprobs": True,
        "top_logprobs": 3,
    }
    with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0) as client:
        whole = client.chat.completions.create(**asked, n=2)
        chunks = list(client.chat.completions.create(**asked, n=2, stream=True))
        for choice in whole.choices:
            parts = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
            assert "".join(part.delta.content for part in parts) == choice.message.content
            assert [token for part in parts for token in part.token_ids] == choice.token_ids
        assert "checkpoint's own weights" in whole.serving and len(chunks) > 4
        with pytest.raises(BadRequestError, match=r"messages\.0\.role: input should be"):
            client.chat.completions.create(
                **{**asked, "messages": [{"role": "nobody", "content": "x"}]}, stream=True
            )

        tokens = metric(port, key, "tokens_generated_total")
        stream = client.completions.create(
            model="model", prompt="1+", n=64, max_tokens=60, temperature=2, stream=True
        )
        assert next(stream).choices[0].token_ids
        stream.close()
        deadline = time.monotonic() + 60
        while not metric(port, key, "completions_aborted_total"):
            assert time.monotonic() < deadline
        assert metric(port, key, "tokens_generated_total") < tokens + 64 * 60
    assert metric(port, key, "http_requests_total", path="/v1/chat/completions", status="400") == 1
    assert metric(port, key, "http_requests_total", path="/v1/chat/completions", status="200") == 2


def metric(port: int, key: str, name: str, **labels: str) -> float:
    """The only replica's sample in /metrics."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/metrics", headers={"Authorization": f"Bearer {key}"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    samples = [
        one
        for family in families
        for one in family.samples
        if one.name == f"asyncrl_generator_{name}" and labels.items() <= one.labels.items()
    ]
    assert len(samples) == 1, samples
    return float(samples[0].value)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_serve_deploy_hosts_the_generator_and_one_run_at_a_time_leases_it(
    cluster, runs, tmp_path, engine_starts
):
    model = runs / "quickstart-inputs" / "model"
    engine_starts.append("serve deploy")
    port = deploy(cluster, tmp_path, model)
    called = cluster.run(sys.executable, "-c", CALL, RAY_ADDRESS=f"127.0.0.1:{cluster.port}")
    assert "TOKENS [8, 8]" in called.stdout and "HOST 127.0.0.1\n" in called.stdout, (
        called.stdout + called.stderr
    )
    ours = {process.pid for process in psutil.Process(cluster.process.pid).children(recursive=True)}
    hosts = {
        c.laddr.ip
        for c in psutil.net_connections("tcp")
        if c.status == "LISTEN" and c.pid in ours and c.laddr.port == port
    }
    assert hosts == {"127.0.0.1"}

    stranger, http = Http(port, None), Http(port, cluster.environment["ASYNCRL_API_KEY"])
    body = {"model": "model", "prompt": [5, 6, 14], "n": 2, "max_tokens": 8, "seed": 1}
    assert [
        stranger.ask(*call)[0]
        for call in (("/v1/models",), ("/health",), ("/docs",), ("/v1/completions", body))
    ] == [401] * 4
    assert [
        http.ask(path)[0] for path in ("/docs", "/openapi.json", "/", "/-/routes", "/-/healthz")
    ] == [404] * 5
    assert (
        http.ask("/v1/models")[1]["data"][0]["serving"]
        == "serving the checkpoint's own weights; no lease"
    )
    status, answer = http.ask("/v1/completions", body)
    assert status == 200 and worst_difference(model, body["prompt"], answer) < 1e-4
    assert (
        http.ask("/v1/completions", {**body, "prompt": [5] * 5000})[1]["error"]["code"]
        == "context_length_exceeded"
    )
    text = http.ask("/v1/completions", {**body, "n": 1})[1]["choices"][0]["text"]
    stopped = http.ask("/v1/completions", {**body, "n": 1, "stop": text[-1]})[1]["choices"][0]
    assert (stopped["text"], stopped["finish_reason"]) == (text[: text.index(text[-1])], "stop")
    assert len(stopped["token_ids"]) == len(stopped["logprobs"]["token_logprobs"]) > 0

    # A driver with the lease is killed, and the next driver gets the lease.
    holder = [sys.executable, "-c", HOLD, f"127.0.0.1:{cluster.port}"]
    holding = subprocess.Popen(
        holder,
        env=cluster.environment,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holding.stdout.readline() == "held\n"
        assert http.ask("/health")[1]["lease"] == "run 'first'"
        attach = [
            "--generator.attach",
            "generator",
            "--max_steps",
            "4",
            "--rollout.rollout_batch_size",
            "4",
        ]
        attach += ["--warm_start.min_accuracy", "0", "--eval.max_prompts", "8"]
        second = cluster.submit(*attach, "--name", "second", variables={"ASYNCRL_RUNS": str(runs)})
        assert (
            second.returncode != 0
            and "generators 'generator' are leased by run 'first'; wait for its end"
            in second.stdout + second.stderr
        )
    finally:
        holding.kill()
        holding.wait()
    done = cluster.submit(*attach, "--name", "attached", variables={"ASYNCRL_RUNS": str(runs)})
    assert done.returncode == 0, done.stdout + done.stderr

    run_id = json.loads((runs / "attached" / "run.json").read_text())["run_id"]
    health = http.ask("/health")[1]
    assert (
        health["serving"]
        == f"serving version 4 of run {run_id}, attempt 0, the last of an ended lease"
        and health["lease"] is None
    )
    answer = http.ask("/v1/completions", body)[1]
    assert answer["weights"] == {"run_id": run_id, "attempt": 0, "version": 4}
    assert {span["version"] for choice in answer["choices"] for span in choice["versions"]} == {4}
    assert worst_difference(runs / "attached" / "hf", body["prompt"], answer) < 1e-4
    assert len(cluster.applications()) == 1

    # Serve's proxy dies. Another one takes its port, and the replica behind it is the same.
    cluster.kill("ray::ProxyActor")
    deadline = time.monotonic() + 120
    while not http.answers():
        assert time.monotonic() < deadline
    assert http.ask("/v1/completions", body)[1]["weights"] == {
        "run_id": run_id,
        "attempt": 0,
        "version": 4,
    }
    assert stranger.ask("/health")[0] == 401

    # The replica dies while it is idle. No lease held its weights, so its replacement serves the
    # checkpoint's.
    cluster.kill("ray::ServeReplica")
    deadline = time.monotonic() + 300
    while not http.answers():
        assert time.monotonic() < deadline
        time.sleep(1)
    assert http.ask("/health")[1]["serving"] == "serving the checkpoint's own weights; no lease"
    assert worst_difference(model, body["prompt"], http.ask("/v1/completions", body)[1]) < 1e-4
