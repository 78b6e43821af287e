"""Runs whose engine has one worker on each of two nodes, which share neither memory nor network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from audited_runs import audited
from cable import may_cable, may_unshare
from ray_nodes import Nodes
from run_variables import PYTHON_PATH

STEPS = 20


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    if not may_unshare("-m") or not may_cable():
        pytest.skip("this machine does not allow private mount and network namespaces")
    made = Nodes(tmp_path, cable=True)
    made.environment["PYTHONPATH"] = PYTHON_PATH
    try:
        made.start()
        made.start(Path("/dev/shm"))
        yield made
    finally:
        made.end()


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.parametrize("placement", ["decoupled", "colocate"])
def test_an_engine_on_two_nodes_trains_and_agrees_with_the_learner(
    placement: str, nodes: Nodes, start_run: Callable[..., Any], tmp_path: Path
) -> None:
    changes = {
        "max_steps": STEPS,
        "placement": placement,
        "staleness.max_staleness": 0 if placement == "colocate" else 2,
        "generator.tensor_parallel_size": 2,
        "generator.nnodes": 2,
        "generator.num_cpus": 0.3,
        "learner.num_cpus": 0.3,
        "weights.check_every_versions": 5,
        "eval": {},
    }
    token = {name: nodes.environment[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")}
    run = start_run(changes, RAY_ADDRESS=nodes.address, **token)
    assert run.wait(700) == 0, run.output
    finished = audited(tmp_path / "runs" / "run")
    assert len(finished.records("step")) == STEPS
    differences = [one["check/logprob_max_diff"] for one in finished.records("logprob_check")]
    assert len(differences) >= STEPS // 5 and max(differences) <= 1e-4
