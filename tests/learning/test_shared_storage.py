"""Learner ranks on two nodes. A raylet in its own mount namespace simulates a machine whose disk is
not shared."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cable import may_unshare
from ray_nodes import Nodes
from recorded import learner_config

DRIVE = """
import asyncio, json, sys
import ray
from asyncrl.config import Config
from asyncrl.learning.driver import RayLearner
from asyncrl.preflight.specs import learner_spec
from asyncrl.runtime.files.shared import NotSharedError

async def main(config):
    learner = await RayLearner.create(learner_spec(config), "run", 0)
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


@pytest.mark.parametrize(
    "shared",
    [
        pytest.param(False, marks=pytest.mark.slow),
        pytest.param(True, marks=pytest.mark.faults),
    ],
)
def test_a_rank_whose_disk_is_not_shared_is_found_before_training(
    make_nodes: Callable[..., Nodes], tmp_path: Path, model_path: Path, shared: bool
) -> None:
    root = tmp_path / "runs"
    root.mkdir()
    private = tmp_path / "elsewhere"
    private.mkdir()
    if not shared and not may_unshare("-m"):
        pytest.skip("this machine does not allow a private mount namespace")
    nodes = make_nodes()
    nodes.start()
    nodes.start(private if shared else root)
    config = learner_config(model_path, world_size=2, num_cpus=1).model_copy(
        update={"runs_root": str(root), "name": "r"}
    )
    done = subprocess.run(
        [sys.executable, "-c", DRIVE, nodes.address, config.model_dump_json()],
        env=nodes.environment,
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
