"""An engine with one worker on each of two nodes, which share neither memory nor network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cable import may_cable, may_unshare
from ray_nodes import Nodes

JOB = Path(__file__).with_name("across_nodes.py")
SHARED_MEMORY = Path("/dev/shm")
JOB_S = 800


@pytest.fixture
def run_job(tmp_path: Path, tiny_model: Path) -> Iterator[Callable[[str, str], dict[str, Any]]]:
    """`run_job(split, deaths)`: what `across_nodes.py` saw on two nodes."""
    if not may_unshare("-m") or not may_cable():
        pytest.skip("this machine does not allow private mount and network namespaces")
    nodes = Nodes(tmp_path, cable=True)

    def run(split: str, deaths: str) -> dict[str, Any]:
        nodes.start()
        nodes.start(SHARED_MEMORY)
        done = subprocess.run(
            [sys.executable, str(JOB), nodes.address, str(tiny_model), split, deaths],
            env={**nodes.environment, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=JOB_S,
        )
        assert done.returncode == 0, done.stderr[-6000:]
        result: dict[str, Any] = json.loads(done.stdout.partition("RESULT ")[2])
        print(json.dumps(result, indent=1))
        return result

    yield run
    nodes.end()


@pytest.mark.faults
@pytest.mark.timeout(JOB_S + 100)
def test_two_nodes_take_a_version_together_and_are_replaced_together(run_job: Any) -> None:
    result = run_job("tensor_parallel_size", "deaths")
    check_version(result)

    assert "node 1 of the engine" in result["refused"], result["refused"]
    assert "enlarge shared memory" in result["refused"], result["refused"]
    assert result["kept"] == [1, None]
    assert result["kept_difference"] <= 1e-4

    assert result["replaced"] <= 1e-4, "the new replica takes the version from the registry"
    assert not result["survivors"] and not result["orphans"]


@pytest.mark.faults
@pytest.mark.timeout(JOB_S + 100)
def test_two_nodes_have_half_of_the_layers_each(run_job: Any) -> None:
    check_version(run_job("pipeline_parallel_size", "none"))


def check_version(result: dict[str, Any]) -> None:
    assert result["nodes"] == 2
    assert result["before"] <= 1e-4 and result["after"] <= 1e-4
    assert result["fingerprints"].startswith("all "), result["fingerprints"]
    assert not result["staged"]
    left = [name for names in result["files"].values() for name in names]
    assert not [name for name in left if name.startswith("asyncrl")], left
