"""Learner ranks on two nodes that reach each other only through a cable, as two machines do."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from cable import may_cable
from ray_nodes import Nodes
from recorded import learner_config

TESTS = Path(__file__).parents[1]
DRIVER = Path(__file__).with_name("two_node_driver.py")
KNOWN_WITHIN_S = {"killed": 60, "cut off": 180}
ENDED_WITHIN_S = 60


class Driver:
    """`two_node_driver.py` on the first node."""

    def __init__(self, nodes: Nodes, action: str, *configs: str) -> None:
        self.log = nodes.logs / "driver.log"
        self.process = subprocess.Popen(
            [sys.executable, str(DRIVER), nodes.address, action, *configs],
            env=nodes.environment | {"PYTHONPATH": f"{TESTS}:{DRIVER.parent}"},
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            text=True,
        )

    def says(self, key: str) -> Any:
        """The value of the next line that has this key."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("SAYS ") and key in (said := json.loads(line[5:])):
                return said[key]
        raise AssertionError(self.log.read_text()[-3000:])


@pytest.fixture
def nodes(make_nodes: Callable[..., Nodes]) -> Nodes:
    if not may_cable():
        pytest.skip("this machine does not allow a virtual cable to a network namespace")
    made = make_nodes(cable=True)
    made.start()
    made.start()
    return made


@pytest.fixture
def drive(nodes: Nodes) -> Iterator[Callable[..., Driver]]:
    drivers: list[Driver] = []

    def start(action: str, *configs: str) -> Driver:
        drivers.append(Driver(nodes, action, *configs))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.process.kill()
        driver.process.wait()


def two_ranks(model_path: Path, root: Path, num_cpus: float) -> str:
    """A config of two ranks. Each node has one CPU."""
    config = learner_config(model_path, world_size=2, num_cpus=num_cpus)
    return config.model_copy(update={"runs_root": str(root)}).model_dump_json()


@pytest.mark.slow
def test_ranks_on_two_nodes_train_what_two_ranks_on_one_node_train(
    drive: Callable[..., Driver], tmp_path: Path, model_path: Path
) -> None:
    driver = drive(
        "losses", two_ranks(model_path, tmp_path, 1.0), two_ranks(model_path, tmp_path, 0.5)
    )
    apart, together = driver.says("result"), driver.says("result")
    assert driver.process.wait(30) == 0
    assert apart["nodes"] == 2 and together["nodes"] == 1
    assert len(apart["losses"]) == 10 and len(set(apart["losses"])) == 10
    assert apart["losses"] == pytest.approx(together["losses"], abs=1e-6)
    assert apart["norms"] == pytest.approx(together["norms"], rel=1e-6)


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lost", KNOWN_WITHIN_S)
def test_a_lost_node_is_a_dead_rank(
    nodes: Nodes, drive: Callable[..., Driver], tmp_path: Path, model_path: Path, lost: str
) -> None:
    """All of its processes end at once; or they live on, but nothing arrives from them."""
    driver = drive("until_it_fails", two_ranks(model_path, tmp_path, 1.0))
    ranks = [psutil.Process(pid) for pid in driver.says("ranks")]
    assert driver.says("steps") > 0
    began = time.monotonic()
    if lost == "killed":
        nodes.lose(1)
    else:
        nodes.cable.cut()
    error = driver.says("error")
    print(f"the driver knows after {time.monotonic() - began:.1f} s: {error['message']}")
    assert time.monotonic() - began < KNOWN_WITHIN_S[lost]
    assert error["kind"] == "LearnerDiedError" and "learner rank" in error["message"]
    began = time.monotonic()
    assert driver.process.wait(ENDED_WITHIN_S) == 0
    print(f"it ends after {time.monotonic() - began:.1f} s more")
    nodes.lose(1)
    assert psutil.wait_procs(ranks, 30)[1] == []
