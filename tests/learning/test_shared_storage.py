"""Learner ranks on two nodes. A raylet in its own mount namespace simulates a machine whose disk is
not shared."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from free_ports import free_port
from recorded import learner_config

BIN = Path(sys.executable).parent
DRIVE = """
import asyncio, json, sys
import ray
from asyncrl.config import Config
from asyncrl.learning.group import LearnerGroup
from asyncrl.preflight.specs import learner_spec
from asyncrl.runtime.shared import NotSharedError

async def main(config):
    learner = await LearnerGroup.create(learner_spec(config), "run", 0)
    try:
        nodes = {node for node, _ in learner._processes}
        config.run_directory.mkdir(parents=True, exist_ok=True)
        try:
            await learner.check_shared(config.run_directory)
            message = "shared"
        except NotSharedError as error:
            message = str(error)
        saved = await learner.save(config.run_directory / "saved")
        result = {"nodes": len(nodes), "message": message, "saved": saved}
        print("RESULT", json.dumps(result), flush=True)
    finally:
        await learner.close()

ray.init(address=sys.argv[1], log_to_driver=False)
asyncio.run(main(Config.model_validate(json.loads(sys.argv[2]))))
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Start a node with one CPU. The second node joins the first. `private` is a folder that only
    this node sees."""
    # Ray's sockets need a short path.
    port, temp = free_port(), Path(f"/tmp/asyncrl-n{os.getpid()}")
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RAY_", "ASYNCRL_"))
    }
    environment |= {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    started: list[subprocess.Popen[bytes]] = []

    def start_node(private: Path | None = None) -> tuple[str, dict[str, str]]:
        place = (
            ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={temp}"]
            if not started
            else [f"--address=127.0.0.1:{port}"]
        )
        command = [
            "ray",
            "start",
            *place,
            "--block",
            "--num-cpus=1",
            "--node-ip-address=127.0.0.1",
            "--disable-usage-stats",
        ]
        if private is not None:
            command = [
                "unshare",
                "-m",
                "sh",
                "-c",
                f"mount -t tmpfs none {private} && exec {' '.join(command)}",
            ]
        log = tmp_path / f"node_{len(started)}.log"
        started.append(
            subprocess.Popen(
                command, env=environment, stdout=log.open("wb"), stderr=subprocess.STDOUT
            )
        )
        deadline = time.monotonic() + 120
        while "--block" not in log.read_text():
            assert started[-1].poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        return f"127.0.0.1:{port}", environment

    yield start_node
    processes = [process for root in started for process in _tree(root.pid)]
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    for process in psutil.wait_procs(processes, 10)[1]:
        process.kill()
    for root in started:
        root.wait()
    shutil.rmtree(temp, ignore_errors=True)


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [*root.children(recursive=True), root]
    except psutil.NoSuchProcess:
        return []


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_a_rank_whose_disk_is_not_shared_is_found_before_training(
    start: Any, tmp_path: Path, model_path: Path, shared: bool
) -> None:
    root = tmp_path / "runs"
    root.mkdir()
    private = tmp_path / "elsewhere"
    private.mkdir()
    if not shared and subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("this machine does not allow a private mount namespace")
    address, environment = start()
    start(private if shared else root)
    config = learner_config(model_path, world_size=2, num_cpus=1).model_copy(
        update={"runs_root": str(root), "name": "r"}
    )
    done = subprocess.run(
        [sys.executable, "-c", DRIVE, address, config.model_dump_json()],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.partition("RESULT ")[2])
    assert result["nodes"] == 2
    files = {
        str(path.relative_to(root / "r" / "saved"))
        for path in (root / "r" / "saved").rglob("*")
        if path.is_file()
    }
    if shared:
        assert result["message"] == "shared" and files == set(result["saved"])
    else:
        assert re.search(
            r"r is not the same directory here and on node \S+ \(learner rank [01]\), .*; set"
            r" runs_root",
            result["message"],
        )
        assert len(files) < len(result["saved"]), "such a checkpoint would lack files"
    assert not list((root / "r").glob(".probe_*"))
