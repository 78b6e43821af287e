"""A growing cluster: Ray's autoscaler adds nodes of its fake provider when it sees the demand of a
waiting run."""

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from free_ports import free_port
from small_config import SMALL

BIN = Path(sys.executable).parent
SCRIPT = """
import asyncio, json, sys, time
import ray
from asyncrl.run.cluster import placement
from asyncrl.config import Config
from asyncrl.contracts.errors import PlacementError

ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
TREE = json.loads(sys.argv[2])
lines = []

def room(**more):
    began = time.monotonic()
    try:
        config, table = asyncio.run(placement.wait_for_resources(Config.model_validate({**TREE,
            **more}), tell=lines.append))
        return {"replicas": config.engines.num_replicas, "table": table,
            "seconds": time.monotonic() - began}
    except PlacementError as error:
        return {"error": str(error)}

answers = {"nodes at start": len(ray.nodes())}
answers["never"] = room(learner={"num_cpus": 64.0}, placement_timeout_s=2)
answers["grown"] = room(learner={"num_cpus": 3.0}, placement_timeout_s=150)
answers["nodes"] = sum(node["Alive"] for node in ray.nodes())
answers["fewer"] = room(generator={"num_replicas": 40, "min_replicas": 2, "num_cpus": 0.4},
    placement_timeout_s=2)
answers["groups"] = [group["state"] for group in ray.util.placement_group_table().values()]
answers["lines"] = lines
print("ANSWERS " + json.dumps(answers), flush=True)
"""


@pytest.fixture
def growing(tmp_path):
    """Address of a cluster without CPUs that may add two nodes of four, and the variables to reach
    it.

    Ray's `AutoscalingCluster` first stops every Ray on this machine, and its base config is not in
    Ray's wheel.
    """
    port = free_port()
    address = f"127.0.0.1:{port}"
    types = {
        "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
        "worker": {
            "resources": {"CPU": 4, "object_store_memory": 128 << 20},
            "node_config": {},
            "min_workers": 0,
            "max_workers": 2,
        },
    }
    # All nodes have the same address, so the autoscaler must identify them by their ids. Otherwise,
    # it would restart unknown nodes over SSH, and fail.
    provider = {
        "type": "fake_multinode",
        "gcs_address": address,
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
    }
    scaling = {
        "cluster_name": "growing",
        "provider": provider,
        "max_workers": 2,
        "head_node_type": "ray.head.default",
        "available_node_types": types,
    }
    scaling |= {
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 5,
        "file_mounts_sync_continuously": False,
    }
    scaling |= {
        "auth": {},
        "docker": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        "rsync_exclude": [],
        "rsync_filter": [],
    }
    scaling |= {
        f"{kind}_commands": []
        for kind in (
            "initialization",
            "setup",
            "head_setup",
            "worker_setup",
            "head_start_ray",
            "worker_start_ray",
        )
    }
    (tmp_path / "scaling.yaml").write_text(json.dumps(scaling))
    temp = Path(f"/tmp/growing-{os.getpid()}")  # Ray's sockets need a short path
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_FAKE_CLUSTER": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    }
    options = [
        f"--port={port}",
        "--node-ip-address=127.0.0.1",
        "--include-dashboard=false",
        f"--temp-dir={temp}",
        "--object-store-memory=134217728",
    ]
    command = [
        BIN / "ray",
        "start",
        "--head",
        "--block",
        "--num-cpus=0",
        "--disable-usage-stats",
        f"--autoscaling-config={tmp_path / 'scaling.yaml'}",
        *options,
    ]
    log = tmp_path / "head.log"
    head = subprocess.Popen(
        command, env=environment, stdout=log.open("w"), stderr=subprocess.STDOUT, cwd=tmp_path
    )
    try:
        while "--block" not in log.read_text():  # the test's timeout limits this loop
            assert head.poll() is None, log.read_text()
            time.sleep(0.2)
        yield address, environment, temp
    finally:
        processes = [*psutil.Process(head.pid).children(recursive=True), psutil.Process(head.pid)]
        for process in processes:
            process.kill()
        psutil.wait_procs(processes, 10)
        head.wait()
        shutil.rmtree(temp, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_waits_for_nodes_that_the_autoscaler_adds(growing):
    address, environment, temp = growing
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, address, json.dumps(SMALL)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    logs = "\n".join(
        path.read_text()[-2000:] for path in temp.glob("session_latest/logs/monitor.*")
    )
    assert done.returncode == 0, done.stderr[-3000:] + logs
    answers = json.loads(
        next(line for line in done.stdout.splitlines() if line.startswith("ANSWERS "))[8:]
    )
    print(json.dumps(answers, indent=1))
    assert answers["nodes at start"] == 1
    assert answers["never"]["error"].startswith(
        "the cluster is too small for this run after placement_timeout_s = 2 s (CPU: 64.7 needed"
    )
    assert answers["grown"].get("replicas") == 1, logs
    assert answers["nodes"] >= 2
    assert 2 <= answers["fewer"]["replicas"] < 40
    assert set(answers["groups"]) == {"REMOVED"}
    assert any(
        line.startswith(
            "waiting up to 150 s for room on the cluster: CPU: 3.7 needed, 0 registered"
        )
        for line in answers["lines"]
    )
    assert answers["lines"][-1].startswith(
        f"only {answers['fewer']['replicas']} of generator.num_replicas = 40 have room: CPU: 16.7"
        " needed"
    )
