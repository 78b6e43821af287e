"""Generators whose driver was killed: a watcher ends them, and so does the next attempt. Serve is
real, the engines are stubs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ray import serve

from asyncrl.generation import orphans
from asyncrl.generation.app import stop_generators
from asyncrl.generation.orphans import application_name, end_orphans
from asyncrl.generation.settings import registry_name
from asyncrl.weights.version_registry import REGISTRY_NAMESPACE, LeaseHeldError, find_registry

pytestmark = pytest.mark.timeout(240)

DRIVER = """
import asyncio, sys, ray
from stub_replicas import StubGenerator
from asyncrl.config import Config
from asyncrl.generation import app, orphans
from asyncrl.generation.owned import OwnGenerators, lease_generators
from asyncrl.preflight.specs import generator_app
from small_config import SMALL

address, name, grace_s = sys.argv[1:]
app.Generator = StubGenerator
orphans.watch_application.__defaults__ = (float(grace_s),)
ray.init(address=address, log_to_driver=False, configure_logging=False)

async def main():
    config = Config.model_validate({**SMALL, "generator": {"num_cpus": 0.1}})
    generators = OwnGenerators(name, await lease_generators(name, "'first'"),
        generator_app(config))
    await generators.begin(watched=True)
    await generators.watcher.ready.remote()
    await app.wait_for_generators(name, 120)
    print("up", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await generators.end()
    print("closed", flush=True)

asyncio.run(main())
"""


@pytest.fixture
def start_driver(ray_cluster: Any) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`start_driver(application, grace_s)`: a driver whose generators are up. What it leaves is
    ended after the test."""
    started: list[tuple[str, subprocess.Popen[str]]] = []

    def start(name: str, grace_s: float) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-c",
            DRIVER,
            ray_cluster.get_runtime_context().gcs_address,
            name,
            str(grace_s),
        ]
        driver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append((name, driver))
        assert driver.stdout is not None and driver.stdout.readline() == "up\n"
        return driver

    yield start
    for name, driver in started:
        driver.kill()
        driver.wait()
        if watcher(name, ray_cluster) is not None:
            ray_cluster.kill(watcher(name, ray_cluster))
        if name in serve.status().applications:
            stop_generators(name)


def watcher(name: str, ray_cluster: Any) -> Any | None:
    try:
        return ray_cluster.get_actor(f"{name}-watcher", namespace=REGISTRY_NAMESPACE)
    except ValueError:
        return None


def until(condition: Callable[[], bool]) -> None:
    while not condition():  # the test's timeout bounds it
        time.sleep(0.1)


def unique(attempt: int) -> tuple[str, str, str]:
    """Run's name and id, and the name of an attempt's application."""
    run_id = f"{os.getpid():08x}"
    return "orphaned", run_id, application_name("orphaned", run_id, attempt)


def test_generators_of_a_killed_driver_end_and_the_watcher_with_them(
    start_driver: Any, ray_cluster: Any
) -> None:
    name, free = unique(0)[2], ray_cluster.available_resources()["CPU"]
    driver = start_driver(name, 0.5)
    assert name in serve.status().applications and watcher(name, ray_cluster) is not None
    driver.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    until(lambda: name not in serve.status().applications)
    print(f"the application ended {time.monotonic() - killed:.1f} s after its driver was killed")
    until(lambda: watcher(name, ray_cluster) is None)
    until(lambda: ray_cluster.available_resources()["CPU"] > free - 1e-6)


def test_a_driver_that_ends_by_itself_leaves_no_watcher(
    start_driver: Any, ray_cluster: Any
) -> None:
    name = unique(1)[2]
    driver = start_driver(name, 600)
    assert driver.communicate("\n")[0] == "closed\n"
    assert name not in serve.status().applications
    until(lambda: watcher(name, ray_cluster) is None)


@pytest.mark.slow
def test_a_watcher_whose_process_dies_watches_on(start_driver: Any, ray_cluster: Any) -> None:
    """As when its node is lost, with the driver's."""
    name = unique(2)[2]
    driver = start_driver(name, 0.5)
    ray_cluster.kill(watcher(name, ray_cluster), no_restart=False)
    driver.send_signal(signal.SIGKILL)
    until(lambda: name not in serve.status().applications)
    until(lambda: watcher(name, ray_cluster) is None)


def test_the_next_attempt_ends_what_the_last_one_left_and_nothing_else(
    start_driver: Any, ray_cluster: Any
) -> None:
    run, run_id, name = unique(3)
    driver = start_driver(name, 600)  # no watcher does it in this test's time
    other = "orphaned-standing"
    serve.start()
    standing = serve.deployment(num_replicas=1, ray_actor_options={"num_cpus": 0})(
        type("ServedWeights", (), {"__call__": lambda self: 1})
    ).bind()
    serve.run(standing, name=other, route_prefix=None)
    told: list[str] = []
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(LeaseHeldError, match="leased by run 'first'"),
    ):
        patch.setattr(orphans, "NODE_LOST_S", 0.0)
        asyncio.run(end_orphans(run, run_id, told.append))
    assert (
        len(told) == 1
        and told[0].startswith("waiting up to 0 s for the end of run 'first'")
        and name in serve.status().applications
    )
    driver.send_signal(signal.SIGKILL)
    asyncio.run(end_orphans(run, "another run's", told.append))
    assert name in serve.status().applications
    asyncio.run(end_orphans(run, run_id, told.append))
    assert told[-1] == f"ending {name}, left by an earlier attempt"
    assert set(serve.status().applications) >= {other} and name not in serve.status().applications
    until(lambda: find_registry(registry_name(name)) is None)
    serve.delete(other)


class Lease:
    """Answers of `find_board`, one after another."""

    def __init__(self, *answers: Any) -> None:
        self.answers = iter(answers)

    def __call__(self, name: str) -> Any:
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_a_lease_that_is_only_out_of_sight_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's control service is away, the lease is taken again in the grace period, and ends at
    last."""
    ended: list[str] = []

    async def end(name: str) -> None:
        ended.append(name)

    async def applications() -> set[str]:
        return {"one", "two"}

    async def scenario() -> None:
        done = asyncio.Event()
        monkeypatch.setattr(
            orphans.ray, "get_runtime_context", lambda: type("Context", (), {"current_actor": None})
        )
        monkeypatch.setattr(orphans.ray, "kill", lambda actor: done.set())
        watching = orphans.ApplicationWatcher.__new__(orphans.ApplicationWatcher)
        await watching.__init__("one", 0.0)  # type: ignore[misc]
        await done.wait()

    monkeypatch.setattr(orphans, "LOOK_EVERY_S", 0)
    monkeypatch.setattr(orphans, "_end", end)
    monkeypatch.setattr(orphans, "_applications", applications)
    monkeypatch.setattr(
        orphans,
        "find_registry",
        Lease(
            "lease",
            ConnectionError("away"),
            None,
            "lease",
            None,
            ConnectionError("away"),
            None,
            None,
        ),
    )
    asyncio.run(scenario())
    assert ended == ["one"]


def test_an_orphan_whose_node_is_lost_is_waited_for_until_ray_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray shows the lease of a driver on a lost node for up to 65 s. The run's own orphan would
    refuse the resume."""
    told: list[str] = []
    given_s: list[float] = []

    async def held(registry: str) -> str | None:
        return "run 'r', process 7"

    async def take(registry: str, holder: str, application: str, release_s: float = 10.0) -> str:
        given_s.append(release_s)
        return "lease"

    async def applications() -> set[str]:
        return {application_name("r", "0123456789", 0), "asyncrl-other"}

    async def end(name: str) -> None:
        told.append(f"ended {name}")

    monkeypatch.setattr(orphans, "lease_holder", held)
    monkeypatch.setattr(orphans, "take_lease", take)
    monkeypatch.setattr(orphans, "_applications", applications)
    monkeypatch.setattr(orphans, "_end", end)
    monkeypatch.setattr(orphans.ray, "kill", lambda actor: told.append(f"ended the {actor}"))
    asyncio.run(end_orphans("r", "0123456789", told.append))
    assert (
        given_s[0] > 65
        and told[0]
        == "waiting up to 75 s for the end of run 'r', process 7, which has asyncrl-r-01234567-0"
    )
    assert told[-2:] == ["ended asyncrl-r-01234567-0", "ended the lease"]
