"""An address without a cluster is refused in one line, within seconds, before anything is
created."""

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from asyncrl.config import ConfigError
from asyncrl.run.cluster import cluster_address
from asyncrl.run.cluster.cluster_address import answering_cluster

LOOPBACK = "127.0.0.2"
"""Ray turns 127.0.0.1 into the machine's address in the network, where no test listens."""


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (
            "http://127.0.0.1:8265",
            (
                r"'http://127.0.0.1:8265' is the address of Ray's job service; submit with `ray job"
                r" submit --address http"
            ),
        ),
        ("https://ray.example", "the address of Ray's job service"),
        ("ray://127.0.0.1:10001", "is a Ray Client address"),
        (
            "127.0.0.1:1",
            (
                r"no Ray cluster answers at [\d.]+:1 \(Connection refused\); set it to the host and"
                r" port"
            ),
        ),
        ("127.0.0.1:99999", r"no Ray cluster answers at .*:99999"),
        ("no-such-host.invalid:6379", "RAY_ADDRESS = 'no-such-host.invalid:6379'"),
        ("nonsense", "RAY_ADDRESS = 'nonsense' is not a host and port"),
        ("127.0.0.1:", "RAY_ADDRESS = '127.0.0.1:'"),
    ],
)
def test_an_address_without_a_cluster_is_refused(monkeypatch, named, message):
    monkeypatch.setenv("RAY_ADDRESS", named)
    with pytest.raises(ConfigError, match=message):
        answering_cluster()


@pytest.mark.parametrize("named", [None, "", "local"])
def test_without_an_address_a_run_starts_a_local_cluster(monkeypatch, named):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if named is not None:
        monkeypatch.setenv("RAY_ADDRESS", named)
    assert answering_cluster() is None


def test_a_listener_that_is_not_ray_is_refused(monkeypatch):
    monkeypatch.setattr(cluster_address, "ANSWER_S", 0.2)
    with socket.create_server((LOOPBACK, 0)) as server:
        monkeypatch.setenv("RAY_ADDRESS", f"{LOOPBACK}:{server.getsockname()[1]}")
        with pytest.raises(
            ConfigError, match=r"a process listens there, but did not answer like Ray within 0.2 s"
        ):
            answering_cluster()


def test_another_grpc_service_is_refused(monkeypatch):
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port(f"{LOOPBACK}:0")
    server.start()
    try:
        monkeypatch.setenv("RAY_ADDRESS", f"{LOOPBACK}:{port}")
        with pytest.raises(
            ConfigError,
            match=r"a process listens there, but did not answer like Ray \(unimplemented\)",
        ):
            answering_cluster()
    finally:
        server.stop(None).wait()


def test_a_running_cluster_answers(ray_cluster, monkeypatch):
    import ray

    address = ray.get_runtime_context().gcs_address
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert answering_cluster() == address


def test_train_ends_with_one_line_and_creates_no_directory(tmp_path: Path):
    config = Path(__file__).parents[3] / "jobs" / "quickstart" / "quickstart.yaml"
    environment = {
        **os.environ,
        "RAY_ADDRESS": "http://127.0.0.1:8265",
        "ASYNCRL_RUNS": str(tmp_path / "runs"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl.cli", "train", str(config)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert done.returncode == 2
    assert (
        done.stderr.startswith("asyncrl: RAY_ADDRESS = 'http://127.0.0.1:8265'")
        and done.stderr.count("\n") == 1
    )
    assert not (tmp_path / "runs").exists()


def test_ctrl_c_ends_the_wait(tmp_path: Path):
    with socket.create_server((LOOPBACK, 0)) as server:
        environment = {**os.environ, "RAY_ADDRESS": f"{LOOPBACK}:{server.getsockname()[1]}"}
        code = (
            "import sys; from asyncrl.run.cluster import cluster_address as c; c.ANSWER_S = 600;"
            " print('asking', flush=True); c.answering_cluster()"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        assert process.stdout is not None and process.stdout.readline() == b"asking\n"
        server.settimeout(60)
        server.accept()[0].close()  # the first connection only tests for a listener
        server.accept()
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) != 0 and time.monotonic() - start < 30
